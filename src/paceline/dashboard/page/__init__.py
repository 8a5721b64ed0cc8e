"""Renders the dashboard page: one document with its style, scripts and the list of runs."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from paceline.report.charts import PHASE_STYLES, STRATEGY_COLOURS
from paceline.report.html_page import drop_nan
from paceline.telemetry.metrics import View, metrics_in

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "timeline.js", "app.js")

SERVER_STYLES = {
    "startup": ("#999999", ""),
    "idle": ("#BBBBBB", "."),
    "receive": ("#56B4E9", ""),
    "apply": ("#009E73", ""),
    "send": ("#D55E00", ""),
}


def render_page(folder: str, runs: list[dict[str, object]], nonce: str) -> str:
    """Returns the document; it includes the runs, so that the list is painted at once."""
    start = {
        "folder": folder,
        "runs": runs,
        "phases": PHASE_STYLES,
        "server_phases": SERVER_STYLES,
        "colours": STRATEGY_COLOURS,
        "metrics": [
            {"key": m.key, "title": m.title, "unit": m.unit.name}
            for m in metrics_in(View.DASHBOARD)
        ],
    }
    text = read("index.html")
    for mark, part in (
        ("{{nonce}}", nonce),
        ("{{style}}", read("style.css")),
        ("{{script}}", "\n".join(read(name) for name in SCRIPTS)),
        # The folder's content comes last, because it may contain marks.
        ("{{title}}", escape(folder)),
        ("{{start}}", encode(start)),
    ):
        text = text.replace(mark, part)
    return text


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def encode(value: object) -> str:
    """Returns JSON that cannot close the script element around it."""
    text = json.dumps(drop_nan(value), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
