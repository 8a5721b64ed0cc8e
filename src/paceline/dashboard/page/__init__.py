"""The page: one document with its style, its script and the list of runs inside."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from paceline.report.charts import PHASE_STYLES, STRATEGY_COLOURS
from paceline.report.html_page import drop_nan

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "timeline.js", "app.js")

SERVER_STYLES = {
    "startup": ("#999999", ""),
    "idle": ("#BBBBBB", "."),
    "receive": ("#56B4E9", ""),
    "apply": ("#009E73", ""),
    "send": ("#D55E00", ""),
}


def render_page(folder: str, runs: list[dict[str, Any]], nonce: str) -> str:
    """The document; with the runs in it the first thing painted is the list, not a wait."""
    start = {
        "folder": folder,
        "runs": runs,
        "phases": PHASE_STYLES,
        "server_phases": SERVER_STYLES,
        "colours": STRATEGY_COLOURS,
    }
    text = read("index.html")
    for mark, part in (
        ("{{nonce}}", nonce),
        ("{{style}}", read("style.css")),
        ("{{script}}", "\n".join(read(name) for name in SCRIPTS)),
        # Last what comes from the folder: nothing in it is a mark.
        ("{{title}}", escape(folder)),
        ("{{start}}", encode(start)),
    ):
        text = text.replace(mark, part)
    return text


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def encode(value: Any) -> str:
    """JSON that cannot end the script element around it."""
    text = json.dumps(drop_nan(value), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
