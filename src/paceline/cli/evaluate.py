"""`paceline evaluate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.cli.commands import argument, command
from paceline.options import Option


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    data: Annotated[str | None, Option(metavar="NAME|URL", default="the data of the run")] = None
    """Dataset name, path or URL."""
    data_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Directory with the original files of named datasets, as DIR/<dataset>/<files>."""
    json: bool = False
    """Print the result as JSON."""


@command
def evaluate(
    folder: Annotated[Path, argument("Folder of a finished run.")],
    /,
    *,
    options: EvaluateOptions,
) -> None:
    from paceline.trained_model import evaluate as evaluate_run

    result = evaluate_run(folder, data=options.data, data_dir=options.data_dir)
    if options.json:
        print(json.dumps(result))
        return
    accuracy = "accuracy not defined (no classes)"
    if result["test_acc"] is not None:
        accuracy = f"accuracy {result['test_acc']:.4f}"
    print(
        f"{result['data']} (test): loss {result['test_loss']:.4f}, {accuracy}, "
        f"{result['predictions']:,} predictions"
    )
