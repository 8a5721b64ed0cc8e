"""Makes a local directory match a list of files and requests only those that differ.

First line of input: the list as JSON (path: size, mode, SHA-256). Reply: the paths that are needed.
Then the input contains their contents, concatenated. Files of an earlier copy that are no longer in
the list are removed; files that a script created are kept. Fails while a command runs in the
folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

CHUNK = 1 << 20

if TYPE_CHECKING:  # old Python versions cannot evaluate it
    Known = dict[str, list[Any]]


def main() -> None:
    try:
        receive(json.loads(sys.stdin.buffer.readline().decode()))
    except Exception as error:
        answer({"error": f"copying failed: {error}"})


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def receive(request: dict[str, Any]) -> None:
    root = os.path.expanduser(request["root"])
    folder = os.fsencode(os.path.join(root, "files"))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lock = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        answer({"error": f"another launch of this project is in progress (in {root})"})
        return
    known = read_manifest(root)
    wanted = request["files"]
    needed = [path for path in wanted if not is_up_to_date(folder, path, wanted[path], known)]
    answer({"needed": needed})
    for path in needed:
        receive_file(folder, path, wanted[path])
    removed = delete_stale(folder, [path for path in known if path not in wanted])
    write_manifest(root, folder, wanted)
    os.close(lock)
    answer({"received": len(needed), "removed": removed})


def read_manifest(root: str) -> Known:
    """Returns size, modification time and hash of each file of the last copy."""
    try:
        with open(os.path.join(root, "files.json")) as file:
            known: Known = json.load(file)
            return known
    except (OSError, ValueError):
        return {}


def is_up_to_date(folder: bytes, path: str, wanted: list[Any], known: Known) -> bool:
    target = resolve_inside(folder, path)
    try:
        found = os.lstat(target)
    except OSError:
        return False
    if os.path.islink(target) or found.st_size != wanted[0]:
        return False
    before = known.get(path)
    if before is not None and before[:2] == [found.st_size, found.st_mtime_ns]:
        same = bool(before[2] == wanted[2])
    else:
        same = hash_file(target) == wanted[2]
    if same and found.st_mode & 0o777 != wanted[1]:
        os.chmod(target, wanted[1])
    return same


def resolve_inside(folder: bytes, path: str) -> bytes:
    """Returns the path inside the folder. Raises ValueError if it is outside.

    Paths are bytes, so that names are preserved regardless of the locale.
    """
    parts = path.split("/")
    if path.startswith("/") or not path or ".." in parts or "" in parts:
        raise ValueError(f"{path!r} is outside of the folder")
    return os.path.join(folder, *(part.encode("utf-8", "surrogateescape") for part in parts))


def receive_file(folder: bytes, path: str, wanted: list[Any]) -> None:
    target = resolve_inside(folder, path)
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        remove_blocking_file(folder, parent)
        os.makedirs(parent, exist_ok=True)
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    partial = target + b".partial"
    left, digest = wanted[0], hashlib.sha256()
    with open(partial, "wb") as file:
        while left:
            data = sys.stdin.buffer.read(min(left, CHUNK))
            if not data:
                raise EOFError("the connection was closed")
            file.write(data)
            digest.update(data)
            left -= len(data)
    if digest.hexdigest() != wanted[2]:
        os.unlink(partial)
        raise ValueError(f"{path} changed while it was copied")
    os.chmod(partial, wanted[1])
    os.replace(partial, target)


def remove_blocking_file(folder: bytes, parent: bytes) -> None:
    """Removes a file that occupies the path of a required directory."""
    while parent != folder:
        if os.path.lexists(parent) and not os.path.isdir(parent):
            os.unlink(parent)
        parent = os.path.dirname(parent)


def delete_stale(folder: bytes, paths: list[str]) -> int:
    removed = 0
    for path in paths:
        target = resolve_inside(folder, path)
        try:
            os.unlink(target)
            removed += 1
        except OSError:
            continue  # already removed, or now a directory
        parent = os.path.dirname(target)
        while parent != folder:
            try:
                os.rmdir(parent)
            except OSError:
                break  # not empty
            parent = os.path.dirname(parent)
    return removed


def write_manifest(root: str, folder: bytes, wanted: Known) -> None:
    known = {}
    for path in wanted:
        found = os.stat(resolve_inside(folder, path))
        known[path] = [found.st_size, found.st_mtime_ns, wanted[path][2]]
    partial = os.path.join(root, "files.json.partial")
    with open(partial, "w") as file:
        json.dump(known, file)
    os.replace(partial, os.path.join(root, "files.json"))


def hash_file(path: bytes) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(CHUNK), b""):
            digest.update(data)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
