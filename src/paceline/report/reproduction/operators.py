"""Operators by category: published ones of TensorFlow, and torch's in our profiles."""

import re
from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.report.operator_profile import OperatorProfile, read_profile
from paceline.report.published_results import normalize_label, read_published_json
from paceline.report.reproduction.matching import Reproduced
from paceline.telemetry.schema import as_finite, as_mapping

CATEGORIES = {
    "convolution, backward": r"conv\w*_backward|mkldnn.*backward|Conv2DBackprop",
    "convolution, forward": r"conv|_FusedConv2D",
    "dense layers": r"\b(addmm|mm|linear|matmul|bmm)|MatMul",
    "batch normalization": r"batch_norm|BatchNorm",
    "pooling": r"pool",
    "activation": r"relu|threshold",
    "bias gradient": r"BiasAddGrad",
    "additions": r"\b(add_?|AddN|AddV2)$",
    "dropout": r"dropout|bernoulli|RandomUniform|GreaterEqual",
    "optimizer": r"ResourceApply|optimizer|_foreach|addcdiv|addcmul|adadelta",
    "regularizer and multiplication": r"^(Mul|Square|Sum)$|aten::(mul_?|square|sum|pow)$",
    "casts and copies": r"^Cast$|aten::(copy_|to|_to_copy|contiguous|clone)$",
    "all-reduce": r"allreduce|CollectiveReduce",
    "input": r"^(Dataset|PyFunc)$",
}
"""The first category that matches counts; TensorFlow's names are matched as printed."""
OTHER = "other"
EXCHANGE, INPUT = "all-reduce", "input"


def categorize(operator: str) -> str:
    for category, pattern in CATEGORIES.items():
        if re.search(pattern, operator):
            return category
        if category not in ("regularizer and multiplication", INPUT) and re.search(
            pattern, operator, re.IGNORECASE
        ):
            return category
    return OTHER


def add_up(us: Mapping[str, float | None]) -> dict[str, float]:
    """Returns microseconds by category."""
    sums: dict[str, float] = {}
    for operator, value in us.items():
        if value is not None:
            category = categorize(operator)
            sums[category] = sums.get(category, 0.0) + value
    return sums


def published_operators(workload: str, batch: int, system: str) -> dict[str, float]:
    """Returns microseconds per epoch by category; `system` is spark_horovod or tensorflow."""
    for row in read_published_json("curves")["operator_us_per_epoch"]:
        if (normalize_label(row["dataset"]), row["batch"]) == (normalize_label(workload), batch):
            return add_up({name: both[system] for name, both in row["us"].items()})
    return {}


def our_operators(row: Reproduced | None) -> dict[str, float]:
    """Returns microseconds per epoch by category, mean over workers and runs; empty if unknown.

    Input is Python's work, which torch's profiler does not see: it is taken from the recorded time
    of preparing batches.
    """
    found: list[OperatorProfile] = []
    for run in row.runs if row is not None else ():
        if run.path is not None:
            try:
                found.append(read_profile(run.path))
            except UsageError:
                continue
    if row is None or not found:
        return {}
    sums: dict[str, float] = {}
    for profile in found:
        for category, us in add_up({op: profile.us_per_epoch(op) for op in profile.ms}).items():
            sums[category] = sums.get(category, 0.0) + us / len(found)
    prepared = input_seconds(row)
    if prepared is not None:
        sums[INPUT] = 1e6 * prepared
    return sums


def input_seconds(row: Reproduced | None) -> float | None:
    """Returns the seconds of preparing batches per epoch, mean over workers and runs."""
    values = []
    for run in row.runs if row is not None else ():
        epochs = run.result.get("epochs") or 0
        workers = [as_mapping(each) for each in as_mapping(run.result.get("input")).values()]
        if epochs and workers:
            made = sum(as_finite(each.get("make_s")) or 0.0 for each in workers)
            values.append(made / len(workers) / epochs)
    return Reproduced.average(values)


def exchange_seconds(row: Reproduced | None) -> float | None:
    """Returns the seconds of exposed exchange and waiting per epoch, mean over workers and runs."""
    values = []
    for run in row.runs if row is not None else ():
        epochs, phases = run.result.get("epochs") or 0, list(run.phases.values())
        if epochs and phases:
            exposed = sum(p.get("comm_exposed", 0.0) + p.get("wait", 0.0) for p in phases)
            values.append(exposed / len(phases) / epochs)
    return Reproduced.average(values)
