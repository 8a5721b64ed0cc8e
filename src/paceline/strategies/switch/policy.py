"""The policy of a switch: phases that begin at stated points, or by its trigger."""

from __future__ import annotations

from paceline.protocol.switch_policy import RunHorizon, SwitchPolicy, resolve_switch_points
from paceline.specs.expression import format_expression
from paceline.strategies.switch.spec import Switch


def make_policy(spec: Switch, horizon: RunHorizon) -> SwitchPolicy:
    """Returns the policy of a run. Raises SpecError for a switch that the run does not support."""
    if spec.when is not None:
        return spec.when.make_policy(horizon, spec.parts)
    names = [f"at={format_expression(p.to_value())}" for p in spec.at]
    points = [p.resolve(horizon.samples_per_epoch, horizon.epochs) for p in spec.at]
    return resolve_switch_points(names, points, horizon)
