"""`--until "val_acc>=0.97"`: a condition that ends a run early."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import SpecError, suggest_name

METRICS = ("val_acc", "val_loss", "train_acc", "train_loss")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([A-Za-z_]+)\s*(>=|<=|>|<)\s*([-+0-9.eE]+)\s*")


@dataclass(frozen=True)
class StopCondition:
    """Comparison of a metric with a number."""

    metric: str
    sign: str
    value: float

    def is_met(self, metric: float | None) -> bool:
        """Returns False for a metric that was not measured."""
        return metric is not None and _COMPARE[self.sign](metric, self.value)

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:g}"


def parse_stop_condition(text: str) -> StopCondition:
    """Parses the value of --until; raises SpecError."""
    match = _FORM.fullmatch(text)
    try:
        value = float(match[3]) if match else 0.0
    except ValueError:
        match = None
    if match is None:
        raise SpecError(f"--until {text!r} is not a condition; use for example 'val_acc>=0.97'")
    if match[1] not in METRICS:
        raise SpecError(f"--until: unknown metric {match[1]!r}; {suggest_name(match[1], METRICS)}")
    return StopCondition(match[1], match[2], value)
