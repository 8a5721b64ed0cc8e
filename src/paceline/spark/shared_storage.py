"""Storage shared by the driver and executors: exported data, run folders, checkpoints."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError


@dataclass(frozen=True)
class SharedStorage:
    """A directory or URL; `folder` is set if it is accessible as local files."""

    url: str
    folder: Path | None

    def run_url(self, name: str) -> str:
        return f"{self.url}/runs/{name}"

    @contextmanager
    def stage_run(self, name: str) -> Iterator[Path]:
        """Yields a run folder: in the storage if that is local, else uploaded at the end."""
        if self.folder is not None:
            out = self.folder / "runs" / name
            out.parent.mkdir(parents=True, exist_ok=True)
            yield out
            return
        with tempfile.TemporaryDirectory(prefix="paceline-run-", ignore_cleanup_errors=True) as tmp:
            out = Path(tmp) / name
            try:
                yield out
            finally:
                # Also after a failure, when the run folder is most useful.
                if out.exists():
                    _upload(out, self.run_url(name))


def as_store(text: str | None, master: str) -> SharedStorage:
    """Parses the `store` setting. Raises UsageError if it is required but not set."""
    if text is None:
        if not master.startswith("local"):
            raise UsageError(
                f"store is not set, and executors of {master or 'the cluster'} may not have access "
                "to this machine's files; set a shared one, for example "
                "store='hdfs://host:8020/paceline'"
            )
        text = tempfile.mkdtemp(prefix="paceline-store-")
        atexit.register(shutil.rmtree, text, ignore_errors=True)
    text = text.removeprefix("file://")
    if "://" in text:
        return SharedStorage(text.rstrip("/"), None)
    folder = Path(text).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return SharedStorage(str(folder), folder)


def _upload(folder: Path, url: str) -> None:
    from paceline.data.stores import open_store

    store, path = open_store(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            target = f"{path.rstrip('/')}/{file.relative_to(folder).as_posix()}"
            store.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            store.put_file(str(file), target)
