"""The files of a project that go to other machines: all that no ignore file names.

.gitignore and .pacelineignore hold for their own folder and below, the deeper one decides, as in
git; where both stand in one folder, .pacelineignore comes second and can take back what the other
said.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    import pathspec

IGNORE_FILES = (".gitignore", ".pacelineignore")
NEVER = {".git", ".hg", ".svn", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache"}
ROOT_MARKS = (".git", ".pacelineignore", "pyproject.toml", "requirements.txt")
MAX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project folder and the files to copy."""

    folder: Path
    files: dict[str, tuple[int, int, str]]
    """Size, mode and SHA-256 by path inside the folder."""

    @property
    def nbytes(self) -> int:
        return sum(size for size, _, _ in self.files.values())

    def root_on(self, host: str) -> str:
        """Remote directory: one per project and origin, so that equal names do not clash, and one
        per machine, because home directories may be shared."""
        origin = f"{os.uname().nodename}:{self.folder}"
        word = "".join(c if c.isalnum() else "-" for c in self.folder.name).strip("-")[:40]
        name = f"{word or 'project'}-{_hash(origin.encode())[:8]}"
        return f"~/.paceline/launch/{name}/{host.replace(':', '_')}"


def find_project(script: Path, folder: Path | None) -> Path:
    """Returns the folder to copy: as given, else the project that contains the script."""
    if not script.is_file():
        raise UsageError(f"script {script} was not found; use the path of a Python file")
    script = script.resolve()
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"--project {folder} is not a folder")
        if not script.is_relative_to(folder.resolve()):
            raise UsageError(f"script {script} is not inside --project {folder}")
        return folder.resolve()
    home = Path.home()
    for above in script.parents:
        if above in (home, Path("/")):
            break  # a stray marker file in the home directory must not copy all of it
        if any((above / mark).exists() for mark in ROOT_MARKS):
            return above
    return script.parent


def read_project(folder: Path, leave_out: Path | None = None, limit: int = MAX_BYTES) -> Project:
    """Lists and hashes the files to copy; `leave_out` is the output folder.

    Raises UsageError for a folder that is too large to be meant, and for files that cannot be read.
    """
    files: dict[str, tuple[int, int, str]] = {}
    total = 0
    skip = leave_out.resolve() if leave_out is not None else None
    for path in sorted(_walk(folder, folder, [], skip)):
        try:
            found = path.stat()
            total += found.st_size
            if total > limit:
                raise UsageError(
                    f"project {folder} contains more than {limit / 2**30:g} GB to copy; list data "
                    "in .pacelineignore, or choose another directory with --project"
                )
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(
                f"cannot read {path} ({error.strerror}); add it to "
                ".pacelineignore if it is not needed"
            ) from None
        mode = 0o755 if found.st_mode & stat.S_IXUSR else 0o644
        files[path.relative_to(folder).as_posix()] = (found.st_size, mode, digest)
    return Project(folder=folder, files=files)


def _walk(
    top: Path, folder: Path, rules: list[tuple[Path, pathspec.PathSpec[Any]]], skip: Path | None
) -> Iterator[Path]:
    rules = [*rules, *_read_rules(folder)]
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.name in NEVER or path == skip:
                continue
            # A link to a file is sent as the file; a link to a folder could be cyclic.
            is_folder = entry.is_dir(follow_symlinks=False)
            if _is_ignored(path, is_folder, rules):
                continue
            if is_folder:
                yield from _walk(top, path, rules, skip)
            elif entry.is_file():
                yield path


def _read_rules(folder: Path) -> Iterator[tuple[Path, pathspec.PathSpec[Any]]]:
    for name in IGNORE_FILES:
        try:
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        yield folder, _load_pathspec().GitIgnoreSpec.from_lines(lines)


def _load_pathspec() -> Any:
    try:
        import pathspec
    except ImportError:
        raise UsageError(
            "ignore files require the package pathspec; install paceline[ssh]"
        ) from None
    return pathspec


def _is_ignored(
    path: Path, is_folder: bool, rules: list[tuple[Path, pathspec.PathSpec[Any]]]
) -> bool:
    ignored = False
    for folder, spec in rules:
        name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
        verdict = spec.check_file(name).include
        if verdict is not None:
            ignored = verdict
    return ignored


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
