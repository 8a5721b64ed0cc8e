"""Access to files by URL, local or remote.

`file`, `hdfs`, `s3`, `sftp` and `http(s)` use fsspec. Errors of a store become one line with the
URL, the problem and the remedy. Credentials are never part of a URL: s3 reads them from the
standard variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL), sftp uses the
user's SSH keys, and hdfs uses HADOOP_CONF_DIR if it is set.
"""

import gzip
import os
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import DataError, UsageError, suggest_name

T = TypeVar("T")

SCHEMES = ("file", "hdfs", "http", "https", "s3", "sftp")
ATTEMPTS = 3
"""Number of attempts to read, with exponential backoff."""
FIRST_PAUSE_S = 0.5

GZIP_MAGIC = b"\x1f\x8b"
_GLOB = "*?["
_HIDDEN = ("_", ".")
_DOCUMENT = re.compile(r"(readme|licen[sc]e|copying|citation)(\..*)?|.*\.(md|rst)", re.IGNORECASE)


@dataclass(frozen=True)
class StoredFile:
    """A file and its size in bytes when it was listed."""

    url: str
    size: int
    stamp: str = ""
    """Changes with the file, if the store supports it."""
    part: str = ""
    """The split to read, if the file contains several."""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Reads a byte range in one request. Raises DataError with the URL and the range."""
        store, path = open_store(self.url)
        scheme = scheme_of(self.url)

        def read() -> Any:
            if scheme not in ("file", "sftp"):
                return store.cat_file(path, start=start or None, end=stop)
            # The cat_file of sftp ignores the range and returns the whole file.
            with store.open(path, "rb") as stream:
                stream.seek(start)
                return stream.read(-1 if stop is None else stop - start)

        remote_range = stop is not None and scheme != "file"
        where = f" (bytes {start:,} to {stop:,})" if remote_range else ""
        content: bytes = with_retries(self.url, read, where)
        return content

    def unpack(self, data: bytes, decompress: Callable[[bytes], bytes] = gzip.decompress) -> bytes:
        """Decompresses contents of the file. Raises DataError if they are truncated or damaged."""
        try:
            return decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise self.error(f"is truncated or damaged ({error})") from None

    def error(self, what: str, where: str = "", *, at: int | None = None) -> DataError:
        """Returns a one-line error about the file, at a position or at a byte of it."""
        byte = "" if at is None else f" (at byte {at:,})"
        return DataError(f"{self.url}{where}{byte}: {' '.join(what.split())}")


Files = tuple[StoredFile, ...]


def is_url_or_path(text: str) -> bool:
    """Returns whether the text is a location rather than the name of a built-in dataset."""
    return "://" in text or "/" in text or any(c in text for c in _GLOB) or "." in text


def scheme_of(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


def make_absolute(url: str) -> str:
    """Makes local paths absolute, so that other processes find the same files."""
    if "://" in url:
        return url
    return str(Path(os.path.expanduser(url)).absolute())


def require_extra(module: str, extra: str, what: str) -> Any:
    """Imports a module of an extra. Raises UsageError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{what} requires {module.partition('.')[0]}, which is not installed ({error}); "
            f"run pip install 'paceline[{extra}]'"
        ) from None


@lru_cache(maxsize=64)
def _open_store(scheme: str, netloc: str) -> Any:
    fsspec = require_extra("fsspec", "data", "reading files by URL")
    if scheme == "hdfs":
        native = require_extra("hdfs_native.fsspec", "hdfs", "hdfs://")
        host, _, port = netloc.partition(":")
        return native.HdfsFileSystem(host=host, port=int(port) if port else None)
    if scheme == "sftp":
        sshfs = require_extra("sshfs", "sftp", "sftp://")
        user, _, address = netloc.rpartition("@")
        host, _, port = address.partition(":")
        options: dict[str, Any] = {"port": int(port)} if port else {}
        if user:
            options["username"] = user
        return sshfs.SSHFileSystem(host, **options)
    if scheme in ("http", "https"):
        require_extra("aiohttp", "http", f"{scheme}://")
    if scheme == "s3":
        require_extra("s3fs", "s3", "s3://")
        # A cached listing would hide files written since.
        return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    return fsspec.filesystem(scheme)


def open_store(url: str) -> tuple[Any, str]:
    """Returns the file system and path of a URL. Raises UsageError for an unknown scheme."""
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        raise UsageError(f"{url}: unknown scheme {scheme!r}; {suggest_name(scheme, SCHEMES)}")
    rest = url.partition("://")[2] if "://" in url else url
    if scheme == "file":
        return _open_store("file", ""), make_absolute(rest)
    if scheme in ("http", "https"):
        return _open_store(scheme, ""), url
    netloc, _, path = rest.partition("/")
    if not netloc:
        raise UsageError(f"{url}: the {'bucket' if scheme == 's3' else 'host'} is missing")
    if scheme == "s3":
        return _open_store("s3", ""), rest
    try:
        return _open_store(scheme, netloc), f"/{path}"
    except UsageError:
        raise
    except Exception as error:
        raise explain_store_error(url, error) from error


