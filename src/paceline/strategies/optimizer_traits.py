"""Decides once how an optimizer's work may be divided: by exact type, never by class name.

A class of the user's own may have any name and any formula. It is treated as one that needs
whole parameters, unless it has an attribute `elementwise` that is true.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SLICEABLE_TYPES: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
    }
)
"""Classes of which a second instance over slices of the parameters gives the same bits."""

ELEMENTWISE_TYPES = SLICEABLE_TYPES | {torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax}
"""torch.optim classes whose update of an element depends on that element alone."""


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """Permitted divisions of an optimizer's work, and the reason."""

    elementwise: bool
    """A part of a parameter may be updated without the rest: servers may split it anywhere."""
    flattenable: bool
    """Adjacent parameters may be updated as one long tensor, with the same bits."""
    sliceable: bool
    """Workers that share the weights may each update a slice with a separate instance."""
    reason: str
    """One clause for logs: what the decision was based on."""


def optimizer_traits(optimizer: torch.optim.Optimizer) -> OptimizerTraits:
    """The traits of an optimizer, by its exact type or its own `elementwise` attribute."""
    kind = type(optimizer)
    known = kind in ELEMENTWISE_TYPES
    declared = getattr(optimizer, "elementwise", None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    elementwise = known if declared is None else bool(declared)
    if declared is not None:
        reason = f"{name} declares elementwise={elementwise}"
    elif known:
        reason = f"torch.optim.{kind.__name__} updates each element independently"
    else:
        reason = f"{name} is not known to be element-wise and has no `elementwise` attribute"
    # torch's fused kernels compute the last few elements of a tensor differently.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return OptimizerTraits(
        elementwise=elementwise,
        flattenable=elementwise and known and not fused,
        sliceable=elementwise and kind in SLICEABLE_TYPES,
        reason=reason,
    )


def momentum_of(group: Mapping[str, Any]) -> float:
    """Returns the decay of the momentum of a parameter group; the first beta of Adam."""
    beta = group.get("beta_1") or group.get("betas", (0.0,))[0]  # Keras or torch.
    return float(group.get("momentum") or beta)
