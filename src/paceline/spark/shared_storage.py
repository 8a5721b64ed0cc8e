"""Storage shared by the driver and executors: exported data, run folders, checkpoints."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.errors import UsageError


@dataclass(frozen=True)
class SharedStorage:
    """A directory or URL; `folder` is set if it is accessible as local files."""

    url: str
    folder: Path | None


def as_store(text: str | None, master: str) -> SharedStorage:
    """Parses the `store` setting. Raises UsageError if it is required but not set."""
    if text is None:
        if not master.startswith("local"):
            raise UsageError(
                f"store is not set, and executors of {master or 'the cluster'} may not have access "
                "to this machine's files; set a shared one, for example "
                "store='hdfs://host:8020/paceline'"
            )
        folder = Path(tempfile.mkdtemp(prefix="paceline-store-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return SharedStorage(str(folder), folder)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        return SharedStorage(text.rstrip("/"), None)
    folder = Path(text).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return SharedStorage(str(folder), folder)


class StagedRunFolder:
    """A run folder in the store: written in place if it is local, else uploaded at the end."""

    def __init__(self, store: SharedStorage, name: str) -> None:
        self._store = store
        self.url = f"{store.url}/runs/{name}"
        self._name = name
        self._local: Path | None = None

    def __enter__(self) -> Path:
        if self._store.folder is not None:
            out = self._store.folder / "runs" / self._name
            out.parent.mkdir(parents=True, exist_ok=True)
            return out
        self._local = Path(tempfile.mkdtemp(prefix="paceline-run-"))
        return self._local / self._name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._local is None:
            return
        try:
            # Also after a failure, when the run folder is most useful.
            if (self._local / self._name).exists():
                upload(self._local / self._name, self.url)
        finally:
            shutil.rmtree(self._local, ignore_errors=True)


def upload(folder: Path, url: str) -> None:
    from paceline.data.stores import open_store

    store, path = open_store(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            target = f"{path.rstrip('/')}/{file.relative_to(folder).as_posix()}"
            store.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            store.put_file(str(file), target)
