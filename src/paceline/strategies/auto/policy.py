"""The policy of auto: starts with the best candidate, measures, and changes when that pays."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from paceline.protocol.history import History
from paceline.protocol.pace import PLAN_AHEAD_S
from paceline.protocol.switch_policy import RunHorizon, SwitchDecision, SwitchPolicy
from paceline.protocol.throughput import ThroughputWindow
from paceline.specs.measurement_window import WINDOW_BATCHES, WINDOW_S
from paceline.specs.patience import is_safe_start, wait_samples
from paceline.specs.strategy import Strategy
from paceline.strategies.auto.goodput import (
    MAX_CV,
    MODEL_ERROR,
    Goodput,
    LiveCluster,
    Observation,
    mean_rate,
    predict_goodput,
)
from paceline.strategies.auto.spec import Auto
from paceline.telemetry.events import EpochRow

WINDOWS = 2
"""Windows of a strategy before it is judged."""
PREDICTED_MARGIN = MODEL_ERROR
"""Gain that a candidate that has not run must promise: nine of ten predictions are closer."""
MEASURED_MARGIN = 0.03
"""Gain that a candidate that has run must promise: the usual difference between two windows."""
RETRY_LR = 0.5
"""A candidate that made the loss rise is tried again at this fraction of the learning rate."""

UNDO_ERRORS = 2.0
"""Standard errors by which accuracy must have fallen during the run to undo a change."""
RETURN_ERRORS = 1.0
"""The same for an earlier state at the end, which costs no training."""

FAILED = ("regressed", "diverged")


class AutoPolicy(SwitchPolicy):
    """Chooses the candidate with the largest goodput; a function of the run's history.

    Every change keeps a copy of the state before it. A change is undone from that copy when the
    training loss of all windows after it is above every window before it, when validation is worse
    by more than its standard error, or when the loss diverges. The run ends with the state of the
    best epoch if the last validation is worse than any before a change.
    """

    def __init__(
        self,
        horizon: RunHorizon,
        candidates: Mapping[int, Strategy],
        phases: tuple[Strategy, ...],
        start: Strategy | None = None,
    ) -> None:
        """`candidates` are those of `phases` that fit these workers, by index."""
        self._first = start
        self._horizon = horizon
        self._total = None if horizon.epochs is None else horizon.total
        self._candidates = candidates
        self._phases = phases
        self._recalled = {
            phase: factor
            for phase, spec in candidates.items()
            if (factor := horizon.recalled.get(str(spec))) is not None
        }

    # ---- decisions ----------------------------------------------------------------------------

    def decide(self, history: History) -> SwitchDecision | None:
        if history.samples == 0:
            return self._choose_start()
        failure = self._find_regression(history)
        if failure is not None:
            return failure
        windows = history.throughput.latest(history.phase, WINDOWS)
        if not windows or len(self._candidates) < 2:
            return None
        is_early = len(windows) < WINDOWS
        expected = self._expected_best(history) if is_early else None
        if is_early and expected is None:
            return None
        cluster = self._cluster()
        corrections = self._measure(history, cluster, windows)
        if corrections is None:
            return None
        decision = self._choose(history, cluster, corrections)
        # One window is enough only to confirm what the probes promised.
        if is_early and (decision is None or decision.phase != expected):
            return None
        return decision

    def _cluster(self) -> LiveCluster:
        horizon = self._horizon
        cluster = LiveCluster(horizon.workers, horizon.batch, horizon.exchange)
        cluster.set_cv(min(MAX_CV, horizon.cv))
        return cluster

    def _choose_start(self) -> SwitchDecision:
        first = next(iter(self._candidates))
        if self._first is not None:
            given = self._phases.index(self._first)
            if given in self._candidates:
                return self._start(given, "as given", {})
        speeds = self._horizon.speeds
        if len(self._candidates) == 1:
            return self._start(first, "the only candidate", {})
        if not speeds or not all(speed > 0 for speed in speeds):
            return self._start(first, "the first candidate, as speeds were not measured", {})
        found = self._predict_from_probes()
        best = self._best_start(found)
        second = max((p for p in found if p != best), key=lambda p: found[p].value, default=best)
        why = (
            f"{found[best].value:.0f} samples/s expected, {found[second].value:.0f} with "
            f"{self._phases[second]} (workers differ in speed by x{max(speeds) / min(speeds):.2f}"
        )
        if self._recalled:
            why += f", corrected by an earlier run for {len(self._recalled)} candidates"
        if self._horizon.exchange is not None:
            why += f", an exchange takes {1e3 * self._horizon.exchange.gradient_s:.3g} ms"
        why += ")"
        return self._start(best, why, self._figures(found))

    def _predict_from_probes(self) -> dict[int, Goodput]:
        cluster = self._cluster()
        cluster.set_speeds(self._horizon.speeds)
        return predict_goodput(cluster, self._candidates, self._recalled)

    def _best_start(self, found: Mapping[int, Goodput]) -> int:
        """Returns the best candidate that is safe from the start.

        That is the first exact one, unless another is clearly better, or an inexact one by more
        than the error of a prediction. Without a probe, an exchange can make any inexact candidate
        a bad start.
        """
        safe = [p for p in found if self._is_safe(found, p)] or list(found)
        exact = [p for p in safe if self._candidates[p].exact] or safe
        first = max(exact, key=lambda p: found[p].value)
        if self._gain(found, exact[0], first) < MEASURED_MARGIN:
            first = exact[0]
        if self._horizon.exchange is None:
            return first
        best = max(safe, key=lambda p: found[p].value)
        return best if self._gain(found, first, best) >= PREDICTED_MARGIN else first

    def _is_safe(self, found: Mapping[int, Goodput], phase: int) -> bool:
        waits = self._candidates[phase].lag_bound(self._horizon.workers) == 0.0
        efficiency, batch = found[phase].efficiency, self._horizon.batch
        return is_safe_start(efficiency, waits, batch, self._total)

    def _drop_early(self, found: Mapping[int, Goodput], history: History) -> dict[int, Goodput]:
        """Drops candidates for which it is too early (`specs.patience`)."""
        safe = [g for p, g in found.items() if self._is_safe(found, p)]
        if not safe:
            return dict(found)
        best = max(safe, key=lambda goodput: goodput.value)
        # Work is planned ahead, so that a decision takes effect later.
        effective = history.samples + PLAN_AHEAD_S * found[history.phase].samples_per_s

        def is_due(phase: int) -> bool:
            lead = found[phase].samples_per_s / best.samples_per_s - 1
            return effective >= wait_samples(lead, self._horizon.batch, self._total)

        return {
            p: goodput
            for p, goodput in found.items()
            if p == history.phase or self._is_safe(found, p) or is_due(p)
        }

    @staticmethod
    def _gain(found: Mapping[int, Goodput], now: int, other: int) -> float:
        return 1 - found[now].value / found[other].value

    def _expected_best(self, history: History) -> int | None:
        """Returns the candidate that the probes expect to be better than the first one, if any."""
        speeds = self._horizon.speeds
        is_probed = self._horizon.exchange is not None and speeds and all(speeds)
        if history.switches or self._first is not None or not is_probed:
            return None
        found = self._predict_from_probes()
        best = max(found, key=lambda p: found[p].value)
        return best if self._gain(found, history.phase, best) >= PREDICTED_MARGIN else None

    def _start(self, phase: int, why: str, figures: Mapping[str, Any]) -> SwitchDecision:
        left_out = [str(p) for i, p in enumerate(self._phases) if i not in self._candidates]
        note = f"; not possible with these workers: {', '.join(left_out)}" if left_out else ""
        if not self._horizon.validates and len(self._candidates) > 1:
            note += "; without validation data, changes are judged by the training loss"
        reason = f"auto: starts with {self._phases[phase]}: {why}{note}"
        return SwitchDecision(phase, reason, "start", measurements=figures)

    def _measure(
        self, history: History, cluster: LiveCluster, windows: list[ThroughputWindow]
    ) -> dict[int, float] | None:
        """Describes the cluster by the newest windows; returns the corrections of candidates.

        None if some workers have no work, so that their speeds are unknown.
        """
        observed = {history.phase: Observation(self._phases[history.phase], windows)}
        for phase in self._candidates:
            earlier = history.throughput.windows_of_phase(phase)[-WINDOWS:]
            if phase != history.phase and len(earlier) == WINDOWS:
                observed[phase] = Observation(self._phases[phase], earlier)
        newest = sorted(observed.values(), key=lambda o: -o.windows[-1].ended)
        if not cluster.measure(newest[0]):
            return None
        corrections: dict[int, float] = {}
        for phase, seen in observed.items():
            if cluster.set_machines(seen):
                predicted = cluster.batch / cluster.estimate(seen.strategy).step_s
                corrections[phase] = mean_rate(seen.windows) / predicted
        cluster.set_machines(newest[0])
        return corrections

    def _choose(
        self,
        history: History,
        cluster: LiveCluster,
        corrections: Mapping[int, float],
    ) -> SwitchDecision | None:
        now = history.phase
        allowed = {
            p: s for p, s in self._candidates.items() if p == now or self._may_try(history, p)
        }
        found = predict_goodput(cluster, allowed, self._share_corrections(corrections, now))
        if now not in found:
            return None
        due = self._drop_early(found, history)
        best = max(due, key=lambda phase: (due[phase].value, phase == now))
        # Every change raises the bar, so that a run on a noisy cluster does not keep changing.
        measured = best in corrections or best in self._recalled
        margin = MEASURED_MARGIN if measured else PREDICTED_MARGIN
        margin *= 1 + len(history.switches)
        gain = self._gain(found, now, best)
        figures = {
            **self._figures(found),
            "gain": round(gain, 4),
            "exchange_s": round(cluster.exchange_s, 6),
            "latency_s": round(cluster.latency_s, 6),
            "cv": round(cluster.cv, 4),
            "progress": self._progress(history.samples),
            "corrections": {str(self._phases[p]): round(f, 4) for p, f in corrections.items()},
        }
        speed = f"auto: {self._phases[now]} makes {found[now].value:.0f} samples/s"
        later = ""
        early = max(found, key=lambda phase: found[phase].value)
        if early not in due:
            later = f"; for {self._phases[early]} ({found[early].value:.0f}) it is too early"
        if best == now:
            why = f"{speed}, more than any candidate{later}"
            return SwitchDecision(now, why, "best", measurements=figures)
        promise = f"{speed}, {self._phases[best]} {found[best].value:.0f}"
        if gain < margin:
            why = f"{promise}: less than {100 * margin:.0f}% better, stays{later}"
            return SwitchDecision(now, why, "no gain", measurements=figures)
        left = self._remaining(history)
        # The duration of a window under the candidate, which may be much faster.
        window_s = max(WINDOW_S, WINDOW_BATCHES * self._horizon.batch / found[best].samples_per_s)
        saved_s = math.inf if left is None else left / found[now].value * gain
        cost_s = self._pause_s(history) + WINDOWS * window_s * gain
        too_late = left is not None and left / found[best].samples_per_s < WINDOWS * window_s
        if saved_s <= cost_s or too_late:
            why = f"{promise}, but too little of the run is left to see the effect: stays"
            return SwitchDecision(now, why, "too late", measurements=figures)
        cause = "slower" if history.switches and self._was(history, best) else "gain"
        if left is not None:
            left_s = left / found[now].samples_per_s
            promise += f": saves {saved_s:.1f} s of the remaining {left_s:.1f} s"
        return SwitchDecision(best, promise, cause, measurements=figures, snapshot=True)

    def _share_corrections(self, known: Mapping[int, float], now: int) -> dict[int, float]:
        """Applies corrections also to candidates that have not run.

        A variant of a strategy that has run gets its correction, any other that of the active one,
        which contains the overhead of every step.
        """
        by_name = {self._phases[phase].name: factor for phase, factor in known.items()}
        shared = {
            phase: by_name.get(spec.name, known.get(now, 1.0))
            for phase, spec in self._candidates.items()
        }
        return shared | self._recalled | dict(known)

    def _was(self, history: History, phase: int) -> bool:
        return str(self._phases[phase]) == history.switches[-1].before

    def _figures(self, found: Mapping[int, Goodput]) -> dict[str, Any]:
        return {str(self._phases[p]): round(g.value, 3) for p, g in found.items()}

    def _progress(self, samples: int) -> float | None:
        if self._horizon.epochs is None:
            return None
        return round(self._horizon.progress(samples), 4)

    def _remaining(self, history: History) -> int | None:
        """Samples until the end of the run; None if the length is unknown."""
        return None if self._total is None else self._total - history.samples

    def _pause_s(self, history: History) -> float:
        """Returns the longest pause of a change so far, or none before the first."""
        return max((row.pause_s or 0.0 for row in history.switches), default=0.0)

    def _may_try(self, history: History, phase: int) -> bool:
        """Returns False for a candidate that made the loss rise at a similar learning rate."""
        text = str(self._phases[phase])
        failed = [r for r in history.switches if r.cause in FAILED and r.before == text]
        if not failed:
            return True
        if self._horizon.epochs is None:
            return False
        then = self._horizon.lr_factor(failed[-1].samples)
        return self._horizon.lr_factor(history.samples) <= RETRY_LR * then

    # ---- changes that made things worse -------------------------------------------------------

    def _find_regression(self, history: History) -> SwitchDecision | None:
        """Returns the decision to undo the last change if it made the model worse."""
        if not history.switches or history.switches[-1].cause in FAILED:
            return None
        change = history.switches[-1]
        before = next((i for i, p in enumerate(self._phases) if str(p) == change.before), None)
        if before is None:
            return None
        why = self._loss_rose(history, before) or self._validation_fell(history, change.samples)
        if why is None:
            return None
        reason = f"auto: {why}: continues from the state before {change.after}"
        return SwitchDecision(before, reason, "regressed", restore=True)

    def _loss_rose(self, history: History, before: int) -> str | None:
        """Compares windows: by chance, three are above eight others once in 165 times."""
        monitor = history.throughput
        after = [w.loss for w in monitor.latest(history.phase, 3)]
        earlier = [w.loss for w in monitor.windows_of_phase(before)]
        known = [loss for loss in after if loss is not None]
        reference = [loss for loss in earlier if loss is not None]
        if len(known) < 3 or len(reference) < 3:
            return None
        if min(known) <= max(reference):
            return None
        return f"the training loss rose from {max(reference):.4g} to {min(known):.4g} and more"

    def _validation_fell(self, history: History, changed_at: int) -> str | None:
        before = [row for row in history.rows if row.samples <= changed_at]
        if not before or len(before) == len(history.rows):
            return None
        then, now = before[-1], history.rows[-1]
        if not _is_worse(then, now, history.val_rows, UNDO_ERRORS):
            return None
        return f"validation fell from {_describe(then)} to {_describe(now)}"

    # ---- the best state -----------------------------------------------------------------------

    def keeps_state(self, history: History) -> bool:
        """Keeps the state of every epoch whose validation loss is the lowest so far."""
        losses = [row.val_loss for row in history.rows if row.val_loss is not None]
        return bool(losses) and len(self._candidates) > 1 and losses[-1] == min(losses)

    def conclude(self, history: History) -> SwitchDecision | None:
        """Returns the decision to end with the best epoch's state if the last one is worse.

        That is the case if its validation is worse than the best by more than the standard error,
        or at all if there is no accuracy, or than a validation before a change of strategy.
        Otherwise returns what changes have cost.
        """
        rows = [row for row in history.rows[:-1] if row.val_loss is not None]
        if not rows or history.rows[-1].val_loss is None:
            return self._summarize(history)
        best, last = min(rows, key=lambda row: row.val_loss or 0.0), history.rows[-1]
        changed_at = max((row.samples for row in history.switches), default=-1)
        judges = [row for row in rows if last.val_acc is None or row.samples <= changed_at]
        lost = any((row.val_loss or 0.0) < (last.val_loss or 0.0) for row in judges)
        if not (lost or _is_worse(best, last, history.val_rows, RETURN_ERRORS)):
            return self._summarize(history)
        reason = (
            f"auto: validation ended at {_describe(last)}, after {_describe(best)} in epoch "
            f"{best.epoch}: returns the state of that epoch"
        )
        return SwitchDecision(history.phase, reason, "restored", restore=True, best=True)

    def _summarize(self, history: History) -> SwitchDecision | None:
        """Returns the time lost to changes, and to candidates that were left again."""
        changes = [d for d in history.decisions if d.chosen != d.strategy and d.cause != "start"]
        if not changes:
            return None
        spent_s = sum((row.pause_s or 0.0) + row.drain_s for row in history.switches)
        for change, next_change in pairwise(changes):
            # A slower candidate makes less progress, a failed one none.
            if next_change.cause in (*FAILED, "slower"):
                gain = next_change.figures.get("gain")
                lost = gain if next_change.cause == "slower" and isinstance(gain, float) else 1.0
                spent_s += lost * (next_change.seconds - change.seconds)
        share = spent_s / history.train_seconds if history.train_seconds else 0.0
        reason = (
            f"auto: {len(history.switches)} change(s); {spent_s:.2f} s, {100 * share:.1f}% of the "
            "training time, went to changes and to candidates that were left again"
        )
        figures = {"explored_s": round(spent_s, 6), "explored": round(share, 6)}
        return SwitchDecision(history.phase, reason, "summary", measurements=figures)


def _is_worse(then: EpochRow, now: EpochRow, val_rows: int, errors: float) -> bool:
    """Returns whether a validation is worse than another by more than chance explains.

    The loss must be higher, and the accuracy, where there is one, lower by some standard errors of
    the difference of two shares of `val_rows` rows.
    """
    if now.val_loss is None or then.val_loss is None or now.val_loss <= then.val_loss:
        return False
    if now.val_acc is None or then.val_acc is None or not val_rows:
        return False
    p = max(then.val_acc * (1 - then.val_acc), 1 / val_rows)
    return then.val_acc - now.val_acc > errors * math.sqrt(2 * p / val_rows)


def _describe(row: EpochRow) -> str:
    accuracy = "" if row.val_acc is None else f", accuracy {100 * row.val_acc:.2f}%"
    return f"loss {row.val_loss:.4g}{accuracy}"


def make_policy(spec: Auto, horizon: RunHorizon) -> SwitchPolicy:
    return AutoPolicy(horizon, spec.usable(horizon.workers), spec.phases, spec.start)
