"""The HTML report: one self-contained file that works offline; its helpers escape their input."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from paceline.report import charts, study_tables
from paceline.report.charts import Figure
from paceline.report.document import CURVES, ReportDocument, ReportOpening, ReportSection
from paceline.report.runs import UNFINISHED, ReportRun, group_by_label
from paceline.report.tables import ReportTable

PAGE = Path(__file__).parent / "page"
CURVE_NAMES = tuple(measure.replace("_", "-") for measure in CURVES)

# The page may run its own script and load nothing: it works offline and sends no requests.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


PROBLEMS = {
    "done": "is done, but its folder is incomplete",
    UNFINISHED: "is unfinished; the metrics below are from its events",
}


def render_report(content: ReportDocument) -> str:
    figures: list[Figure] = []
    runs = content.runs
    body = [*render_header(content), *render_problems(runs)]
    opening = content.opening
    figures += [figure for _, _, figure in opening.figures]
    body += render_opening(opening)
    several = len(content.sections) > 1
    if several:
        links = [
            f'<li><a href="#task-{number}">{escape(section.task.name)}</a></li>'
            for number, section in enumerate(content.sections)
        ]
        body.append(f"<ul>{''.join(links)}</ul>")
    for number, section in enumerate(content.sections):
        if several:
            body.append(f'<h2 class="task" id="task-{number}">{escape(section.task.name)}</h2>')
        boxes = {
            name: render_figure(heading, figure, place)
            for place, (name, heading, figure) in enumerate(section.figures, len(figures))
        }
        figures += [figure for _, _, figure in section.figures]
        body += render_section(section, boxes)
    for sheet in content.run_sheets:
        body += render_table(sheet)
    if not any(sheet.name == "versions" for sheet in content.run_sheets):
        body.append("<h2>Configuration and versions</h2>")
    for run in runs:
        if run.config:
            text = json.dumps(run.config, indent=2, ensure_ascii=False)
            body.append(
                f"<details><summary>{escape(describe_run(run))}</summary>"
                f"<pre>{escape(text)}</pre></details>"
            )
    return render_page(content.title, body, figures)


def render_opening(opening: ReportOpening) -> list[str]:
    """The figures of the opening are the first ones of the page."""
    parts = [render_list(opening.statements)] if opening.statements else []
    for sheet in opening.sheets:
        parts += render_table(sheet)
    boxes = [
        render_figure(heading, figure, place)
        for place, (_, heading, figure) in enumerate(opening.figures)
    ]
    return [*parts, render_grid(boxes)] if boxes else parts


def render_figure(heading: str, figure: Figure, number: int) -> str:
    """Reserves the height of a figure, so that the page does not move when it is drawn."""
    return (
        f"<div><h3>{escape(heading)}</h3>"
        f'<div data-figure="{number}" style="height:{figure["layout"]["height"]}px"></div></div>'
    )


def render_section(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    """`boxes`: the elements of the section's figures, by name."""
    parts = render_table(study_tables.make_summary_table(section.task.comparison))
    if section.findings:
        parts += ["<h2>Findings</h2>", render_list(section.findings)]
    parts += [
        *render_curves(section, boxes),
        *render_frontier(boxes),
        *render_phases(section, boxes),
        *render_staleness(section, boxes),
        *render_machines(boxes),
    ]
    if section.sheets:
        parts.append("<h2>Tables</h2>")
    for sheet in section.sheets:
        parts += render_table(sheet, heading="h3")
    return parts


def render_header(content: ReportDocument) -> list[str]:
    runs = content.runs
    virtual = sum(bool(run.result.get("virtual")) for run in runs)
    badge = ""
    if virtual:
        some = "" if virtual == len(runs) else f"{virtual} run{'s' if virtual > 1 else ''} in "
        badge = f' <span class="badge">{some}virtual time</span>'
    return [
        f"<h1>{escape(content.title)}</h1>",
        f'<p class="soft">{escape(content.facts)}{badge}</p>',
    ]


