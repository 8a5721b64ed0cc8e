"""The opening of a report on a repeated study: conditions, tables next to the published, charts."""

from collections.abc import Callable, Sequence

from paceline.report.document import ReportOpening
from paceline.report.reproduction import pool, ps_allreduce, spark_tensorflow, switch
from paceline.report.reproduction.claims import make_claim_table
from paceline.report.reproduction.figures import NamedFigure, draw_by_batch, draw_seconds
from paceline.report.reproduction.matching import Reproduced, list_reproduced, study_facts
from paceline.report.reproduction.operators import exchange_seconds, input_seconds
from paceline.report.reproduction.published_items import items_of
from paceline.report.runs import RunGroup
from paceline.report.tables import Column, ReportTable, make_table
from paceline.telemetry.schema import as_mapping

MAKE_TABLES: dict[str, Callable[[Sequence[Reproduced]], list[ReportTable]]] = {
    "switch": switch.make_tables,
    "ps-allreduce": ps_allreduce.make_tables,
    "spark-tensorflow": spark_tensorflow.make_tables,
    "pool": pool.make_tables,
}

FACTS = {
    "switch": switch.STUDY,
    "ps-allreduce": ps_allreduce.STUDY,
    "spark-tensorflow": spark_tensorflow.STUDY,
    "pool": pool.STUDY,
}
"""Keys of the studies in the published results."""


def make_opening(
    study: str, statements: Sequence[str], tasks: Sequence[RunGroup], omitted: Sequence[str] = ()
) -> ReportOpening:
    """`omitted`: arms that did not run, with the reason."""
    rows = list_reproduced(tasks)
    without = [row for row in rows if row.arm != "none"]
    tables = MAKE_TABLES[study](rows if study == "spark-tensorflow" else without)
    return ReportOpening(
        statements=[*statements, *(f"Omitted arm: {text}." for text in omitted)],
        sheets=[
            *tables,
            make_cluster_table(study),
            make_claim_table(study),
            make_item_table(study),
        ],
        figures=draw_figures(rows),
    )


def draw_figures(rows: Sequence[Reproduced]) -> list[NamedFigure]:
    by_batch = {
        "seconds": ("seconds", lambda row: row.mean("seconds")),
        "step": ("ms/step", spark_tensorflow.step_ms),
        "input": ("seconds of batch preparation per epoch", input_seconds),
        "exchange": ("seconds of exchange per epoch", exchange_seconds),
    }
    return [*draw_seconds(rows), *draw_by_batch(rows, by_batch)]


def make_cluster_table(study: str) -> ReportTable:
    """Lists the printed machines and software; those of our runs are in the report's versions."""
    facts = study_facts(FACTS[study])
    records = [
        {
            Column("property"): name.replace("_", " "),
            Column("published"): "; ".join(map(str, value)) if isinstance(value, list) else value,
        }
        for part in ("cluster", "software")
        for name, value in as_mapping(facts.get(part)).items()
        if value is not None
    ]
    return make_table("published-cluster", "Machines and software of the study", records)


def make_item_table(study: str) -> ReportTable:
    """Lists every published table and figure of the study, with ours or the reason for none."""
    records = [
        {
            Column("published"): item.name,
            Column("content"): item.content,
            Column("here"): item.ours or "omitted",
            Column("remark"): item.reason or None,
        }
        for item in items_of(study)
    ]
    return make_table("published-items", "Published tables and figures", records)
