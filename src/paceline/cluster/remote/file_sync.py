"""Makes a folder here equal to a list of files, and asks only for those that differ.

First line of input: the list, as JSON (path: size, mode, SHA-256). Answer: which are needed. Then
their contents, one behind the other. Files of an earlier copy that are no longer in the list are
removed; what a script wrote here itself stays. While a command runs in the folder nothing changes.
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

if TYPE_CHECKING:  # old Pythons cannot evaluate it
    Known = dict[str, list[Any]]


def main() -> None:
    try:
        receive(json.loads(sys.stdin.buffer.readline().decode()))
    except Exception as error:
        answer({"error": f"copying failed: {error}"})


def answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def receive(asked: dict[str, Any]) -> None:
    root = os.path.expanduser(asked["root"])
    folder = os.fsencode(os.path.join(root, "files"))
    if asked.get("remove"):
        shutil.rmtree(root, ignore_errors=True)
        answer({"removed": root})
        return
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lock = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        answer({"error": f"another launch of this project is running there (in {root})"})
        return
    known = read_manifest(root)
    wanted = asked["files"]
    needed = [path for path in wanted if not is_up_to_date(folder, path, wanted[path], known)]
    answer({"needed": needed})
    for path in needed:
        receive_file(folder, path, wanted[path])
    removed = delete_stale(folder, [path for path in known if path not in wanted])
    write_manifest(root, folder, wanted)
    os.close(lock)
    answer({"received": len(needed), "removed": removed})


def read_manifest(root: str) -> Known:
    """What the last copy put here: size, time of change and hash of each file."""
    try:
        with open(os.path.join(root, "files.json")) as file:
            known: Known = json.load(file)
            return known
    except (OSError, ValueError):
        return {}


def is_up_to_date(folder: bytes, path: str, wanted: list[Any], known: Known) -> bool:
    place = resolve_inside(folder, path)
    try:
        found = os.lstat(place)
    except OSError:
        return False
    if os.path.islink(place) or found.st_size != wanted[0]:
        return False
    before = known.get(path)
    if before is not None and before[:2] == [found.st_size, found.st_mtime_ns]:
        same = bool(before[2] == wanted[2])
    else:
        same = hash_file(place) == wanted[2]
    if same and found.st_mode & 0o777 != wanted[1]:
        os.chmod(place, wanted[1])
    return same


def resolve_inside(folder: bytes, path: str) -> bytes:
    """A list that names a place outside of the folder is refused.

    Names are bytes to the system: those that they have at home, whatever the locale here.
    """
    parts = path.split("/")
    if path.startswith("/") or not path or ".." in parts or "" in parts:
        raise ValueError(f"{path!r} lies outside of the folder")
    return os.path.join(folder, *(part.encode("utf-8", "surrogateescape") for part in parts))


def receive_file(folder: bytes, path: str, wanted: list[Any]) -> None:
    place = resolve_inside(folder, path)
    above = os.path.dirname(place)
    if not os.path.isdir(above):
        remove_blocking_file(folder, above)
        os.makedirs(above, exist_ok=True)
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    partial = place + b".partial"
    left, digest = wanted[0], hashlib.sha256()
    with open(partial, "wb") as file:
        while left:
            data = sys.stdin.buffer.read(min(left, CHUNK))
            if not data:
                raise EOFError("the connection ended")
            file.write(data)
            digest.update(data)
            left -= len(data)
    if digest.hexdigest() != wanted[2]:
        os.unlink(partial)
        raise ValueError(f"{path} changed while it was copied")
    os.chmod(partial, wanted[1])
    os.replace(partial, place)


def remove_blocking_file(folder: bytes, above: bytes) -> None:
    """A file that stands where a folder is needed now."""
    while above != folder:
        if os.path.lexists(above) and not os.path.isdir(above):
            os.unlink(above)
        above = os.path.dirname(above)


def delete_stale(folder: bytes, paths: list[str]) -> int:
    removed = 0
    for path in paths:
        place = resolve_inside(folder, path)
        try:
            os.unlink(place)
            removed += 1
        except OSError:
            continue  # gone already, or a folder now
        above = os.path.dirname(place)
        while above != folder:
            try:
                os.rmdir(above)
            except OSError:
                break  # not empty
            above = os.path.dirname(above)
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
