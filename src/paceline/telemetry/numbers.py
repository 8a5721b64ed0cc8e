"""Conversion of untrusted JSON values to numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def as_finite(value: object) -> float | None:
    """Returns the number; None for anything missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_mapping(value: object) -> Mapping[str, Any]:
    """Returns the JSON object; an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}
