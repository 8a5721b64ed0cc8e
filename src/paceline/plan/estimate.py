"""Time, energy and price of training on given hosts with one strategy."""

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost_model import FORWARD_FRACTION, Workload
from paceline.plan.facet import StepEstimate
from paceline.plan.pool_arrays import GUESSED_DOUBT, Ints, PoolArrays
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import BASELINE, cost

STARTUP_DOUBT = 0.8
"""Relative error of the startup time where it is a guess."""
LINK_DOUBT = 0.5
"""Relative error of the communication time where the links are guesses."""
CHECKPOINT_S = 0.005
"""Fixed time of a checkpoint: the difference between runs here with one and with five."""
DISK_BYTES_PER_S = 200e6
"""Rate at which a checkpoint is written; a guess, that of a hard disk."""


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of a strategy on a set of hosts."""

    strategy: str
    machines: tuple[int, ...]
    """Indices into the pool."""
    step_s: float
    """Seconds per global batch, or the same number of samples."""
    samples_per_s: float
    seconds: float
    """Seconds of the run, or until it reaches the accuracy goal; infinity if it does not."""
    seconds_interval: tuple[float, float]
    """90% interval of `seconds`; the upper end is infinity if the goal may not be reached."""
    startup_s: float
    train_s: float
    evaluation_s: float
    checkpoint_s: float
    joules: float
    price: float
    staleness: float
    efficiency: float
    """Progress per sample, relative to synchronous training on global batches."""
    to_goal: bool
    """True if the times are those until the accuracy goal is reached."""

    def value(self, objective: str) -> float:
        """Returns the time, energy or price of equal progress.

        A strategy that makes less progress per sample would need more epochs.
        """
        amount = {"time": self.seconds, "energy": self.joules, "cost": self.price}[objective]
        if self.to_goal or self.efficiency >= 1 or not amount:
            return amount
        longer = self.startup_s + (self.seconds - self.startup_s) / self.efficiency
        return amount * longer / self.seconds


def correction_key(strategy: Strategy, machines: int) -> str:
    """Returns the key of runs that share a correction: their strategy, or one key on one host."""
    return strategy.name if machines > 1 else BASELINE


def estimate(arrays: PoolArrays, hosts: Ints, strategy: Strategy) -> Estimate:
    """Estimates a run with one worker per host, or per GPU.

    Raises UsageError if the strategy, or a phase of it, has no cost facet.
    """
    work = arrays.work
    step: StepEstimate = cost(strategy).step(arrays, hosts, strategy)
    correction = arrays.correction(correction_key(strategy, len(hosts)), hosts)
    step_s = step.step_s * (1.0 if correction is None else correction.factor)
    startup_s = arrays.startup_s
    if startup_s is None:
        startup_s = float(arrays.startup[hosts].max())
    total = work.samples * work.epochs
    least, samples, most = _samples(arrays, step.efficiency)
    share = samples / total
    rate = work.batch / step_s
    train_s = samples / rate
    slowest = FORWARD_FRACTION / len(hosts) * float(arrays.per_sample[hosts].max())
    validation_s = slowest * work.evaluated.get("val", 0) * work.epochs
    last_s = slowest * work.evaluated.get("test", 0) if arrays.goal is None else 0.0
    evaluation_s = _part(validation_s, share) + last_s
    checkpoints_s = work.checkpoints * _checkpoint_s(work)
    checkpoint_s = _part(checkpoints_s, share)
    each_s = (validation_s + checkpoints_s) / total
    seconds = startup_s + train_s + evaluation_s + checkpoint_s
    busy_fraction = np.clip(step.busy / step_s, 0.0, 1.0)
    watts = arrays.idle_w[hosts] + busy_fraction * (arrays.busy_w[hosts] - arrays.idle_w[hosts])
    doubt = math.hypot(
        float(arrays.doubt[hosts].max()),
        step.doubt,
        LINK_DOUBT * (1 - float(busy_fraction.max())) * bool(arrays.guesses_link[hosts].any()),
    )
    if correction is not None and correction.relative_error is not None:
        doubt = math.hypot(correction.relative_error, step.doubt)
    guesses_startup = arrays.startup_s is None and bool(arrays.guesses_startup[hosts].any())
    startup_doubt = STARTUP_DOUBT if guesses_startup else 0.0

    def bound(limit: float, sign: int) -> float:
        """Returns a bound of the interval, given that of the samples."""
        if math.isinf(limit):
            return limit
        middle = samples if math.isfinite(samples) else limit
        running_s = middle * (each_s + 1 / rate)
        part = math.hypot(limit / middle - 1, doubt)
        off_s = math.hypot(part * running_s, startup_doubt * startup_s)
        return max(0.0, startup_s + running_s + last_s + sign * off_s)

    return Estimate(
        strategy=str(strategy),
        machines=tuple(int(i) for i in hosts),
        step_s=step_s,
        samples_per_s=rate,
        seconds=seconds,
        seconds_interval=(bound(least, -1), bound(most, 1)),
        startup_s=startup_s,
        train_s=train_s,
        evaluation_s=evaluation_s,
        checkpoint_s=checkpoint_s,
        joules=_part(float(watts.sum()), seconds),
        price=_part(float(arrays.price[hosts].sum()) / 3600, seconds),
        staleness=step.staleness,
        efficiency=step.efficiency,
        to_goal=arrays.goal is not None,
    )


def _samples(arrays: PoolArrays, efficiency: float) -> tuple[float, float, float]:
    """Returns the samples to train, with the bounds of their 90% interval.

    With a goal, infinity means that it is not reached in the job's epochs. The lower bound is that
    of synchronous training: how much less a sample is worth is itself an average over many jobs.
    """
    total = float(arrays.work.samples * arrays.work.epochs)
    goal = arrays.goal
    if goal is None:
        return total, total, total
    least, most = goal.curve.interval(goal.target)
    expected = goal.curve.samples_to(goal.target) / efficiency
    most /= efficiency
    return (
        least,
        expected if expected <= total else math.inf,
        most if most <= total else math.inf,
    )


def _part(seconds: float, share: float) -> float:
    return seconds * share if seconds else 0.0  # the share may be infinite


def _checkpoint_s(work: Workload) -> float:
    return CHECKPOINT_S + work.bytes * (1 + work.slots) / DISK_BYTES_PER_S


def find_guesses(arrays: PoolArrays, hosts: Ints) -> list[str]:
    """Returns what a prediction assumes because nothing was measured."""
    guessed = [arrays.hosts[int(i)].host for i in hosts if arrays.doubt[i] >= GUESSED_DOUBT]
    more = f" and {len(guessed) - 1} more" if len(guessed) > 1 else ""
    found = {
        "startup": arrays.startup_s is None and bool(arrays.guesses_startup[hosts].any()),
        f"speed of {guessed[0]}{more}" if guessed else "": bool(guessed),
        "links": len(hosts) > 1 and bool(arrays.guesses_link[hosts].any()),
        "watts": bool(arrays.guesses_watts[hosts].any()),
        "variation between seeds": arrays.goal is not None and len(arrays.goal.curve.runs) == 1,
    }
    return [name for name, is_guess in found.items() if is_guess]