def explain_store_error(url: str, error: BaseException) -> DataError:
    """Converts a store's exception to a one-line DataError."""
    is_s3 = scheme_of(url) == "s3"
    reason = " ".join(str(error).split()) or type(error).__name__
    if is_s3 and (isinstance(error, PermissionError) or "credentials" in reason.lower()):
        what = f"access denied ({reason}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    elif is_s3 and isinstance(error, FileNotFoundError) and "bucket" in reason.lower():
        bucket = url.partition("://")[2].partition("/")[0]
        what = f"bucket {bucket!r} does not exist; check its name"
    elif isinstance(error, FileNotFoundError):
        what = "no such file"
    elif isinstance(error, PermissionError):
        what = f"permission denied ({reason})"
    else:
        what = f"cannot be read ({reason})"
    return DataError(f"{url}: {what}")


def with_retries(url: str, act: Callable[[], T], where: str = "") -> T:
    """Calls `act`, retrying transient failures. Raises DataError."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return act()
        except (DataError, UsageError):
            raise
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise explain_store_error(url, error) from error
        except Exception as error:
            if attempt == ATTEMPTS:
                raise explain_store_error(url + where, error) from error
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))


def list_files(url: str) -> Files:
    """Returns the data files of a URL (a file, a directory or a pattern), sorted.

    Names that begin with "_" or "." are markers of other programs and are skipped, as are the
    documents that accompany data, unless there is nothing else. Raises DataError without files.
    """
    store, path = open_store(url)
    found = with_retries(url, lambda: _find(store, path))
    files = [
        StoredFile(_url_of(str(facts["name"]), url), int(facts["size"] or 0), _stamp(facts))
        for facts in found
        if not str(facts["name"]).rpartition("/")[2].startswith(_HIDDEN)
    ]
    if not files:
        if scheme_of(url) == "s3":
            bucket = path.partition("/")[0]
            if not with_retries(url, lambda: _exists(store, bucket)):
                raise DataError(f"{url}: bucket {bucket!r} does not exist; check its name")
        raise DataError(f"{url}: no data files found; use a file, a directory or a pattern")
    data = [file for file in files if not _DOCUMENT.fullmatch(file.name)]
    return tuple(sorted(data or files, key=lambda file: file.url))


def _exists(store: Any, bucket: str) -> bool:
    # Lists the contents, because `exists` only checks the user's own buckets.
    try:
        store.ls(bucket, refresh=True)
    except FileNotFoundError:
        return False
    return True


def _stamp(facts: dict[str, Any]) -> str:
    names = ("ETag", "mtime", "modification_time", "LastModified")
    return next((str(facts[name]) for name in names if facts.get(name)), "")


def _find(store: Any, path: str) -> list[dict[str, Any]]:
    if any(c in path for c in _GLOB):
        found = store.glob(path, detail=True).values()
    else:
        try:
            facts = store.info(path)
        except FileNotFoundError:
            return []
        if facts["type"] == "file":
            return [facts]
        found = store.find(path, detail=True).values()
    return [facts for facts in found if facts["type"] == "file"]


def _url_of(name: str, url: str) -> str:
    """Returns the URL of a file that a store lists under this name for `url`."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("http", "https"):
        return name
    if scheme in ("file", "s3"):
        return f"{scheme}://{name.removeprefix(f'{scheme}://')}"
    prefix = f"{scheme}://{rest.partition('/')[0]}"
    return f"{prefix}/{name.removeprefix(prefix).removeprefix('/')}"


def parent_url(url: str) -> str:
    """Returns the directory of a file or pattern; a directory is returned unchanged."""
    head = url
    while any(c in head for c in _GLOB):
        head = head.rpartition("/")[0]
    if head == url and "." in url.rpartition("/")[2]:
        head = url.rpartition("/")[0]
    return head.rstrip("/")


def join_url(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def read_if_exists(url: str) -> bytes | None:
    """Reads a small file; returns None if it does not exist."""
    store, path = open_store(url)
    content: bytes | None = None
    # The file is optional; a real problem with the store surfaces in later reads.
    with suppress(Exception):
        content = store.cat_file(path)
    return content


def write_bytes(url: str, content: bytes) -> None:
    """Writes a file and creates its directory. Raises DataError."""
    store, path = open_store(url)

    def write() -> None:
        if scheme_of(url) in ("file", "hdfs", "sftp"):
            store.makedirs(path.rpartition("/")[0], exist_ok=True)
        with store.open(path, "wb") as stream:
            stream.write(content)

    with_retries(url, write)
