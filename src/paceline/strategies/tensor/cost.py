"""Cost of tensor parallelism: a slice of every layer per host, and an exchange in every layer."""

from collections.abc import Sequence

from paceline.plan.cost_model import Workload
from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.model_parallel_cost import ReplicaStep, StageHost, model_parallel_step
from paceline.strategies.tensor.spec import TensorParallel


def tensor_step_s(work: Workload, hosts: Sequence[StageHost], samples: float) -> float:
    """Step time of one replica: the slowest slice, plus the exchanges of all layers."""
    parts = len(hosts)
    slowest = max(h.fixed_s + samples * h.per_sample_s / parts for h in hosts)
    if parts == 1:
        return slowest
    latency = max(h.latency_s for h in hosts)
    rate = min(h.bytes_per_s for h in hosts)
    layers = sum(len(shape) > 1 for shape in work.shapes)
    entering = sum(
        n
        for n, shape in zip(work.input_bytes_per_sample, work.shapes, strict=False)
        if len(shape) > 1
    )
    # Forward gathers outputs; backward sums the gradients of the inputs.
    nbytes = 3 * samples * entering * (parts - 1) / parts
    return slowest + nbytes / rate + 4 * layers * (parts - 1) * latency


class TensorParallelCost(CostFacet[TensorParallel]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: TensorParallel) -> StepEstimate:
        parts = spec.model_parts

        def replica_step(machines: Sequence[StageHost], samples: float) -> ReplicaStep:
            busy = [m.fixed_s + samples * m.per_sample_s / parts for m in machines]
            return ReplicaStep(tensor_step_s(arrays.work, machines, samples), busy)

        return model_parallel_step(arrays, hosts, parts, replica_step)

    def fits(self, arrays: PoolArrays, hosts: Ints, spec: TensorParallel) -> bool:
        """Each host holds its slice of weights, gradients and optimizer state."""
        part = arrays.work.bytes * (2 + arrays.work.slots) / spec.model_parts
        return bool((arrays.memory_bytes[hosts] >= part).all())
