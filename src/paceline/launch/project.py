"""The files of a project that go to other machines: all that no ignore file names.

.gitignore and .pacelineignore hold for their own folder and below, the deeper one decides, as in
git; where both stand in one folder, .pacelineignore comes second and can take back what the other
said.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    import pathspec

    from paceline.cluster.pool import Host

IGNORE_FILES = (".gitignore", ".pacelineignore")
NEVER = {".git", ".hg", ".svn", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache"}
ROOT_MARKS = (".git", ".pacelineignore", "pyproject.toml", "requirements.txt")
MAX_BYTES = 1 << 30

Rules = list[tuple[Path, "pathspec.PathSpec[Any]"]]
"""Ignore files, each with its folder."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project folder and the files to copy."""

    folder: Path
    files: dict[str, tuple[int, int, str]]
    """Size, mode and SHA-256 by path inside the folder."""

    @property
    def nbytes(self) -> int:
        return sum(size for size, _, _ in self.files.values())

    def describe(self, hosts: Sequence[Host]) -> list[str]:
        """Describes what is copied where, in lines for `--dry-run`."""
        lines = [f"project {self.folder}: {len(self.files)} files, {self.nbytes} bytes"]
        for host in hosts:
            to = f"copied to {self.root_on(host.host)}/files"
            lines.append(f"{host.host}: {'in place' if host.is_local else to}")
        return lines

    def root_on(self, host: str) -> str:
        """Remote directory: one per project and origin, so that equal names do not clash, and one
        per machine, because home directories may be shared."""
        origin = f"{os.uname().nodename}:{self.folder}"
        word = "".join(c if c.isalnum() else "-" for c in self.folder.name).strip("-")[:40]
        name = f"{word or 'project'}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"
        return f"~/.paceline/launch/{name}/{host.replace(':', '_')}"


@dataclass(frozen=True, kw_only=True)
class ProjectBundle:
    """Files to copy to other machines, and what to prepare there."""

    project: Project | None = None
    requirements: Path | None = None
    """Make a virtual environment from it."""
    directory: str = "."
    """Working directory of the processes, inside the project."""
    on_progress: Callable[[str], None] = field(default=lambda line: None)
    """Receives progress messages for the user."""

    def locate(self, file: Path) -> str:
        """Returns the path of a file of the project, relative to the working directory."""
        assert self.project is not None, "a file goes along with its project"
        path = os.path.relpath(file.resolve(), self.project.folder / self.directory)
        return Path(path).as_posix()


def bundle_project(
    file: Path | None,
    *,
    out: Path,
    folder: Path | None = None,
    venv: bool = False,
    kind: str = "job file",
    tell: Callable[[str], None] = lambda line: None,
) -> ProjectBundle:
    """Bundles the project of a job file or script; other jobs need none unless a folder is given.

    A script starts in the directory that corresponds to the current one, if that is in the project.
    Raises UsageError if the file, the project or its requirements are missing or ignored.
    """
    if file is None and folder is None:
        if venv:
            raise UsageError("--venv requires --project, the folder with requirements.txt")
        return ProjectBundle(on_progress=tell)
    found = find_project(file, folder)
    requirements = found / "requirements.txt" if venv else None
    if requirements is not None and not requirements.is_file():
        raise UsageError(f"--venv: {found} has no requirements.txt; add one, or remove --venv")
    # Earlier runs next to this one are not copied either.
    project = read_project(found, leave_out=out.parent if out.parent.name == "runs" else out)
    if file is not None and file.resolve().relative_to(found).as_posix() not in project.files:
        raise UsageError(f"{kind} {file} is excluded by an ignore file of {found}")
    here = Path.cwd().resolve()
    inside = kind == "script" and here.is_relative_to(found)
    return ProjectBundle(
        project=project,
        requirements=requirements,
        directory=here.relative_to(found).as_posix() if inside else ".",
        on_progress=tell,
    )


def find_project(script: Path | None, folder: Path | None) -> Path:
    """Returns the folder to copy: as given, else the project that contains the script."""
    if script is not None and not script.is_file():
        raise UsageError(f"script {script} was not found; use the path of a Python file")
    script = script and script.resolve()
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"--project {folder} is not a folder")
        if script is not None and not script.is_relative_to(folder.resolve()):
            raise UsageError(f"script {script} is not inside --project {folder}")
        return folder.resolve()
    assert script is not None, "a script or a folder is given"
    for above in script.parents:
        if above in (Path.home(), Path("/")):
            break  # a stray marker file in the home directory must not copy all of it
        if any((above / mark).exists() for mark in ROOT_MARKS):
            return above
    return script.parent


def read_project(folder: Path, leave_out: Path | None = None, limit: int = MAX_BYTES) -> Project:
    """Lists and hashes the files to copy; `leave_out` is the output folder.

    Raises UsageError for a folder that is too large to be meant, and for files that cannot be read.
    """
    files, total = {}, 0
    skip = leave_out.resolve() if leave_out is not None else None
    for path in sorted(_walk(folder, [], skip)):
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


def _walk(folder: Path, rules: Rules, skip: Path | None) -> Iterator[Path]:
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
                yield from _walk(path, rules, skip)
            elif entry.is_file():
                yield path


def _read_rules(folder: Path) -> Rules:
    rules: Rules = []
    for name in IGNORE_FILES:
        try:
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        try:
            import pathspec
        except ImportError:
            raise UsageError(
                "ignore files require the package pathspec; install paceline[ssh]"
            ) from None
        rules.append((folder, pathspec.GitIgnoreSpec.from_lines(lines)))
    return rules


def _is_ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    ignored: bool | None = None
    for folder, spec in reversed(rules):
        name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
        if (ignored := spec.check_file(name).include) is not None:
            break
    return bool(ignored)