def render_problems(runs: Sequence[ReportRun]) -> list[str]:
    """Lists failed runs with their errors, and incomplete folders."""
    found = []
    for run in runs:
        if run.is_done and not run.missing:
            continue
        head = PROBLEMS.get(run.status, f"ended as {run.status}")
        text = f"<strong>{escape(describe_run(run))}</strong> {escape(head)}."
        if run.result.get("error"):
            text += f"<pre>{escape(str(run.result['error']))}</pre>"
        if run.missing:
            text += render_list(run.missing)
        found.append(f'<div class="problem">{text}</div>')
    return found


def describe_run(run: ReportRun) -> str:
    seed = run.result.get("seed")
    return f"{run.name}: {run.label}" + (f", seed {seed}" if seed is not None else "")


def render_curves(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    drawn = [box for name, box in boxes.items() if name.startswith(CURVE_NAMES)]
    heading = "<h2>Accuracy and loss</h2>"
    if not drawn:
        note = "No run has finished an epoch, so there are no curves."
        return [heading, render_note(note)]
    runs = section.task.runs
    styles = charts.style_strategies(group_by_label(runs))
    entries = [(render_line_sample(*style), label) for label, style in styles.items()]
    if any(run.switches for run in runs):
        entries.append((SWITCH_SAMPLE, "switch of strategy"))
    parts = [heading, render_legend(entries)]
    if len(runs) > len(styles):
        parts.append(render_note("Thin lines are single seeds, bold lines are means."))
    return [*parts, render_grid(drawn)]


def render_frontier(boxes: Mapping[str, str]) -> list[str]:
    drawn = [boxes[name] for name in ("frontier", "published") if name in boxes]
    if not drawn:
        return []
    note = (
        "Filled marks are Pareto-optimal: no other strategy is both faster and more accurate (by "
        "mean). Small points are single runs; colours as in the curves above."
    )
    if "published" in boxes:
        note += " Dashed lines are published results, solid lines are these runs."
    return ["<h2>Accuracy vs. time</h2>", render_note(note), render_grid(drawn)]


def render_phases(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    drawn = {name: figure for name, _, figure in section.figures if name.startswith("phases-")}
    if not drawn:
        return []
    used = {trace["name"] for figure in drawn.values() for trace in figure["data"]}
    legend = [
        (render_patch_sample(*style), phase.replace("_", " "))
        for phase, style in charts.PHASE_STYLES.items()
        if phase in used
    ]
    return [
        "<h2>Time categories</h2>",
        render_note("Seconds per worker and time category, on one scale."),
        render_legend(legend),
        render_grid([boxes[name] for name in drawn]),
    ]


def render_machines(boxes: Mapping[str, str]) -> list[str]:
    drawn = [box for name, box in boxes.items() if name.startswith("machines-")]
    if not drawn:
        return []
    note = "Whole machines over the whole run, one run per strategy; the table is of training only."
    return ["<h2>Machines over time</h2>", render_note(note), render_grid(drawn)]


def render_staleness(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    groups = group_by_label(section.task.runs)
    counts = {label: charts.count_staleness(group) for label, group in groups.items()}
    heading = "<h2>Staleness</h2>"
    if not any(counts.values()):
        return []
    if "staleness" not in boxes:
        return [heading, render_note("No gradient was stale.")]
    stale, fresh = [], []
    for label, (colour, _) in charts.style_strategies(groups).items():
        if any(count for lag, count in counts[label].items() if lag > 0):
            stale.append((render_patch_sample(colour, ""), label))
        elif counts[label]:
            fresh.append(label)
    parts = [heading, render_legend(stale), boxes["staleness"]]
    if fresh:
        parts.append(render_note(f"Not stale: {', '.join(fresh)}."))
    return parts


def render_page(title: str, body: Sequence[str], figures: Sequence[Mapping[str, object]]) -> str:
    """Returns the document; a figure is drawn in the element whose `data-figure` is its index."""
    style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("style.css", "draw.js"))
    scripts = ""
    if figures:
        scripts = (
            f"<script>{get_plotlyjs()}</script>\n"
            f"<script>const figures = {encode_json(figures)};\n{script}</script>"
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


def encode_json(value: object) -> str:
    """Returns JSON that cannot close the script element around it."""
    text = json.dumps(drop_nan(value), separators=(",", ":"), ensure_ascii=True)
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
