"""The HTML report: one self-contained file that works offline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.errors import UsageError
from paceline.report import charts, html_page, number_format, summary_table
from paceline.report.charts import Figure
from paceline.report.document import ReportDocument, ReportSection, make_content
from paceline.report.run_loader import UNFINISHED, ReportRun, load_runs
from paceline.report.stats import as_finite, mean_and_std
from paceline.telemetry.metrics import View, metrics_in
from paceline.telemetry.numbers import as_mapping

STAGES = ("start", "read", "prepare", "train", "evaluate", "save")


def write_report(
    runs: list[Path],
    out: Path,
    *,
    title: str,
    target: float | None = None,
    published: bool = False,
) -> Path:
    """Writes the HTML report of the runs in the folders to `out` and returns the path.

    A folder that is not a run is searched recursively. Failed, unfinished and interrupted runs are
    included, with a description of what is missing. `out` is replaced atomically.

    Raises:
        UsageError: A folder contains no run, or `out` cannot be written.
    """
    content = make_content(load_runs(runs), title=title, target=target, published=published)
    return write_text(out, render_report(content))


def write_text(out: Path, text: str) -> Path:
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {out} ({error.strerror}); choose another file"
        ) from None
    return out


def render_report(content: ReportDocument) -> str:
    figures: list[Figure] = []
    runs = content.runs
    body = [*render_header(content), *render_problems(runs)]
    several = len(content.sections) > 1
    if several:
        body += render_contents(content)
    for number, section in enumerate(content.sections):
        if several:
            body.append(f'<h2 class="task" id="task-{number}">{escape(section.title)}</h2>')
        body += render_section(section, figures)
    body += [
        *render_switches(runs),
        *render_stages(runs),
        *render_runs(runs),
        *render_configuration(runs),
    ]
    return html_page.render_page(content.title, body, figures)


def render_contents(content: ReportDocument) -> list[str]:
    links = "".join(
        f'<li><a href="#task-{number}">{escape(section.title)}</a></li>'
        for number, section in enumerate(content.sections)
    )
    return [f"<ul>{links}</ul>"]


def render_section(section: ReportSection, figures: list[Figure]) -> list[str]:
    runs = section.task.runs
    return [
        *render_summary(section),
        *render_curves(runs, figures),
        *render_frontier(section, figures),
        *render_phases(runs, figures),
        *render_staleness(runs, figures),
        *render_sheets(section),
    ]


def render_sheets(section: ReportSection) -> list[str]:
    parts = []
    for sheet in section.sheets:
        parts.append(f"<h3>{escape(sheet.title)}</h3>")
        parts.append(
            html_page.render_table(sheet.headers, sheet.formatted_rows(), words=sheet.words)
        )
        if sheet.note:
            parts.append(html_page.render_note(sheet.note))
    return ["<h2>Tables</h2>", *parts] if parts else []


def render_frontier(section: ReportSection, figures: list[Figure]) -> list[str]:
    named = {name: (heading, figure) for name, heading, figure in section.figures}
    boxes = [
        figure_placeholder(*named[name], figures)
        for name in ("frontier", "published")
        if name in named
    ]
    if not boxes:
        return []
    note = (
        "Filled marks are Pareto-optimal: no other strategy is both faster and more accurate (by "
        "mean). "
        "Small points are single runs; colours as in the curves above."
    )
    if "published" in named:
        note += " Dashed lines are published results, solid lines are these runs."
    return [
        "<h2>Accuracy vs. time</h2>",
        html_page.render_note(note),
        f'<div class="grid">{"".join(boxes)}</div>',
    ]


def render_header(content: ReportDocument) -> list[str]:
    runs = content.runs
    virtual = sum(bool(run.result.get("virtual")) for run in runs)
    badge = ""
    if virtual:
        text = (
            "virtual time"
            if virtual == len(runs)
            else f"{virtual} run{'s' if virtual > 1 else ''} in virtual time"
        )
        badge = f' <span class="badge">{escape(text)}</span>'
    return [
        f"<h1>{escape(content.title)}</h1>",
        f'<p class="soft">{escape(content.facts)}{badge}</p>',
    ]


def render_problems(runs: Sequence[ReportRun]) -> list[str]:
    """Lists failed runs with their errors, and incomplete folders."""
    found = []
    for run in runs:
        if run.is_done and not run.missing:
            continue
        if run.is_done:
            head = "is done, but its folder is incomplete"
        elif run.status == UNFINISHED:
            head = "is unfinished; the metrics below are from its events"
        else:
            head = f"ended as {run.status}"
        text = f"<strong>{escape(describe_run(run))}</strong> {escape(head)}."
        if run.result.get("error"):
            text += f"<pre>{escape(str(run.result['error']))}</pre>"
        if run.missing:
            text += html_page.render_list(run.missing)
        found.append(f'<div class="problem">{text}</div>')
    return found


def describe_run(run: ReportRun) -> str:
    seed = run.result.get("seed")
    return f"{run.name}: {run.label}" + (f", seed {seed}" if seed is not None else "")


def render_summary(section: ReportSection) -> list[str]:
    comparison = section.task.comparison
    columns, rows = summary_table.nonempty_columns(comparison)
    parts = ["<h2>Summary</h2>", html_page.render_table(columns, rows, words=("strategy",))]
    note = summary_table.describe_table(comparison)
    if note:
        parts.append(html_page.render_note(note))
    if section.findings:
        parts += ["<h2>Findings</h2>", html_page.render_list(section.findings)]
    return parts


def render_curves(runs: Sequence[ReportRun], figures: list[Figure]) -> list[str]:
    boxes = []
    for measure, word in (("val_acc", "Validation accuracy"), ("train_loss", "Training loss")):
        for against in ("epochs", "seconds"):
            figure = charts.draw_curves(runs, measure, against=against)
            if figure is not None:
                boxes.append(figure_placeholder(f"{word} by {against}", figure, figures))
    parts = ["<h2>Accuracy and loss</h2>"]
    if not boxes:
        return [
            *parts,
            html_page.render_note("No run has finished an epoch, so there are no curves."),
        ]
    labels = list(dict.fromkeys(run.label for run in runs))
    entries = [
        (html_page.render_line_sample(colour, dash), label)
        for label, (colour, dash) in charts.style_strategies(labels).items()
    ]
    if any(run.switches for run in runs):
        entries.append((html_page.render_switch_sample(), "switch of strategy"))
    parts.append(html_page.render_legend(entries))
    if len(runs) > len(labels):
        parts.append(html_page.render_note("Thin lines are single seeds, bold lines are means."))
    return [*parts, f'<div class="grid">{"".join(boxes)}</div>']


def figure_placeholder(heading: str, figure: Figure, figures: list[Figure]) -> str:
    """Reserves the height of a figure, so that the page does not move when it is drawn."""
    figures.append(figure)
    return (
        f"<div><h3>{escape(heading)}</h3>"
        f'<div data-figure="{len(figures) - 1}" style="height:{figure["layout"]["height"]}px">'
        "</div></div>"
    )


def render_phases(runs: Sequence[ReportRun], figures: list[Figure]) -> list[str]:
    drawn = charts.draw_phases(runs)
    if not drawn:
        return []
    used = {trace["name"] for _, _, figure in drawn for trace in figure["data"]}
    legend = [
        (html_page.render_patch_sample(*style), phase.replace("_", " "))
        for phase, style in charts.PHASE_STYLES.items()
        if phase in used
    ]
    boxes = [
        figure_placeholder(f"{label} (mean of {n} runs)" if n > 1 else label, figure, figures)
        for label, n, figure in drawn
    ]
    return [
        "<h2>Time categories</h2>",
        html_page.render_note("Seconds per worker and time category, on one scale."),
        html_page.render_legend(legend),
        f'<div class="grid">{"".join(boxes)}</div>',
    ]


def render_staleness(runs: Sequence[ReportRun], figures: list[Figure]) -> list[str]:
    counted = [run.label for run in runs if charts.count_staleness([run])]
    if not counted:
        return []
    parts = ["<h2>Staleness</h2>"]
    figure = charts.draw_staleness(runs)
    if figure is None:
        return [
            *parts,
            html_page.render_note("No gradient was stale."),
        ]
    labels = list(dict.fromkeys(run.label for run in runs))
    styles = charts.style_strategies(labels)
    drawn = {trace["name"] for trace in figure["data"]}
    shown = [label for label in labels if charts.escape_plotly(label) in drawn]
    parts.append(
        html_page.render_legend(
            [(html_page.render_patch_sample(styles[x][0], ""), x) for x in shown]
        )
    )
    parts.append(figure_placeholder("Gradient staleness (updates)", figure, figures))
    fresh = [label for label in dict.fromkeys(counted) if label not in shown]
    if fresh:
        parts.append(html_page.render_note(f"Not stale: {', '.join(fresh)}."))
    return parts


def render_switches(runs: Sequence[ReportRun]) -> list[str]:
    rows = []
    for run in runs:
        for switch in run.switches:
            epoch, at_s = run.locate_switch(switch)
            rows.append(
                [
                    run.name,
                    number_format.format_number(as_finite(switch.get("samples"))),
                    f"{epoch:.2f}",
                    number_format.format_seconds(at_s),
                    switch.get("from", number_format.NOTHING),
                    switch.get("to", number_format.NOTHING),
                    number_format.format_seconds(as_finite(switch.get("pause_s"))),
                    number_format.format_seconds(as_finite(switch.get("drain_s"))),
                    switch.get("reason") or number_format.NOTHING,
                ]
            )
    if not rows:
        return []
    columns = ("run", "samples", "epoch", "at", "from", "to", "pause", "drain", "reason")
    return [
        "<h2>Switches</h2>",
        html_page.render_table(columns, rows, words=("run", "from", "to", "reason")),
    ]


def render_stages(runs: Sequence[ReportRun]) -> list[str]:
    """Lists the mean seconds per stage and strategy, over finished runs or else all runs."""
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        group = [run for run in runs if run.label == label]
        group = [run for run in group if run.is_done] or group
        stages = [as_mapping(run.result.get("stages")) for run in group]
        if any(stages):
            means = [mean_and_std(s.get(name) for s in stages)["mean"] for name in STAGES]
            whole = mean_and_std(run.result.get("seconds") for run in group)["mean"]
            rows.append([label, *(number_format.format_seconds(x) for x in (*means, whole))])
    if not rows:
        return []
    note = "Mean over finished runs, or over all runs if none finished."
    return [
        "<h2>Stages</h2>",
        html_page.render_table(("strategy", *STAGES, "total"), rows, words=("strategy",)),
        html_page.render_note(note),
    ]


def render_runs(runs: Sequence[ReportRun]) -> list[str]:
    metrics = metrics_in(View.RUNS)
    rows = []
    for run in runs:
        result = run.result
        rows.append(
            [
                run.name,
                run.label,
                number_format.NOTHING if result.get("seed") is None else result["seed"],
                run.status + (", virtual" if result.get("virtual") else ""),
                *(number_format.format_metric(m, m.value(result)) for m in metrics),
            ]
        )
    columns = ("run", "strategy", "seed", "status", *(metric.title for metric in metrics))
    return [
        "<h2>Runs</h2>",
        html_page.render_table(columns, rows, words=("run", "strategy", "status")),
    ]


def render_configuration(runs: Sequence[ReportRun]) -> list[str]:
    parts = ["<h2>Configuration and versions</h2>"]
    versions = [
        as_mapping(run.result.get("versions")) or as_mapping(run.config.get("versions"))
        for run in runs
    ]
    names = list(dict.fromkeys(name for found in versions for name in found))
    rows = []
    for name in names:
        kinds = dict.fromkeys(str(found[name]) for found in versions if name in found)
        rows.append([name, ", ".join(kinds)])
    if rows:
        parts.append(html_page.render_table(("name", "version"), rows, words=("name", "version")))
    for run in runs:
        if run.config:
            text = json.dumps(run.config, indent=2, ensure_ascii=False)
            parts.append(
                f"<details><summary>{escape(describe_run(run))}</summary>"
                f"<pre>{escape(text)}</pre></details>"
            )
    return parts
