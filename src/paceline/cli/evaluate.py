"""`paceline evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as opt


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")],
    data: opt.Data = None,
    data_dir: opt.DataDir = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    from paceline.trained_model import evaluate as evaluate_run

    figures = evaluate_run(folder, data=data, data_dir=data_dir)
    if json:
        from json import dumps

        typer.echo(dumps(figures))
    else:
        accuracy = "no classes"
        if figures["test_acc"] is not None:
            accuracy = f"accuracy {figures['test_acc']:.4f}"
        typer.echo(
            f"{figures['data']} (test): loss {figures['test_loss']:.4f}, "
            f"{accuracy} of {figures['predictions']} predictions"
        )
