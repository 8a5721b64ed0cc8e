"""Findings: sentences computed from the runs. Differences are tested for significance."""

from collections.abc import Sequence

from paceline.report.comparison import StrategyEntry, mean_metric, spread_of
from paceline.report.number_format import format_number, format_percent, format_seconds
from paceline.report.runs import RunGroup, average_phases, fastest, rows_or_empty
from paceline.report.stats import mean_and_std, mean_of, welch_test
from paceline.telemetry.schema import as_finite, as_mapping

MIN_IDLE_FRACTION = 0.05
"""Less idle time of the workers is not reported."""

UNEQUAL_UPDATES = 1.5
"""From this factor on, a finding states that the numbers of updates differ."""

EVEN_FACTOR = 0.8
"""Workers whose idle times are within this factor are not listed separately."""


def list_findings(task: RunGroup, *, target: float | None = None) -> list[str]:
    """Returns plain sentences, the most important first; not escaped for HTML."""
    return [
        *describe_failures(task.entries),
        *describe_fastest(task.entries),
        *describe_accuracy(task),
        *describe_target(task, target),
        *describe_frontier(task),
        *describe_verdicts(task),
        *describe_waiting(task),
        *describe_switches(task.entries),
        *describe_staleness(task),
        *describe_cautions(task),
    ]


def describe_failures(entries: Sequence[StrategyEntry]) -> list[str]:
    found = []
    for entry in entries:
        failed, total, rest = entry["runs_failed"], entry["runs_total"], entry["runs_done"]
        if failed:
            noun = "run" if total == 1 else "runs"
            text = f"{failed} of {total} {noun} of {entry['label']} did not finish"
            found.append(f"{text}; its metrics are from the other {rest}." if rest else f"{text}.")
    return found


def describe_fastest(entries: Sequence[StrategyEntry]) -> list[str]:
    """Names the fastest strategy and whether the difference is significant."""
    timed = [entry for entry in entries if entry["seconds"]["mean"] is not None]
    if not timed:
        return []
    ranked = sorted(timed, key=lambda entry: mean_of(entry["seconds"]))
    best = ranked[0]
    if len(timed) > 1:
        others = ranked[1:2] if timed[0] in ranked[:2] else [ranked[1], timed[0]]
        return [compare_time(best, other, comparisons=len(timed) - 1) for other in others]
    spread = best["seconds"]
    text = f"{best['label']} took {format_seconds(spread['mean'])}"
    if spread["n"] == 1:
        return [f"{text} in its only run; the spread over seeds is unknown."]
    deviation = f"standard deviation {spread['std']:.2g} s"
    return [f"{text} on average over {spread['n']} runs ({deviation})."]


def compare_time(best: StrategyEntry, other: StrategyEntry, *, comparisons: int) -> str:
    a, b = best["seconds"], other["seconds"]
    difference, _, sure = welch_test(a, b, comparisons=comparisons)
    amount = f"{format_seconds(-difference)} ({format_percent(-difference / mean_of(b), 1)}) less"
    names = best["label"], other["label"]
    times = format_seconds(a["mean"]), format_seconds(b["mean"])
    if sure:
        return (
            f"{names[0]} was faster than {names[1]}: {times[0]} vs. {times[1]}, {amount} "
            "(significant)."
        )
    both = f"{names[0]} took {times[0]} and {names[1]} {times[1]}"
    if sure is None:
        seeds = "one seed each" if a["n"] == b["n"] == 1 else "one seed on one side"
        return f"{both}, which is {amount}; with {seeds} the significance is unknown."
    return f"{both} on average; the difference of {format_seconds(-difference)} is not significant."


