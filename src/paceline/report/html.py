"""The HTML report: one self-contained file that works offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from paceline.report import charts, html_page, study_tables
from paceline.report.charts import Figure
from paceline.report.document import ReportDocument, ReportSection
from paceline.report.run_groups import group_by_label
from paceline.report.run_loader import UNFINISHED, ReportRun
from paceline.report.summary_table import make_summary_table


def render_report(content: ReportDocument) -> str:
    figures: list[Figure] = []
    runs = content.runs
    body = [*render_header(content), *render_problems(runs)]
    several = len(content.sections) > 1
    if several:
        links = [
            f'<li><a href="#task-{number}">{escape(section.title)}</a></li>'
            for number, section in enumerate(content.sections)
        ]
        body.append(f"<ul>{''.join(links)}</ul>")
    for number, section in enumerate(content.sections):
        if several:
            body.append(f'<h2 class="task" id="task-{number}">{escape(section.title)}</h2>')
        boxes = {
            name: render_figure(heading, figure, place)
            for place, (name, heading, figure) in enumerate(section.figures, len(figures))
        }
        figures += [figure for _, _, figure in section.figures]
        body += render_section(section, boxes)
    body += html_page.render_table(study_tables.make_switch_table(runs))
    body += html_page.render_table(study_tables.make_stage_table(runs))
    body += html_page.render_table(study_tables.make_run_table(runs))
    body += html_page.render_table(study_tables.make_version_table(runs)) or [
        "<h2>Configuration and versions</h2>"
    ]
    for run in runs:
        if run.config:
            text = json.dumps(run.config, indent=2, ensure_ascii=False)
            body.append(
                f"<details><summary>{escape(describe_run(run))}</summary>"
                f"<pre>{escape(text)}</pre></details>"
            )
    return html_page.render_page(content.title, body, figures)


def render_figure(heading: str, figure: Figure, number: int) -> str:
    """Reserves the height of a figure, so that the page does not move when it is drawn."""
    return (
        f"<div><h3>{escape(heading)}</h3>"
        f'<div data-figure="{number}" style="height:{figure["layout"]["height"]}px"></div></div>'
    )


def render_section(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    """`boxes`: the elements of the section's figures, by name."""
    parts = html_page.render_table(make_summary_table(section.task.comparison))
    if section.findings:
        parts += ["<h2>Findings</h2>", html_page.render_list(section.findings)]
    parts += [
        *render_curves(section, boxes),
        *render_frontier(boxes),
        *render_phases(section, boxes),
        *render_staleness(section, boxes),
    ]
    if section.sheets:
        parts.append("<h2>Tables</h2>")
    for sheet in section.sheets:
        parts += html_page.render_table(sheet, heading="h3")
    return parts


def render_header(content: ReportDocument) -> list[str]:
    runs = content.runs
    virtual = sum(bool(run.result.get("virtual")) for run in runs)
    badge = ""
    if virtual:
        some = "" if virtual == len(runs) else f"{virtual} run{'s' if virtual > 1 else ''} in "
        badge = f' <span class="badge">{some}virtual time</span>'
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


def render_curves(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    drawn = [box for name, box in boxes.items() if name.startswith(("val-acc", "train-loss"))]
    heading = "<h2>Accuracy and loss</h2>"
    if not drawn:
        note = "No run has finished an epoch, so there are no curves."
        return [heading, html_page.render_note(note)]
    runs = section.task.runs
    styles = charts.style_strategies(group_by_label(runs))
    entries = [(html_page.render_line_sample(*style), label) for label, style in styles.items()]
    if any(run.switches for run in runs):
        entries.append((html_page.SWITCH_SAMPLE, "switch of strategy"))
    parts = [heading, html_page.render_legend(entries)]
    if len(runs) > len(styles):
        parts.append(html_page.render_note("Thin lines are single seeds, bold lines are means."))
    return [*parts, html_page.render_grid(drawn)]


def render_frontier(boxes: Mapping[str, str]) -> list[str]:
    drawn = [boxes[name] for name in ("frontier", "published") if name in boxes]
    if not drawn:
        return []
    note = (
        "Filled marks are Pareto-optimal: no other strategy is both faster and more accurate (by "
        "mean). Small points are single runs; colours as in the curves above."
    )
    if "published" in boxes:
        note += " Dashed lines are published results, solid lines are these runs."
    return [
        "<h2>Accuracy vs. time</h2>",
        html_page.render_note(note),
        html_page.render_grid(drawn),
    ]


def render_phases(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    drawn = {name: figure for name, _, figure in section.figures if name.startswith("phases-")}
    if not drawn:
        return []
    used = {trace["name"] for figure in drawn.values() for trace in figure["data"]}
    legend = [
        (html_page.render_patch_sample(*style), phase.replace("_", " "))
        for phase, style in charts.PHASE_STYLES.items()
        if phase in used
    ]
    return [
        "<h2>Time categories</h2>",
        html_page.render_note("Seconds per worker and time category, on one scale."),
        html_page.render_legend(legend),
        html_page.render_grid([boxes[name] for name in drawn]),
    ]


def render_staleness(section: ReportSection, boxes: Mapping[str, str]) -> list[str]:
    groups = group_by_label(section.task.runs)
    counts = {label: charts.count_staleness(group) for label, group in groups.items()}
    heading = "<h2>Staleness</h2>"
    if not any(counts.values()):
        return []
    if "staleness" not in boxes:
        return [heading, html_page.render_note("No gradient was stale.")]
    stale, fresh = [], []
    for label, (colour, _) in charts.style_strategies(groups).items():
        if any(count for lag, count in counts[label].items() if lag > 0):
            stale.append((html_page.render_patch_sample(colour, ""), label))
        elif counts[label]:
            fresh.append(label)
    parts = [heading, html_page.render_legend(stale), boxes["staleness"]]
    if fresh:
        parts.append(html_page.render_note(f"Not stale: {', '.join(fresh)}."))
    return parts
