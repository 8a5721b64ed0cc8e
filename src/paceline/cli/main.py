"""`paceline`: the table of commands, and the exit status and message of each error.

Commands are named as "module:function" and imported only when they are used, so `--help` stays
fast. Exit status: 0 done; 1 failed or diverged; 2 usage error, in one line; 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from paceline.cli.usage import HelpLayout, describe_error
from paceline.errors import PacelineError, RunFailed
from paceline.report.terminal_text import never_fail_on_characters

SUMMARY = "Train one neural network on many unequal machines, at the pace those machines allow."

COMMANDS = {
    "demo": "Compare strategies on this machine with a small real dataset.",
    "train": "Train one job with one strategy.",
    "attach": "Follow a run in progress until its end; Ctrl-C leaves it running.",
    "stop": "Cancel a run in progress.",
    "resume": "Continue a run from its latest checkpoint, with its recorded options.",
    "join": "Train on this machine as a further worker of a run in progress.",
    "leave": "Let a worker leave a run in progress when its work is done.",
    "compare": "Train one job with several strategies and seeds, and compare them.",
    "reproduce": "Repeat a published study, and show its tables next to ours.",
    "launch": "Run a script with its own training loop on several workers.",
    "tune": "Find the smallest synchronous share of a run that keeps the accuracy.",
    "plan": "Choose machines and strategy by predicted time, energy and cost.",
    "twin": "Simulate strategies on machines you may not have.",
    "evaluate": "Evaluate the trained model of a run.",
    "report": "Write an HTML or Markdown report of one or more runs.",
    "dashboard": "Show the runs of a directory in a browser, live and afterwards.",
    "profile": "Show operator times of a run, or compare two runs.",
    "export": "Export a run as a Chrome trace, CSV files or TensorBoard logs.",
    "collectives": "Measure collectives next to their cost formulas, and fit the links of a pool.",
    "doctor": "Check every machine of a pool and suggest a fix for each problem.",
}

SUBCOMMANDS = {
    "pool": (
        "Show and convert pool files, and install SSH keys on their machines.",
        {
            "show": "Show the machines of a pool as a table.",
            "convert": "Convert a pool of any format to YAML.",
            "keys": "Install a public key on each machine, asking for its password once.",
        },
    ),
    "data": (
        "Download and convert datasets, and inspect data files.",
        {
            "get": "Download the published files of a named dataset and verify their checksums.",
            "list": "Show which named datasets are present, complete or partial.",
            "convert": "Write a named dataset as Parquet or TFRecord files.",
            "show": "Show files, rows, blocks and features of data files.",
        },
    ),
}

RECORDED = ("evaluate", "report", "dashboard", "profile", "export")
MODULES = {
    "demo": "compare",
    "tune": "compare",
    "doctor": "pool",
    **dict.fromkeys(RECORDED, "recorded_runs"),
    **dict.fromkeys(("attach", "stop", "resume"), "detached"),
    **dict.fromkeys(("join", "leave"), "members"),
}
"""Modules of commands that share one; each of the others has its own."""

INTERRUPTED = 130


def make_app() -> App:
    """Builds the command-line application; imports no command."""
    app = App(
        name="paceline",
        help=SUMMARY,
        help_format="plaintext",
        help_formatter=HelpLayout(),
        version=describe_version,
        group_commands="Commands",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    app["--help"].group = app["--version"].group = "Options"
    app["--help"].help = "Show this message and exit."
    app["--version"].help = "Show the version and exit."
    for place, (name, summary) in enumerate(COMMANDS.items()):
        target = f"paceline.cli.{MODULES.get(name, name)}:{name}"
        app.command(target, name=name, help=summary, sort_key=place)
    for place, (name, (summary, parts)) in enumerate(SUBCOMMANDS.items(), len(COMMANDS)):
        group = App(name=name, help=summary, sort_key=place)
        for number, (part, text) in enumerate(parts.items()):
            target = f"paceline.cli.{name}:{part}"
            group.command(target, name=part, help=text, sort_key=number)
        app.command(group)
    return app


def describe_version() -> str:
    from importlib import metadata  # Slow to import, and needed only here.

    return f"paceline {metadata.version('paceline')}"


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit status; errors are printed to stderr."""
    never_fail_on_characters()
    try:
        status = make_app()(list(arguments))
    except CycloptsError as error:
        print(f"paceline: {describe_error(error)}", file=sys.stderr)
        return 2
    except PacelineError as error:
        if isinstance(error, RunFailed) and error.details:
            print(error.details.rstrip(), file=sys.stderr)
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; the interpreter must not fail when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0


def main() -> None:
    """Entry point of the `paceline` program."""
    if sys.getfilesystemencoding() == "ascii":
        restart_in_utf8_mode()
    sys.exit(run(sys.argv[1:]))


def restart_in_utf8_mode() -> None:
    """Replaces this process by one that reads and writes file names as UTF-8.

    Under an ASCII locale Python represents other characters of a path by invalid ones, which can
    be written neither as JSON nor as HTML. What is displayed stays in the encoding of the locale.
    """
    os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
    os.environ["PYTHONUTF8"] = "1"
    arguments = [each for each in sys.orig_argv[1:] if each not in ("-Xutf8=0", "utf8=0")]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
