"""A few sentences computed from the runs; none claims what the spread of seeds does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.report.comparison import as_mapping
from paceline.report.number_format import format_number, format_percent, format_seconds
from paceline.report.pareto import choose_measure, find_frontier
from paceline.report.phase_times import average_phases
from paceline.report.run_groups import RunGroup
from paceline.report.run_loader import ReportRun, rows_or_empty
from paceline.report.stats import as_finite, compare_means, mean_and_std
from paceline.report.time_to_accuracy import choose_target_accuracy, fastest, time_to_accuracy_rows

WORTH_A_WORD = 0.05
"""A share of the workers' time below which waiting is not mentioned."""

UNEQUAL_UPDATES = 1.5
"""From this factor on it is said that runs made unequally many updates."""

UNEVEN = 0.8
"""Workers that wait within this factor of each other wait alike."""


def list_findings(
    comparison: dict[str, Any], runs: Sequence[ReportRun], *, target: float | None = None
) -> list[str]:
    """Plain sentences, most important first; not escaped."""
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


def describe_failures(comparison: dict[str, Any]) -> list[str]:
    found = []
    for entry in comparison["strategies"]:
        if entry["runs_failed"]:
            total = entry["runs_total"]
            noun = "run" if total == 1 else "runs"
            text = f"{entry['runs_failed']} of {total} {noun} of {entry['label']} did not finish"
            rest = entry["runs_done"]
            found.append(f"{text}; its figures come from the other {rest}." if rest else f"{text}.")
    return found


