#!/usr/bin/env python3
"""Checks the prose of the repository for phrases that do not read as standard technical English.

Every rule has a name, a pattern and a suggestion. `ALLOWED` lists correct uses of a phrase by file
and rule, each with a reason. Identifiers are checked like prose. In tests/ only module docstrings
are checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".md", ".js", ".css", ".html", ".yaml", ".yml", ".toml", ".sh"}
TREES = ("src", "docs", "bench", "examples", "tools", "tests")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
SKIPPED = ("bench/results/", "tests/golden/", "src/paceline/dashboard/page/vendor/")

UNIT = (
    r"threads?|samples?|bytes|steps?|updates?|messages?|seconds|milliseconds|logs?|lines?"
    r"|exchanges?|tasks?|files?|rows?|batch(?:es)?|gradients?|MB|GB|kB|ms|cores?|events?"
)
DENOMINATOR = r"worker|second|step|update|epoch|machine|process|server|run|host|strategy|rank"

RULES: dict[str, tuple[str, str]] = {
    "per": (rf"\b(?:{UNIT}) an? (?:{DENOMINATOR})s?\b|\bonce an? [a-z]+", "per X, each X"),
    "told": (
        r"\b(?:told|tells? (?:the|it|a|an|of|its)|hears?|heard|unheard)\b",
        "sent, received, reported, given",
    ),
    "go on": (r"\b(?:go(?:es)?|going|went) on\b(?! to\b)", "continue, resume, in progress"),
    "mend": (r"\bmend(?:s|ed|ing)?\b|\bcures?\b", "fix, repair"),
    "lies": (
        r"\b(?:lies|lie|lay) (?:in|with|at|there|ready|beside)\b|\bat hand\b"
        r"|\b(?:is|are) (?:all )?(?:there|here)(?= ?[.,:;]| yet\b| already\b| now\b)",
        "exists, is available, has arrived, is stored in",
    ),
    "parted by": (
        r"\bparted by\b|\bin place of\b|\bbeside\b|\bfor want of\b|\bby itself\b|\bof its own\b",
        "separated by, instead of, next to",
    ),
    "question": (
        r'"""(?:What|Who|How|Where|When|Whether|Which|Whatever|Whoever|Wherever|Of|For one)\b',
        "begin with the noun or a verb",
    ),
    "nobody": (
        r"\b(?:whoever|everybody|nobody|somebody|anybody|whomever)\b",
        "all workers, no worker, any worker",
    ),
    "so many": (r"\bso (?:many|much) [a-z]+\b(?<! that)(?<! as)", "this many, N, up to"),
    "is no": (
        r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|other\b|need\b)[a-z]+",
        "is not a ...",
    ),
    "leave out": (
        r"\b(?:leave|leaves|left|leaving) (?:it |them |one |this |these )?out\b"
        r"|\blet it be\b|\btak(?:e|es|en|ing) (?:it )?up\b",
        "omit, remove, drop, start",
    ),
    "story": (
        r"\b(?:troubles?|suffers?|suffered|in earnest|on purpose)\b",
        "slowdown, delay, inject, real",
    ),
    "passive": (
        r"\b(?:as|was|were|is|are) (?:asked for|refused)\b|\bis to be\b|\bare to be\b"
        r"|\bexcludes? each other\b",
        "active voice; cannot be combined, is rejected, requested",
    ),
    "register": (
        r"\b(?:odd (?:values?|ones?|runs?|lines?|things?)|rubbish|strange|now and then|as a rule"
        r"|by far|of old|unless told|as told|likewise|for people|in words|worth of)\b",
        "unexpected, invalid, periodically, usually",
    ),
    "percent": (r"\d %(?![\w(])", "10%, without a space"),
}

# Files in which a pattern matches correct English.
ALLOWED: dict[tuple[str, str], str] = {
    ("tools/lint_english.py", "*"): "the patterns themselves",
    ("src/paceline/protocol/throughput.py", "told"): "a key of checkpoints",
    ("src/paceline/launch/run.py", "story"): "the key `troubles` of run.json",
    ("src/paceline/launch/switch_search.py", "story"): "the key `troubles` of tuning.json",
    ("src/paceline/launch/compare_runs.py", "story"): "a parameter of the public function compare",
    ("src/paceline/telemetry/schema.py", "story"): "the key `troubles` of run.json",
    ("src/paceline/telemetry/events.py", "parted by"): "a field of the event `server`",
    ("src/paceline/worker/server_main.py", "parted by"): "a field of the event `server`",
    ("src/paceline/twin/run.py", "story"): "the key `troubles` of run.json",
    ("src/paceline/report/charts.py", "register"): "a variable called words",
    ("src/paceline/report/html.py", "register"): "a variable called words",
    ("docs/run-folder.md", "story"): "`troubles` is a key of run.json",
    ("docs/run-folder.md", "parted by"): "`beside` is a field of the event `server`",
    ("docs/slowdowns.md", "story"): "`troubles` is a key of run.json",
    ("docs/speed.md", "parted by"): "names of result files",
}


class Finding(NamedTuple):
    """One match of a rule."""

    path: str
    line: int
    rule: str
    text: str


def list_files() -> Iterator[Path]:
    """Yields the files to check, in a stable order."""
    for name in FILES:
        if (ROOT / name).exists():
            yield ROOT / name
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*")):
            relative = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and not relative.startswith(SKIPPED) and path.is_file():
                yield path


def read_prose(path: Path, relative: str) -> str:
    """Returns the text to check, with the same number of lines before each match as in the file."""
    text = path.read_text(encoding="utf-8")
    if relative.startswith("tests/") and path.suffix == ".py":
        docstring = re.match(r'(?:#[^\n]*\n)*"""[\s\S]*?"""', text)
        return docstring.group() if docstring else ""
    return text


def check_text(text: str, relative: str) -> Iterator[Finding]:
    """Yields the matches of all rules; a phrase may span two lines of a paragraph or comment."""
    flat = re.sub(r"\n[ \t]*(?:#:? )?", "\n", text)
    joined = flat.replace("\n", " ")
    for match in COMBINED.finditer(joined):
        rule = match.lastgroup or ""
        name = NAMES[rule]
        if (relative, name) in ALLOWED or (relative, "*") in ALLOWED:
            continue
        line = flat.count("\n", 0, match.start()) + 1
        yield Finding(relative, line, name, match.group())


NAMES = {f"r{index}": name for index, name in enumerate(RULES)}
COMBINED = re.compile(
    "|".join(f"(?P<r{index}>{pattern})" for index, (pattern, _) in enumerate(RULES.values())),
    re.IGNORECASE,
)


def main() -> int:
    """Prints all findings; returns 1 if there are any."""
    count = 0
    for path in list_files():
        relative = path.relative_to(ROOT).as_posix()
        for finding in check_text(read_prose(path, relative), relative):
            advice = RULES[finding.rule][1]
            print(f"{finding.path}:{finding.line}: {finding.text!r}; write: {advice}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
