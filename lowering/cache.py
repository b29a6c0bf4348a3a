"""The kernel cache on disk: content-addressed, verified on load, this user's alone, safe for any number of processes.

    <root>/v2/kernels/<key>/      one compiled kernel; manifest.json, written last, holds sha256 of every other file
    <root>/v2/bytecode/<key>/     bytecode of a package, likewise (`bytecode.py`)
    <root>/v2/locks/<key>.lock    held while an entry is built, so that only one process builds it
    <root>/v2/building/           private folders of builds in progress; renamed into kernels/ when complete
    <root>/v2/quarantine/         entries that failed verification, kept for inspection
    <root>/tilelang/              TileLang's own cache, unless TILELANG_CACHE_DIR names another place

The lock only saves work. Correctness rests on the rename: an entry appears complete or not at all, and whoever comes
second finds it there and throws the own copy away.

An entry is code that runs in this process. Folders are made 0700 and files 0600; what another user owns or may
write is refused with a CacheError, and so are links in the place of these folders.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from terrazzo.lowering import folders
from terrazzo.lowering.errors import CacheError
from terrazzo.lowering.folders import FILES, LIBRARY, MANIFEST, DistrustError, Folder

__all__ = ["FILES", "MANIFEST", "cache_root", "clear", "get_or_build", "list_entries", "lookup", "verify"]

LOCK_TIMEOUT_S = 300.0
VERSION = "v2"
_OLD_VERSIONS = ("v1",)  # never read; `clear` removes them
KERNELS, BYTECODE, MODULES = "kernels", "bytecode", "modules.bin"
_NEEDED = {KERNELS: FILES, BYTECODE: (MODULES,)}
"""Files of every entry, by the folder that it lies in."""
_KEY = "[0-9a-f]{64}"
_MADE_HERE = {**dict.fromkeys(_NEEDED, re.compile(_KEY)), "quarantine": re.compile(rf"{_KEY}\.[0-9a-f]+")}
_REMEDY = "set TERRAZZO_CACHE_DIR to a writable folder of your own"


def cache_root() -> Path:
    """$TERRAZZO_CACHE_DIR, else ~/.cache/terrazzo, as an absolute path.

    A relative folder is that of the working directory at the first call; a later chdir does not move it.

    Raises:
        CacheError: there is no home folder, or no working directory, to name it from.
    """
    folder = os.environ.get("TERRAZZO_CACHE_DIR") or "~/.cache/terrazzo"
    try:
        return _absolute(Path(folder).expanduser())
    except (RuntimeError, OSError) as error:
        raise CacheError(
            f"kernel cache {folder} cannot be found: {error}; set TERRAZZO_CACHE_DIR to the absolute path of a folder"
        ) from error


@cache
def _absolute(folder: Path) -> Path:
    return folder.absolute()


def _existing(*names: str) -> Path | None:
    """A folder of the cache, or None where there is none.

    Raises:
        CacheError: it, or a folder of the cache above it, is none, a link, or may hold another user's code.
    """
    folder = cache_root()
    for name in ("", *names):
        folder = folder / name
        try:
            seen = os.stat(folder, follow_symlinks=not name)  # the root itself may be a link to another disk
            if not stat.S_ISDIR(seen.st_mode):
                raise CacheError(
                    f"kernel cache {folder} is {folders.kind_of(seen)} where a folder must be; remove it, or {_REMEDY}"
                )
            folders.require_trusted(f"kernel cache {folder}", seen, folders.owners())
        except FileNotFoundError:
            return None
        except DistrustError as error:
            raise CacheError(
                f"{error}, so its kernels could be another user's code; "
                f"make it your own (chmod go-w), remove it, or {_REMEDY}"
            ) from error
        except OSError as error:
            raise CacheError(f"kernel cache {folder} cannot be read: {error.strerror}; {_REMEDY}") from error
    return folder


def room(*names: str) -> Path:
    """A folder of the cache, made for this user alone if it is not there.

    Raises:
        CacheError: it cannot be made, or must not be used.
    """
    folder = cache_root().joinpath(*names)
    if _existing(*names) is None:
        try:
            folders.make_folders(folder)
        except OSError as error:
            raise CacheError(f"kernel cache {folder} cannot be made: {error}; {_REMEDY}") from error
        if _existing(*names) is None:
            raise CacheError(f"kernel cache {folder} vanishes as soon as it is made; {_REMEDY}")
    return folder


def tilelang_folder() -> str:
    """Where TileLang keeps what it compiles for itself: $TILELANG_CACHE_DIR, else beside our kernels."""
    return os.environ.get("TILELANG_CACHE_DIR") or str(room("tilelang"))


def lookup(key: str, meta: Mapping[str, Any] | None = None, kind: str = KERNELS) -> Path | None:
    """The verified entry of a key, or None. A damaged entry counts as absent and is moved to quarantine/, if it can be.

    Args:
        meta: as `get_or_build` was told; the entry must have the same identity, request and toolchain.
        kind: KERNELS or BYTECODE.

    Raises:
        CacheError: the cache or the entry must not be trusted, because another user owns it or may write it.
    """
    return None if read(key, meta, kind) is None else cache_root().joinpath(VERSION, kind, key)


def read(key: str, meta: Mapping[str, Any] | None = None, kind: str = KERNELS) -> dict[str, bytes] | None:
    """Files of the entry that `lookup` finds, as they were verified."""
    entries = _existing(VERSION, kind)
    entry = None if entries is None else entries / key
    if entry is None or not os.path.lexists(entry):
        return None
    try:
        said = {name: value for name, value in (meta or {}).items() if name in ("identity", "request", "toolchain")}
        return read_entry(entry, {**said, "key": key})[1]
    except DistrustError as error:
        raise CacheError(f"{error}, so it could be another user's code; remove {entry}") from error
    except ValueError:
        if entry.exists():  # no other process removed it meanwhile
            quarantine(key, kind)
        return None


def read_entry(entry: Path, meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Manifest and files of an entry, read once and verified.

    Args:
        meta: fields of the manifest and what each must say; with an identity, the code's own mark must say it too.

    Raises:
        DistrustError: somebody else may have written it.
        ValueError: it is damaged, or another kernel's.
    """
    if entry.is_symlink():
        raise DistrustError(f"{entry} is a link")
    contents: dict[str, bytes] = {}
    with Folder(entry) as folder:
        manifest = folders.read_manifest(folder, _NEEDED[entry.parent.name], contents.__setitem__)
    for name, value in meta.items():
        if name not in manifest or not folders.same_json(manifest[name], value):
            raise ValueError(f"{MANIFEST} is of another kernel: its {name} is not the one that was asked for")
    if "identity" in manifest and LIBRARY in contents:
        folders.require_mark(contents[LIBRARY], str(manifest["identity"]))
    return manifest, contents


