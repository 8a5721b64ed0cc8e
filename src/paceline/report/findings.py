"""Findings: sentences computed from the runs. Differences are tested for significance."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.comparison import Comparison, StrategyEntry, spread_of
from paceline.report.number_format import format_number, format_percent, format_seconds
from paceline.report.pareto import choose_measure, find_frontier
from paceline.report.phase_times import average_phases
from paceline.report.run_groups import RunGroup
from paceline.report.run_loader import ReportRun, rows_or_empty
from paceline.report.stats import Spread, as_finite, compare_means, mean_and_std, mean_of
from paceline.report.time_to_accuracy import choose_target_accuracy, fastest, time_to_accuracy_rows
from paceline.telemetry.numbers import as_mapping

MIN_IDLE_FRACTION = 0.05
"""Less idle time of the workers is not reported."""

UNEQUAL_UPDATES = 1.5
"""From this factor on, a finding states that the numbers of updates differ."""

EVEN_FACTOR = 0.8
"""Workers whose idle times are within this factor are not listed separately."""


def list_findings(
    comparison: Comparison, runs: Sequence[ReportRun], *, target: float | None = None
) -> list[str]:
    """Returns plain sentences, the most important first; not escaped for HTML."""
    entries = comparison["strategies"]
    task = RunGroup(name="", runs=list(runs), comparison=comparison)
    return [
        *describe_failures(comparison),
        *describe_fastest(entries),
        *describe_accuracy(entries),
        *describe_target(task, target),
        *describe_frontier(task),
        *sentences_on_verdicts(entries, runs),
        *describe_waiting(entries, runs),
        *describe_switches(entries),
        *sentences_on_staleness(entries, runs),
        *describe_cautions(entries, runs),
    ]


def describe_failures(comparison: Comparison) -> list[str]:
    found = []
    for entry in comparison["strategies"]:
        if entry["runs_failed"]:
            total = entry["runs_total"]
            noun = "run" if total == 1 else "runs"
            text = f"{entry['runs_failed']} of {total} {noun} of {entry['label']} did not finish"
            rest = entry["runs_done"]
            found.append(f"{text}; its metrics are from the other {rest}." if rest else f"{text}.")
    return found


def describe_fastest(entries: Sequence[StrategyEntry]) -> list[str]:
    """Names the fastest strategy and whether the difference is significant."""
    timed = [entry for entry in entries if entry["seconds"]["mean"] is not None]
    if not timed:
        return []
    ranked = sorted(timed, key=lambda entry: mean_of(entry["seconds"]))
    best = ranked[0]
    if len(timed) == 1:
        return [describe_alone(best)]
    others = ranked[1:2] if timed[0] in ranked[:2] else [ranked[1], timed[0]]
    return [compare_time(best, other, comparisons=len(timed) - 1) for other in others]


def describe_alone(entry: StrategyEntry) -> str:
    spread = entry["seconds"]
    text = f"{entry['label']} took {format_seconds(spread['mean'])}"
    if spread["n"] == 1:
        return f"{text} in its only run; the spread over seeds is unknown."
    return f"{text} on average over {spread['n']} runs (standard deviation {spread['std']:.2g} s)."


def compare_time(best: StrategyEntry, other: StrategyEntry, *, comparisons: int) -> str:
    a, b = best["seconds"], other["seconds"]
    difference, sure = compare_means(a, b, comparisons=comparisons)
    amount = f"{format_seconds(-difference)} ({format_percent(-difference / mean_of(b), 1)}) less"
    names = best["label"], other["label"]
    times = format_seconds(a["mean"]), format_seconds(b["mean"])
    if sure is None:
        return (
            f"{names[0]} took {times[0]} and {names[1]} {times[1]}, which is {amount}; "
            f"with {describe_counts(a, b)} the significance is unknown."
        )
    if sure:
        return (
            f"{names[0]} was faster than {names[1]}: {times[0]} vs. {times[1]}, {amount} "
            "(significant)."
        )
    return (
        f"{names[0]} took {times[0]} and {names[1]} {times[1]} on average; "
        f"the difference of {format_seconds(-difference)} is not significant."
    )


def describe_counts(a: Spread, b: Spread) -> str:
    return "one seed each" if a["n"] == b["n"] == 1 else "one seed on one side"


def describe_accuracy(entries: Sequence[StrategyEntry]) -> list[str]:
    """Compares test accuracy, or else validation accuracy, with the first strategy."""
    measure, word = "test_acc", "test accuracy"
    known = [entry for entry in entries if spread_of(entry, measure)["mean"] is not None]
    if not known:
        measure, word = "val_acc", "validation accuracy"
        known = [entry for entry in entries if spread_of(entry, measure)["mean"] is not None]
    if len(known) < 2:
        return []
    first, rest = known[0], known[1:]
    weighed = [
        (
            entry,
            *compare_means(
                spread_of(entry, measure), spread_of(first, measure), comparisons=len(rest)
            ),
        )
        for entry in rest
    ]
    base = f"{first['label']} ({format_percent(spread_of(first, measure)['mean'])})"
    found = []
    for entry, difference, sure in weighed:
        if sure:
            direction = "higher" if difference > 0 else "lower"
            found.append(
                f"{entry['label']}: {word} {format_percent(spread_of(entry, measure)['mean'])}, "
                f"{100 * abs(difference):.2f} points {direction} than {base} "
                "(significant)."
            )
    same = [item for item in weighed if item[2] is False]
    if same:
        found.append(
            f"{word.capitalize()} does not differ significantly from {base}: "
            + ", ".join(f"{e['label']} ({100 * d:+.2f} points)" for e, d, _ in same)
            + "."
        )
    single = [item for item in weighed if item[2] is None]
    if single:
        found.append(
            f"{word.capitalize()} compared with {base}: "
            + ", ".join(f"{e['label']} {100 * d:+.2f} points" for e, d, _ in single)
            + ". The significance is unknown with a single seed; use more seeds to compare."
        )
    return found


def describe_target(task: RunGroup, target: float | None) -> list[str]:
    """Names the strategy that reached the target first, and the slowest that reached it."""
    chosen = choose_target_accuracy(task) if target is None else target
    if chosen is None or len(task.entries) < 2:
        return []
    found = time_to_accuracy_rows(task, chosen)
    word = f"a validation accuracy of {format_percent(chosen, 1)}"
    sentences = []
    ranked = fastest(found)
    if len(ranked) > 1:
        best, last = ranked[0], ranked[-1]
        a, b = mean_of(best.seconds), mean_of(last.seconds)
        _, sure = compare_means(best.seconds, last.seconds, comparisons=len(ranked) - 1)
        end = {
            True: "a significant difference",
            False: "not a significant difference",
            None: "of unknown significance with a single seed",
        }[sure]
        sentences.append(
            f"To reach {word}, {best.label} took {format_seconds(a)} and {last.label}, the "
            f"slowest, {format_seconds(b)}: {b / a:.2f} times as long, "
            f"{format_seconds(b - a)} more, {end}."
        )
    never = [f"{r.label} ({r.reached} of {r.runs})" for r in found if r.runs > r.reached]
    if never:
        sentences.append(f"Not every run reached {word}: {', '.join(never)}.")
    return sentences


def describe_frontier(task: RunGroup) -> list[str]:
    front = find_frontier(task)
    measured = [e for e in task.entries if e["seconds"]["mean"] is not None]
    if len(measured) < 2 or not front:
        return []
    measure = choose_measure(task)
    parts = [
        f"{e['label']} ({format_percent(spread_of(e, measure)['mean'])} in "
        f"{format_seconds(e['seconds']['mean'])})"
        for e in front
    ]
    word = "accuracy" if measure == "test_acc" else "validation accuracy"
    return [f"Pareto-optimal in time and {word} (by mean): {'; '.join(parts)}."]


def sentences_on_verdicts(entries: Sequence[StrategyEntry], runs: Sequence[ReportRun]) -> list[str]:
    """Lists the verdicts of the runs."""
    found = []
    for entry in entries:
        mine = [run for run in runs if run.label == entry["label"] and run.is_done]
        counts: dict[str, list[str]] = {}
        for run in mine:
            for verdict in rows_or_empty(run.result.get("verdicts")):
                counts.setdefault(str(verdict.get("rule")), []).append(str(verdict.get("text")))
        for rule, texts in counts.items():
            found.append(
                f"{entry['label']}, {rule} ({len(texts)} times in {len(mine)} runs): {texts[0]}."
            )
    return found


def describe_waiting(entries: Sequence[StrategyEntry], runs: Sequence[ReportRun]) -> list[str]:
    """Reports the fraction of idle time, and the workers with the most and least of it."""
    parts = []
    for entry in entries:
        phases = average_phases([r for r in runs if r.label == entry["label"] and r.is_done])
        idle = {w: p.get("wait", 0.0) + p.get("comm_exposed", 0.0) for w, p in phases.items()}
        total = sum(sum(p.values()) for p in phases.values())
        if total <= 0 or sum(idle.values()) / total < MIN_IDLE_FRACTION:
            continue
        text = f"{format_percent(sum(idle.values()) / total, 0)} under {entry['label']}"
        most, least = max(idle, key=idle.__getitem__), min(idle, key=idle.__getitem__)
        if idle[least] < EVEN_FACTOR * idle[most]:
            text += (
                f" ({most} the most, {format_seconds(idle[most])}; "
                f"{least} the least, {format_seconds(idle[least])})"
            )
        parts.append(text)
    if not parts:
        return []
    return [f"Idle time of the workers (wait, comm exposed): {'; '.join(parts)}."]


def describe_switches(entries: Sequence[StrategyEntry]) -> list[str]:
    parts = []
    for entry in entries:
        pause, drain = entry["switch_pause_s"], entry["switch_drain_s"]
        if pause["mean"] is not None and entry["seconds"]["mean"]:
            share = format_percent(pause["mean"] / entry["seconds"]["mean"], 1)
            parts.append(
                f"{format_seconds(pause['mean'])} under {entry['label']} ({share} of its time, "
                f"plus {format_seconds(drain['mean'])} of draining)"
            )
    return [f"Switching paused training for {'; '.join(parts)} per run."] if parts else []


def sentences_on_staleness(
    entries: Sequence[StrategyEntry], runs: Sequence[ReportRun]
) -> list[str]:
    parts = []
    for entry in entries:
        mean = entry["staleness_mean"]["mean"]
        if mean:
            rows = [
                as_mapping(r.result.get("staleness")) for r in runs if r.label == entry["label"]
            ]
            most = mean_and_std(row.get("max") for row in rows)["max"]
            end = f", {format_number(most)} at most" if most is not None else ""
            parts.append(f"{format_number(mean)} under {entry['label']}{end}")
    if not parts:
        return []
    return [f"Gradient staleness in updates: {'; '.join(parts)}."]


def describe_cautions(entries: Sequence[StrategyEntry], runs: Sequence[ReportRun]) -> list[str]:
    """Lists reasons why the runs are not directly comparable."""
    found = []
    done = [run.result for run in runs if run.is_done]
    for name, words in (("model", "different models"), ("data", "different datasets")):
        kinds = sorted({str(r.get(name)) for r in done if r.get(name) is not None})
        if len(kinds) > 1:
            found.append(f"The runs use {words} ({', '.join(kinds)}), so compare with care.")
    counts = mean_and_std(r.get("samples") for r in done)
    if counts["n"] > 1 and counts["min"] != counts["max"]:
        found.append(
            f"The runs trained on different numbers of samples ({format_number(counts['min'])} to "
            f"{format_number(counts['max'])}), so times compare whole runs, not equal work."
        )
    updates = mean_and_std(r.get("updates") for r in done)
    factor = (updates["max"] or 0.0) / updates["min"] if updates["min"] else 0.0
    if factor >= UNEQUAL_UPDATES:
        found.append(
            f"The runs made different numbers of updates ({format_number(updates['min'])} to "
            f"{format_number(updates['max'])}, {factor:.1f} times as "
            "many), which may explain differences in accuracy."
        )
    if any(entry["virtual"] for entry in entries):
        found.append("Times of virtual runs are simulated, not measured.")
    if done and all(as_finite(r.get("seed")) is not None for r in done):
        most = max(entry["runs_done"] for entry in entries)
        if most == 1 and len(entries) > 1:
            found.append("Each strategy ran with a single seed, so the spread is unknown.")
    return found
