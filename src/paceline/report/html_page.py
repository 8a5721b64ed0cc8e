"""The page of the HTML report: style sheet, script, and helpers that escape their input."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from paceline.report.tables import ReportTable

PAGE = Path(__file__).parent / "page"

# The page may run its own script and load nothing: it works offline and sends no requests.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def render_page(title: str, body: Sequence[str], figures: Sequence[Mapping[str, object]]) -> str:
    """Returns the document; a figure is drawn in the element whose `data-figure` is its index."""
    style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("style.css", "draw.js"))
    scripts = ""
    if figures:
        scripts = (
            f"<script>{get_plotlyjs()}</script>\n"
            f"<script>const figures = {encode_figures(figures)};\n{script}</script>"
        )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
{chr(10).join(body)}
<noscript><p class="problem">The charts need JavaScript; the tables do not.</p></noscript>
{scripts}
</body>
</html>
"""


def encode_figures(figures: Sequence[Mapping[str, object]]) -> str:
    """Returns JSON that cannot close the script element around it."""
    text = json.dumps(drop_nan(figures), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def drop_nan(value: Any) -> Any:
    """Returns the value with None for NaN and infinities, which JSON does not support."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: drop_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [drop_nan(part) for part in value]
    return value


def render_table(table: ReportTable, heading: str = "h2") -> list[str]:
    """Renders a table with its title and note; nothing if it has no rows."""
    if not table.rows:
        return []
    kinds = table.align(' class="word"', "")
    head = "".join(f"<th{k}>{escape(n)}</th>" for k, n in zip(kinds, table.headers, strict=True))
    lines = [
        "".join(f"<td{k}>{escape(cell)}</td>" for k, cell in zip(kinds, row, strict=True))
        for row in table.formatted_rows()
    ]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return [
        f"<{heading}>{escape(table.title)}</{heading}>",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>",
        *([render_note(table.note)] if table.note else []),
    ]


def render_grid(boxes: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(boxes)}</div>'


def render_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def render_note(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def render_legend(entries: Sequence[tuple[str, str]]) -> str:
    """Renders a legend of (SVG, text) pairs, which wraps on a narrow screen."""
    items = "".join(f"<li>{picture}<span>{escape(text)}</span></li>" for picture, text in entries)
    return f'<ul class="legend">{items}</ul>'


def render_line_sample(colour: str, dash: str) -> str:
    gaps = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}[dash]
    return (
        '<svg width="30" height="12" aria-hidden="true"><line x1="0" y1="6" x2="30" y2="6" '
        f'stroke="{colour}" stroke-width="3" stroke-dasharray="{gaps}"/></svg>'
    )


SWITCH_SAMPLE = (
    '<svg width="14" height="16" aria-hidden="true"><g stroke="currentColor" fill="none">'
    '<line x1="7" y1="0" x2="7" y2="16" stroke-dasharray="2 2"/>'
    '<path d="M7 3.5 L11.5 8 L7 12.5 L2.5 8 Z" stroke-width="1.6"/></g></svg>'
)


def render_patch_sample(colour: str, hatching: str) -> str:
    """Renders a patch with the hatching of the bars."""
    marks = {
        "": "",
        "/": "M0 6 L6 0 M4 14 L14 4 M10 14 L14 10 M0 12 L12 0",
        "x": "M0 0 L14 14 M14 0 L0 14 M0 7 L7 0 M7 14 L14 7 M7 0 L14 7 M0 7 L7 14",
        ".": "M3 3 h1 M10 3 h1 M3 10 h1 M10 10 h1 M6.5 6.5 h1",
    }[hatching]
    return (
        '<svg width="14" height="14" aria-hidden="true">'
        f'<rect width="14" height="14" fill="{colour}"/>'
        f'<path d="{marks}" stroke="#333333" fill="none"/></svg>'
    )
