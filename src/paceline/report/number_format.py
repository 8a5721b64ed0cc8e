"""How numbers are written for people: one way in the terminal, in Markdown and in HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NOTHING = "–"  # noqa: RUF001


def format_seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f} s"
    if size >= 10:
        return f"{value:.1f} s"
    if size >= 1 or size == 0:
        return f"{value:.2f} s"
    return f"{value:.3f} s"


def format_duration(seconds: float) -> str:
    """A time to wait, coarse enough to be read at a glance."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


def format_percent(share: float | None, digits: int = 2) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def format_number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_bytes(value: float | None) -> str:
    if value is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_accuracy_spread(spread: Mapping[str, Any]) -> str:
    """Mean ± sample standard deviation, in percent; the mean alone with one seed."""
    if spread["mean"] is None:
        return NOTHING
    if spread["std"] is None:
        return f"{100 * spread['mean']:.2f} %"
    return f"{100 * spread['mean']:.2f} ± {100 * spread['std']:.2f} %"


def format_seconds_spread(spread: Mapping[str, Any]) -> str:
    if spread["mean"] is None:
        return NOTHING
    text = format_seconds(spread["mean"])
    if spread["std"] is None:
        return text
    digits = 0 if spread["mean"] >= 100 else 1 if spread["mean"] >= 10 else 2
    return f"{text[:-2]} ± {spread['std']:,.{digits}f} s"


def format_ratio(ratio: float | None) -> str:
    """Seconds against the first strategy's: below 1 is faster."""
    return NOTHING if ratio is None else f"× {ratio:.2f}"  # noqa: RUF001


def to_single_line(text: object) -> str:
    """The text without control characters or line breaks, for a log that others parse."""
    kept = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(kept.split())