def describe_accuracy(task: RunGroup) -> list[str]:
    """Compares test accuracy, or else validation accuracy, with the first strategy."""
    measure, word = task.choose_measure()
    known = [entry for entry in task.entries if mean_metric(entry, measure) is not None]
    if len(known) < 2:
        return []
    first, rest = known[0], known[1:]
    base = f"{first['label']} ({format_percent(mean_metric(first, measure))})"
    found: list[str] = []
    same: list[str] = []
    single: list[str] = []
    for entry in rest:
        difference, _, sure = welch_test(
            spread_of(entry, measure), spread_of(first, measure), comparisons=len(rest)
        )
        if sure:
            direction = "higher" if difference > 0 else "lower"
            found.append(
                f"{entry['label']}: {word} {format_percent(mean_metric(entry, measure))}, "
                f"{100 * abs(difference):.2f} points {direction} than {base} (significant)."
            )
        elif sure is None:
            single.append(f"{entry['label']} {100 * difference:+.2f} points")
        else:
            same.append(f"{entry['label']} ({100 * difference:+.2f} points)")
    word = word.capitalize()
    if same:
        found.append(f"{word} does not differ significantly from {base}: {', '.join(same)}.")
    if single:
        found.append(
            f"{word} compared with {base}: {', '.join(single)}. The significance is unknown with a "
            "single seed; use more seeds to compare."
        )
    return found


def describe_target(task: RunGroup, target: float | None) -> list[str]:
    """Names the strategy that reached the target first, and the slowest that reached it."""
    chosen = task.choose_target_accuracy() if target is None else target
    if chosen is None or len(task.entries) < 2:
        return []
    found = task.time_to_accuracy(chosen)
    word = f"a validation accuracy of {format_percent(chosen, 1)}"
    sentences = []
    ranked = fastest(found)
    if len(ranked) > 1:
        best, last = ranked[0], ranked[-1]
        a, b = mean_of(best.seconds), mean_of(last.seconds)
        _, _, sure = welch_test(best.seconds, last.seconds, comparisons=len(ranked) - 1)
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
    front = task.find_frontier()
    measured = [e for e in task.entries if e["seconds"]["mean"] is not None]
    if len(measured) < 2 or not front:
        return []
    measure, word = task.choose_measure()
    parts = [
        f"{e['label']} ({format_percent(mean_metric(e, measure))} in "
        f"{format_seconds(e['seconds']['mean'])})"
        for e in front
    ]
    word = word.removeprefix("test ")
    return [f"Pareto-optimal in time and {word} (by mean): {'; '.join(parts)}."]


def describe_verdicts(task: RunGroup) -> list[str]:
    found = []
    for entry in task.entries:
        runs = task.done_runs_of(entry)
        counts: dict[str, list[str]] = {}
        for run in runs:
            for verdict in rows_or_empty(run.result.get("verdicts")):
                counts.setdefault(str(verdict.get("rule")), []).append(str(verdict.get("text")))
        found += [
            f"{entry['label']}, {rule} ({len(texts)} times in {len(runs)} runs): {texts[0]}."
            for rule, texts in counts.items()
        ]
    return found


def describe_waiting(task: RunGroup) -> list[str]:
    """Reports the fraction of idle time, and the workers with the most and least of it."""
    parts = []
    for entry in task.entries:
        phases = average_phases(task.done_runs_of(entry))
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
    return [f"Idle time of the workers (wait, comm exposed): {'; '.join(parts)}."] if parts else []


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


def describe_staleness(task: RunGroup) -> list[str]:
    parts = []
    for entry in task.entries:
        mean = mean_metric(entry, "staleness_mean")
        if mean:
            rows = [as_mapping(run.result.get("staleness")) for run in task.runs_of(entry)]
            most = mean_and_std(row.get("max") for row in rows)["max"]
            end = f", {format_number(most)} at most" if most is not None else ""
            parts.append(f"{format_number(mean)} under {entry['label']}{end}")
    return [f"Gradient staleness in updates: {'; '.join(parts)}."] if parts else []


def describe_cautions(task: RunGroup) -> list[str]:
    """Lists reasons why the runs are not directly comparable."""
    done = [run.result for run in task.runs if run.is_done]
    noted = dict.fromkeys(str(note) for r in done for note in r.get("notes") or ())
    found = [f"Data: {note}." for note in noted]
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
    if any(entry["virtual"] for entry in task.entries):
        found.append("Times of virtual runs are simulated, not measured.")
    if done and all(as_finite(r.get("seed")) is not None for r in done):
        most = max(entry["runs_done"] for entry in task.entries)
        if most == 1 and len(task.entries) > 1:
            found.append("Each strategy ran with a single seed, so the spread is unknown.")
    return found
