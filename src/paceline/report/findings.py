"""A few sentences computed from the runs; none claims what the spread of seeds does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.report.comparison import as_mapping
from paceline.report.formats import format_number, format_percent, format_seconds
from paceline.report.runs import Run
from paceline.report.stats import as_finite, measure_spread, weigh_difference

WORTH_A_WORD = 0.05
"""A share of the workers' time below which waiting is not mentioned."""

UNEVEN = 0.8
"""Workers that wait within this factor of each other wait alike."""


def list_findings(comparison: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    """Plain sentences, most important first; not escaped."""
    entries = comparison["strategies"]
    return [
        *describe_failures(comparison),
        *describe_fastest(entries),
        *describe_accuracy(entries),
        *describe_waiting(entries, runs),
        *describe_switches(entries),
        *describe_staleness(entries, runs),
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
    difference, sure = weigh_difference(a, b, comparisons=comparisons)
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
        (entry, *weigh_difference(entry[measure], first[measure], comparisons=len(rest)))
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


def describe_waiting(entries: Sequence[dict[str, Any]], runs: Sequence[Run]) -> list[str]:
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


def average_phases(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Mean seconds a worker and phase over the runs that are done, else over all of them."""
    chosen = [run for run in runs if run.is_done] or list(runs)
    gathered: dict[str, dict[str, list[float]]] = {}
    for run in chosen:
        for worker, phases in run.phases.items():
            for phase, seconds in phases.items():
                gathered.setdefault(worker, {}).setdefault(phase, []).append(seconds)
    return {
        worker: {phase: sum(values) / len(values) for phase, values in phases.items()}
        for worker, phases in gathered.items()
    }


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


def describe_staleness(entries: Sequence[dict[str, Any]], runs: Sequence[Run]) -> list[str]:
    parts = []
    for entry in entries:
        mean = entry["staleness_mean"]["mean"]
        if mean:
            rows = [
                as_mapping(r.result.get("staleness")) for r in runs if r.label == entry["label"]
            ]
            most = measure_spread(row.get("max") for row in rows)["max"]
            end = f", {format_number(most)} at most" if most is not None else ""
            parts.append(f"{format_number(mean)} under {entry['label']}{end}")
    if not parts:
        return []
    return [f"Gradients were computed on weights this many updates old: {'; '.join(parts)}."]


def describe_cautions(entries: Sequence[dict[str, Any]], runs: Sequence[Run]) -> list[str]:
    """What makes the runs less comparable than a table suggests."""
    found = []
    done = [run.result for run in runs if run.is_done]
    for name, words in (("model", "different models"), ("data", "different data sets")):
        kinds = sorted({str(r[name]) for r in done if r.get(name) is not None})
        if len(kinds) > 1:
            found.append(f"The runs are of {words} ({', '.join(kinds)}): compare with care.")
    counts = measure_spread(r.get("samples") for r in done)
    if counts["n"] > 1 and counts["min"] != counts["max"]:
        found.append(
            f"The runs did not train on equally many samples ({format_number(counts['min'])} to "
            f"{format_number(counts['max'])}): seconds compare whole runs, not equal work."
        )
    if any(entry["virtual"] for entry in entries):
        found.append("Seconds of virtual runs are simulated by the twin, not measured.")
    if done and all(as_finite(r.get("seed")) is not None for r in done):
        most = max(entry["runs_done"] for entry in entries)
        if most == 1 and len(entries) > 1:
            found.append("Every strategy ran with one seed only: no spread is known.")
    return found
