"""Layout of `--help`, and one-line messages for usage errors."""

from __future__ import annotations

import difflib
import re
import textwrap
from typing import TYPE_CHECKING, Any

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

MAX_WIDTH = 100
MAX_LABEL_WIDTH = 26
"""Width of the column of option names; longer names are on a line of their own."""

_NO_BREAK = "\N{NO-BREAK SPACE}"
_SHORT_NOTE = re.compile(r"\[default: [^\]]{1,30}\]")


class HelpLayout:
    """Plain help text: a title per group, then one option per entry in two columns."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        width = min(console.width, MAX_WIDTH)
        labels = [_label(entry) for entry in panel.entries]
        column = min(MAX_LABEL_WIDTH, max(map(len, labels)) + 2)
        lines = [f"{panel.title}:"] if panel.title else []
        for label, entry in zip(labels, panel.entries, strict=True):
            lines += _format_entry(label, _plain(entry.description), column, width)
        _print(console, "\n".join([*lines, ""]))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        if usage:
            line = _plain(usage).rstrip()
            # The only optional positional argument of any other command is the job file.
            optional = "[RUN worker=K]" if line.startswith("paceline leave") else "[JOB]"
            line = line.replace("[ARGS]", optional)
            _print(console, f"Usage: {line}\n")

    def render_description(self, console: Console, options: ConsoleOptions, text: Any) -> None:
        if text:
            width = min(console.width, MAX_WIDTH)
            _print(console, textwrap.fill(_plain(text).strip(), width) + "\n")


def describe_error(error: CycloptsError) -> str:
    """Returns one line for an error of the argument parser, with the remedy."""
    command = " ".join(["paceline", *(error.command_chain or ())])
    match error:
        case UnknownOptionError():
            given = (error.token.keyword or error.token.value).partition("=")[0]
            known = [name for each in error.argument_collection for name in each.names]
            return _describe_unknown_option(given, known, command)
        case UnknownCommandError():
            given = (error.unused_tokens or [""])[0]
            names = list(error.app or [])
            if given.startswith("-"):
                return _describe_unknown_option(given, names, command)
            known = [name for name in names if not name.startswith("-")]
            close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
            return f"unknown command {given!r}; {hint}"
        case MissingArgumentError() if error.argument is not None:
            if error.keyword is None and not error.argument.tokens:
                name = error.argument.name
                return f"{name} is required; run `{command} --help` for its meaning"
            return f"{error.keyword or error.argument.name} requires a value"
        case UnusedCliTokensError():
            unused = " ".join(error.unused_tokens or [])
            return f"unexpected argument {unused!r}; run `{command} --help` for the usage"
        case _:
            return " ".join(str(error).split())


def _describe_unknown_option(given: str, names: list[str], command: str) -> str:
    """Suggests the nearest option; dashes do not count as similarity."""
    options = {name.lstrip("-"): name for name in names if name.startswith("--")}
    close = difflib.get_close_matches(given.lstrip("-"), options, n=1, cutoff=0.6)
    if close:
        return f"unknown option {given}; did you mean {options[close[0]]}?"
    return f"unknown option {given}; run `{command} --help` for a list"


def _label(entry: HelpEntry) -> str:
    if entry.positional_label:
        return entry.positional_label
    names = ", ".join((*entry.positive_shorts, *entry.positive_names))
    if entry.negative_names:
        names += "/" + "/".join(entry.negative_names)
    return f"{names} {entry.metavar}" if entry.metavar else names


def _format_entry(label: str, text: str, column: int, width: int) -> list[str]:
    indent = " " * (column + 2)
    # A short "[default: ...]" stays on one line.
    text = _SHORT_NOTE.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    wrapped = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    wrapped = [line.replace(_NO_BREAK, " ") for line in wrapped]
    head = f"  {label}"
    if len(head) < len(indent) and wrapped:
        return [head.ljust(len(indent)) + wrapped[0].strip(), *wrapped[1:]]
    return [head, *wrapped]


def _plain(text: Any) -> str:
    """Returns the text of what cyclopts passes: None, text, or rich text that may be wrapped."""
    text = getattr(text, "primary_renderable", text)
    return "" if text is None else str(getattr(text, "plain", text))


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
