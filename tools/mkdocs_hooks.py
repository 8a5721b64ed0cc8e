"""MkDocs hooks: pages from files outside docs/, and the command reference.

`CONTRIBUTING.md` and `CHANGELOG.md` become pages. Files in examples/, bench/ and src/ that a page
links to are copied into the site, so links work on the site as in the repository. `<!-- help: NAME
-->` in a page is replaced by the output of `paceline NAME --help`. A command that fails, a missing
file or a page that loads anything from the internet stops the build.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
OUTSIDE = re.compile(
    r"\]\(((?:\.\./)+)((?:examples|bench|src)/[^)#]+|CONTRIBUTING\.md|CHANGELOG\.md)(#[^)]*)?\)"
)
REMOTE = re.compile(r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*href="https?:')
HELP = re.compile(r"^<!-- help: ([a-z ]+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository root and all files outside docs/ that pages link to."""
    for source, target in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        for other, page in ROOT_PAGES.items():
            text = text.replace(f"]({other}", f"]({page}")
        files.append(File.generated(config, target, content=text))
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= {match[2] for match in OUTSIDE.finditer(file.content_string)}
    for path in sorted(linked - ROOT_PAGES.keys()):
        if not (ROOT / path).is_file():
            raise PluginError(f"{path}: linked from docs/, but not in the repository")
        files.append(File.generated(config, f"files/{path}", content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Points links at the copied files and inserts help texts."""
    here = posixpath.dirname(page.file.src_uri)

    def relink(match: re.Match[str]) -> str:
        target = ROOT_PAGES.get(match[2], f"files/{match[2]}")
        return f"]({posixpath.relpath(target, here or '.')}{match[3] or ''})"

    return HELP.sub(lambda match: format_help(match[1]), OUTSIDE.sub(relink, markdown))


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Checks that a page loads nothing from the internet; raises PluginError if it does."""
    if found := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from the internet: {found[0]}")
    return output


def format_help(command: str) -> str:
    """Returns `paceline COMMAND --help` as a code block; raises PluginError if it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *command.split(), "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise PluginError(f"paceline {command} --help failed: {done.stderr.strip()[-300:]}")
    return f"```text\n{done.stdout.strip()}\n```"