def quarantine(key: str, kind: str = KERNELS) -> Path | None:
    """Move an entry out of the way; None if another process did it first, or it cannot be moved (a read-only cache)."""
    try:
        place = room(VERSION, "quarantine") / f"{key}.{secrets.token_hex(8)}"
        os.rename(room(VERSION, kind) / key, place)
    except (CacheError, OSError):
        return None
    return place


def get_or_build(
    key: str,
    meta: Mapping[str, Any],
    build: Callable[[Path], None],
    timeout: float | None = None,
    kind: str = KERNELS,
) -> Path:
    """The entry of `key`, built by `build(private_folder)` if it is absent (ask `lookup` first, it takes no lock).

    Several processes that ask for one key at once build it once. If the lock does not come free within `timeout`
    seconds (LOCK_TIMEOUT_S; a stopped process, a network file system without locks), the kernel is built without it.

    Args:
        meta: what the manifest says beside key, time and files; an identity is also written after the code.
        kind: KERNELS or BYTECODE.

    Raises:
        CacheError: the cache folder cannot be written (an OSError of `build` counts as that), must not be trusted, or
            a damaged entry of this key cannot be moved out of the way.
    """
    with _writing(), key_lock(key, LOCK_TIMEOUT_S if timeout is None else timeout):
        entry = lookup(key, meta, kind)
        if entry is not None:
            return entry
        building, final = room(VERSION, "building"), room(VERSION, kind) / key
        folders.sweep(building, _KEY)
        with folders.private_folder(building, key) as private:
            build(private)
            if "identity" in meta:
                folders.mark_library(private / LIBRARY, meta["identity"])
            folders.write_manifest(private, {"key": key, "created": time.time(), **meta})
            for _ in range(2):  # a damaged entry that was there first is gone the second time
                if folders.publish_folder(private, final) or lookup(key, meta, kind) is not None:
                    return final
    raise CacheError(f"{final} is damaged and cannot be moved; remove it, or set TERRAZZO_CACHE_DIR to another folder")


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Inside, an OSError (no space, no permission) is a CacheError that names the folder and how to choose another."""
    try:
        yield
    except OSError as error:
        place, remedy = f"kernel cache {cache_root()}", _REMEDY
        if _is_about_temporary_files(error):
            place, remedy = "the folder for temporary files", "set TMPDIR to a folder with free space"
        raise CacheError(f"{place} cannot be written: {error}; make room there, or {remedy}") from error


def _is_about_temporary_files(error: OSError) -> bool:
    """Whether a failed write went to TMPDIR, by the file that it names, or by who is full where it names none."""
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:
        return True
    if isinstance(error.filename, str | bytes):
        where = Path(os.fsdecode(error.filename))
        return where.is_relative_to(temporary) and not where.is_relative_to(cache_root())
    return error.errno in (errno.ENOSPC, errno.EDQUOT) and _is_full(temporary) and not _is_full(cache_root())


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        room = os.statvfs(folder)
        return room.f_bavail * room.f_frsize < 1 << 16
    return False


@contextlib.contextmanager
def key_lock(key: str, timeout: float) -> Iterator[bool]:
    """Hold the lock of a key; yields False if it did not come free in time. A killed holder frees it."""
    import filelock

    lock = filelock.FileLock(room(VERSION, "locks") / f"{key}.lock", timeout=timeout, mode=0o600)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _made_here(version: str, name: str) -> list[Path]:
    """Folders that this cache made in one of its own, by their names; links and everything else are left alone."""
    parent = _existing(version, name)
    found = [] if parent is None else sorted(path for path in parent.iterdir() if _MADE_HERE[name].fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def list_entries() -> list[dict[str, Any]]:
    """One dict for each cached kernel: key, name, target, params, created (unix time), bytes, registers, spill_stores,
    tensor_instructions (empty where they were not counted). Unreadable entries are left out; `verify` names them.

    Raises:
        CacheError: the cache is no folder, or must not be trusted.
    """
    rows = []
    for entry in _made_here(VERSION, "kernels"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            with Folder(entry) as folder:
                manifest = folders.parse_json(folder.read(MANIFEST, folders.MANIFEST_BYTES))
                report = folders.parse_json(folder.read("report.json"))
            request = manifest["request"]
            row = {
                "key": entry.name,
                **{field: request[field] for field in ("name", "target")},
                "params": dict(request["params"]),
                "created": manifest["created"],
                "bytes": _size(entry),
                **{field: report[field] for field in ("registers", "spill_stores")},
                "tensor_instructions": report.get("tensor_instructions", []),
            }
            if all(isinstance(row[field], _FIELDS[field]) for field in _FIELDS):
                rows.append(row)
    return rows


_FIELDS = {"name": str, "target": str, "created": int | float, "registers": int, "spill_stores": int}
_FIELDS |= {"tensor_instructions": list}


def clear() -> dict[str, int]:
    """Remove every entry, quarantined ones, entries of older versions and what killed builds left.

    Returns {"entries": removed, "bytes": freed}. Kernels that a process has loaded stay usable there; builds in
    progress are left alone, and so is everything whose name was not made here.

    Raises:
        CacheError: the cache is no folder, must not be trusted, or an entry cannot be removed (a read-only cache).
    """
    removed, freed, failure = 0, 0, None
    found = [folder for name in _MADE_HERE for folder in _made_here(VERSION, name)]
    for version in _OLD_VERSIONS:
        with contextlib.suppress(CacheError):  # it is never read, so it may stay
            found += [*_made_here(version, "kernels"), *_made_here(version, "quarantine")]
    for folder in found:
        try:
            size = _size(folder)
            shutil.rmtree(folder)
            removed, freed = removed + 1, freed + size
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:
            failure = error
    building = _existing(VERSION, "building")
    if building is not None:
        folders.sweep(building, _KEY)
    if failure is not None:
        why = "read-only" if failure.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else failure.strerror
        raise CacheError(
            f"kernel cache {cache_root()} cannot be cleared: {failure}; it is {why} for this user, "
            f"{removed} entries were removed; clear it as the user who owns it, or {_REMEDY}"
        )
    return {"entries": removed, "bytes": freed}


def sweep() -> None:
    """Remove what killed builds left; those in progress are left alone."""
    with contextlib.suppress(CacheError, OSError):
        building = _existing(VERSION, "building")
        if building is not None:
            folders.sweep(building, _KEY)


def verify() -> list[dict[str, Any]]:
    """Check every entry, kernels and bytecode: one dict for each with key, kind ("kernels", "bytecode"), ok and problem
    ("" if ok). Damaged entries go to quarantine/.

    Raises:
        CacheError: the cache is no folder, or must not be trusted.
    """
    rows = []
    for kind in _NEEDED:
        folder = _existing(VERSION, kind)
        for entry in sorted(folder.iterdir()) if folder is not None else ():
            problem = ""
            try:
                if not _MADE_HERE[kind].fullmatch(entry.name):
                    raise DistrustError(f"{entry} was not made here")
                read_entry(entry, {"key": entry.name})
            except DistrustError as error:
                problem = str(error)  # it stays where it is: it may not be ours to move
            except ValueError as error:
                problem = str(error)
                quarantine(entry.name, kind)
            rows.append({"key": entry.name, "kind": kind, "ok": not problem, "problem": problem})
    return rows
