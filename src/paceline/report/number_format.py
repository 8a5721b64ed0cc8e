"""Number formats shared by the terminal, Markdown and HTML."""

import math
from collections.abc import Callable

from paceline.report.stats import Spread

NOTHING = "–"  # noqa: RUF001


def format_seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3
    return f"{value:,.{digits}f} s"


def format_duration(seconds: float) -> str:
    """Formats a duration coarsely, for estimates of the time left."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


def format_percent(share: float | None, digits: int = 2) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}%"


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


def format_accuracy_spread(spread: Spread) -> str:
    """Formats mean ± sample standard deviation in percent; only the mean with one seed."""
    if spread["mean"] is None or spread["std"] is None:
        return format_percent(spread["mean"])
    return f"{100 * spread['mean']:.2f} ± {100 * spread['std']:.2f}%"


def format_seconds_spread(spread: Spread) -> str:
    text = format_seconds(spread["mean"])
    if spread["mean"] is None or spread["std"] is None:
        return text
    digits = 0 if spread["mean"] >= 100 else 1 if spread["mean"] >= 10 else 2
    return f"{text[:-2]} ± {spread['std']:,.{digits}f} s"


def to_single_line(text: object) -> str:
    """Removes control characters and line breaks."""
    kept = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(kept.split())


def format_spread(form: Callable[[float | None], str], spread: Spread) -> str:
    """Formats mean ± sample standard deviation; only the mean with one seed or equal values."""
    text = form(spread["mean"])
    return f"{text} ± {form(spread['std'])}" if spread["std"] else text


def format_loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def format_loss_spread(spread: Spread) -> str:
    text = format_loss(spread["mean"])
    return text if spread["std"] is None else f"{text} ± {spread['std']:.4f}"
