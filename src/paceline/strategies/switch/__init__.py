"""switch: several strategies in sequence in one run."""

from __future__ import annotations

from paceline.strategies.registry import StrategyRecord
from paceline.strategies.switch.spec import Switch

RECORD = StrategyRecord(
    spec=Switch,
    policy="paceline.strategies.switch.policy:make_policy",
    cost="paceline.strategies.switch.cost:COST",
    examples=(
        "switch(allreduce, ps, at=50%)",
        "switch(ps, allreduce, at=samples(13))",
        "switch(allreduce, ps(sync=bsp, servers=2), single, ps, at=(10%, 40%, 90%))",
        "switch(ps(sync=ssp(1)), grouped(size=2), ps(sync=dssp), at=(30%, 60%))",
        "switch(allreduce, ps, when=auto)",
        "switch(allreduce, ps, when=straggler(greedy, windows=1))",
        "switch(allreduce, ps, when=straggler(elastic, windows=1))",
    ),
)