def describe_fastest(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Which strategy took the least time, and whether the seeds allow to say so."""
    timed = [entry for entry in entries if entry["seconds"]["mean"] is not None]
    if not timed:
        return []
    ranked = sorted(timed, key=lambda entry: float(entry["seconds"]["mean"]))
    best = ranked[0]
    if len(timed) == 1:
        return [describe_alone(best)]
    others = ranked[1:2] if timed[0] in ranked[:2] else [ranked[1], timed[0]]
    return [compare_time(best, other, comparisons=len(timed) - 1) for other in others]


def describe_alone(entry: dict[str, Any]) -> str:
    spread = entry["seconds"]
    text = f"{entry['label']} took {format_seconds(spread['mean'])}"
    if spread["n"] == 1:
        return f"{text} in its one run; one seed says nothing about the spread."
    return f"{text} on average over {spread['n']} runs (standard deviation {spread['std']:.2g} s)."


def compare_time(best: dict[str, Any], other: dict[str, Any], *, comparisons: int) -> str:
    a, b = best["seconds"], other["seconds"]
    difference, sure = compare_means(a, b, comparisons=comparisons)
    amount = f"{format_seconds(-difference)} ({format_percent(-difference / b['mean'], 1)}) less"
    names = best["label"], other["label"]
    times = format_seconds(a["mean"]), format_seconds(b["mean"])
    if sure is None:
        return (
            f"{names[0]} took {times[0]} and {names[1]} {times[1]}, that is {amount}; "
            f"with {describe_counts(a, b)} this cannot be told from chance."
        )
    if sure:
        return (
            f"{names[0]} was faster than {names[1]}: {times[0]} against {times[1]}, {amount}, "
            "more than the spread of the seeds explains."
        )
    return (
        f"{names[0]} took {times[0]} and {names[1]} {times[1]} on average; "
        f"the difference of {format_seconds(-difference)} is within the spread of the seeds."
    )


def describe_counts(a: dict[str, Any], b: dict[str, Any]) -> str:
    return "one seed each" if a["n"] == b["n"] == 1 else "one seed on one side"


def describe_accuracy(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Accuracy of each strategy against the first's: test accuracy, else validation."""
    measure, word = "test_acc", "test accuracy"
    known = [entry for entry in entries if entry[measure]["mean"] is not None]
    if not known:
        measure, word = "val_acc", "validation accuracy"
        known = [entry for entry in entries if entry[measure]["mean"] is not None]
    if len(known) < 2:
        return []
    first, rest = known[0], known[1:]
    weighed = [
        (entry, *compare_means(entry[measure], first[measure], comparisons=len(rest)))
        for entry in rest
    ]
    base = f"{first['label']} ({format_percent(first[measure]['mean'])})"
    found = []
    for entry, difference, sure in weighed:
        if sure:
            direction = "higher" if difference > 0 else "lower"
            found.append(
                f"{entry['label']}: {word} {format_percent(entry[measure]['mean'])}, "
                f"{100 * abs(difference):.2f} points {direction} than {base}, more than the "
                "spread of the seeds explains."
            )
    same = [item for item in weighed if item[2] is False]
    if same:
        found.append(
            f"{word.capitalize()} differs from that of {base} by less than the seeds spread for "
            + ", ".join(f"{e['label']} ({100 * d:+.2f} points)" for e, d, _ in same)
            + ": no difference is claimed."
        )
    single = [item for item in weighed if item[2] is None]
    if single:
        found.append(
            f"{word.capitalize()} against {base}: "
            + ", ".join(f"{e['label']} {100 * d:+.2f} points" for e, d, _ in single)
            + ". With one seed on a side this cannot be told from chance; "
            "repeat with more seeds to compare."
        )
    return found


def describe_target(task: RunGroup, target: float | None) -> list[str]:
    """Which strategy had the target first, beside the slowest to have it."""
    chosen = choose_target_accuracy(task) if target is None else target
    if chosen is None or len(task.entries) < 2:
        return []
    found = time_to_accuracy_rows(task, chosen)
    word = f"a validation accuracy of {format_percent(chosen, 1)}"
    sentences = []
    ranked = fastest(found)
    if len(ranked) > 1:
        best, last = ranked[0], ranked[-1]
        a, b = best.seconds["mean"], last.seconds["mean"]
        _, sure = compare_means(best.seconds, last.seconds, comparisons=len(ranked) - 1)
        end = {
            True: "more than the spread of the seeds explains",
            False: "which is within the spread of the seeds",
            None: "which one seed cannot tell from chance",
        }[sure]
        sentences.append(
            f"To {word}, {best.label} took {format_seconds(a)} and {last.label}, the last, "
            f"{format_seconds(b)}: {b / a:.2f} times as long, {format_seconds(b - a)} more, {end}."
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
        f"{e['label']} ({format_percent(e[measure]['mean'])} in "
        f"{format_seconds(e['seconds']['mean'])})"
        for e in front
    ]
    word = "accuracy" if measure == "test_acc" else "validation accuracy"
    return [f"By the means, none beats these in both time and {word}: {'; '.join(parts)}."]


def sentences_on_verdicts(
    entries: Sequence[dict[str, Any]], runs: Sequence[ReportRun]
) -> list[str]:
    """What limited the runs, as their telemetry judged them."""
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


def describe_waiting(entries: Sequence[dict[str, Any]], runs: Sequence[ReportRun]) -> list[str]:
    """Who waits: the share of the workers' time spent idle, and which worker most and least."""
    parts = []
    for entry in entries:
        phases = average_phases([r for r in runs if r.label == entry["label"] and r.is_done])
        idle = {w: p.get("wait", 0.0) + p.get("comm_exposed", 0.0) for w, p in phases.items()}
        total = sum(sum(p.values()) for p in phases.values())
        if total <= 0 or sum(idle.values()) / total < WORTH_A_WORD:
            continue
        text = f"{format_percent(sum(idle.values()) / total, 0)} under {entry['label']}"
        most, least = max(idle, key=idle.__getitem__), min(idle, key=idle.__getitem__)
        if idle[least] < UNEVEN * idle[most]:
            text += (
                f" ({most} the most, {format_seconds(idle[most])}; "
                f"{least} the least, {format_seconds(idle[least])})"
            )
        parts.append(text)
    if not parts:
        return []
    return [f"Share of the workers' time spent idle (wait, comm exposed): {'; '.join(parts)}."]


def describe_switches(entries: Sequence[dict[str, Any]]) -> list[str]:
    parts = []
    for entry in entries:
        pause, drain = entry["switch_pause_s"], entry["switch_drain_s"]
        if pause["mean"] is not None and entry["seconds"]["mean"]:
            share = format_percent(pause["mean"] / entry["seconds"]["mean"], 1)
            parts.append(
                f"{format_seconds(pause['mean'])} under {entry['label']} ({share} of its time, "
                f"and {format_seconds(drain['mean'])} of draining beside it)"
            )
    return [f"Switching paused training a run for {'; '.join(parts)}."] if parts else []


def sentences_on_staleness(
    entries: Sequence[dict[str, Any]], runs: Sequence[ReportRun]
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
    return [f"Gradients were computed on weights this many updates old: {'; '.join(parts)}."]


def describe_cautions(entries: Sequence[dict[str, Any]], runs: Sequence[ReportRun]) -> list[str]:
    """What makes the runs less comparable than a table suggests."""
    found = []
    done = [run.result for run in runs if run.is_done]
    for name, words in (("model", "different models"), ("data", "different data sets")):
        kinds = sorted({str(r.get(name)) for r in done if r.get(name) is not None})
        if len(kinds) > 1:
            found.append(f"The runs are of {words} ({', '.join(kinds)}): compare with care.")
    counts = mean_and_std(r.get("samples") for r in done)
    if counts["n"] > 1 and counts["min"] != counts["max"]:
        found.append(
            f"The runs did not train on equally many samples ({format_number(counts['min'])} to "
            f"{format_number(counts['max'])}): seconds compare whole runs, not equal work."
        )
    updates = mean_and_std(r.get("updates") for r in done)
    if updates["n"] > 1 and updates["min"] and updates["max"] / updates["min"] >= UNEQUAL_UPDATES:
        found.append(
            f"The runs did not make equally many updates ({format_number(updates['min'])} to "
            f"{format_number(updates['max'])}, {updates['max'] / updates['min']:.1f} times as "
            "many): a difference in accuracy may be theirs rather than the strategies'."
        )
    if any(entry["virtual"] for entry in entries):
        found.append("Seconds of virtual runs are simulated by the twin, not measured.")
    if done and all(as_finite(r.get("seed")) is not None for r in done):
        most = max(entry["runs_done"] for entry in entries)
        if most == 1 and len(entries) > 1:
            found.append("Every strategy ran with one seed only: no spread is known.")
    return found
