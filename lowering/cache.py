"""The kernel cache on disk: content-addressed, verified on load, safe for any number of processes.

    <root>/v1/kernels/<key>/      one compiled kernel; manifest.json, written last, holds sha256 of every other file
    <root>/v1/locks/<key>.lock    held while a kernel is built, so that only one process builds it
    <root>/v1/building/           private folders of builds in progress; renamed into kernels/ when complete
    <root>/v1/quarantine/         entries that failed verification, kept for inspection

The lock only saves work. Correctness rests on the rename: an entry appears complete or not at all, and whoever comes
second finds it there and throws the own copy away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import CacheError

LOCK_TIMEOUT_S = 300.0
STALE_AFTER_S = 3600.0
MANIFEST = "manifest.json"
FILES = ("kernel.so", "kernel.cu", "report.json")
"""Of every compiled kernel; a manifest that leaves one out vouches for nothing."""


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


def _room(name: str) -> Path:
    folder = cache_root() / "v1" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"kernel cache {folder} cannot be made: {error}; set TERRAZZO_CACHE_DIR to a writable folder"
        ) from error
    return folder


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file.read())
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_manifest(folder: Path, meta: dict[str, Any]) -> None:
    """Write manifest.json with `meta` and the sha256 of every file in `folder`, and flush all of it to the disk."""
    files = {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({**meta, "files": files}, indent=1))
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: Path, needed: Sequence[str] = FILES) -> dict[str, Any]:
    """Read and verify a folder made by `write_manifest`, whose manifest must name the `needed` files.

    Raises:
        ValueError: what is wrong: no manifest, one that cannot be read or names too few files, a file that is missing
            or whose sha256 differs.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is damaged") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError(f"{MANIFEST} is damaged")
    require_listed(manifest, needed)
    for name, digest in files.items():
        try:
            seen = sha256_file(folder / name)
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from error
        if seen != digest:
            raise ValueError(f"{name} has sha256 {seen[:12]}..., the manifest says {digest[:12]}...")
    return manifest


def require_listed(manifest: dict[str, Any], needed: Sequence[str]) -> None:
    """Raise ValueError unless a manifest has the sha256 of these files."""
    absent = [name for name in needed if name not in manifest["files"]]
    if absent:
        raise ValueError(f"{MANIFEST} has no sha256 of {', '.join(absent)}")


def publish_folder(private: Path, final: Path) -> bool:
    """Rename a complete private folder to its final name; False if another one was there first."""
    try:
        os.rename(private, final)
    except OSError:
        if not final.is_dir():
            raise
        return False
    _flush(final.parent)
    return True


def lookup(key: str) -> Path | None:
    """The verified entry of a key, or None. A damaged entry counts as absent and is moved to quarantine/, if it can be.

    Raises:
        CacheError: the cache folder cannot be made.
    """
    entry = _room("kernels") / key
    if not os.path.isdir(entry):  # False also where another user's folder may not be searched
        return None
    try:
        read_manifest(entry)
    except ValueError:
        quarantine(key)
        return None
    return entry


def quarantine(key: str) -> Path | None:
    """Move an entry out of the way; None if another process did it first, or it cannot be moved (a read-only cache)."""
    try:
        place = _room("quarantine") / f"{key}.{time.time_ns()}"
        os.rename(_room("kernels") / key, place)
    except (CacheError, OSError):
        return None
    return place


def get_or_build(key: str, meta: dict[str, Any], build: Callable[[Path], None], timeout: float | None = None) -> Path:
    """The entry of `key`, built by `build(private_folder)` if it is absent (ask `lookup` first, it takes no lock).

    Several processes that ask for one key at once build it once. If the lock does not come free within `timeout`
    seconds (LOCK_TIMEOUT_S; a stopped process, a network file system without locks), the kernel is built without it.

    Raises:
        CacheError: the cache folder cannot be written (an OSError of `build` counts as that), or a damaged entry of
            this key cannot be moved out of the way.
    """
    with _key_lock(key, LOCK_TIMEOUT_S if timeout is None else timeout) as locked, _writing():
        entry = lookup(key)
        if entry is not None:
            return entry
        _sweep(key if locked else None)
        private = Path(tempfile.mkdtemp(prefix=f"{key if locked else 'unlocked'}.", dir=_room("building")))
        try:
            private.chmod(0o755)  # a cache may be shared between users
            build(private)
            write_manifest(private, {"key": key, "created": time.time(), **meta})
            final = _room("kernels") / key
            for _ in range(2):  # a damaged entry that was there first is gone the second time
                if publish_folder(private, final) or lookup(key) is not None:
                    return final
        finally:
            shutil.rmtree(private, ignore_errors=True)
    raise CacheError(f"{final} is damaged and cannot be moved; remove it, or set TERRAZZO_CACHE_DIR to another folder")


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Inside, an OSError (no space, no permission) is a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"kernel cache {cache_root()} cannot be written: {error}; "
            "make room there, or set TERRAZZO_CACHE_DIR to a writable folder"
        ) from error


@contextlib.contextmanager
def _key_lock(key: str, timeout: float) -> Iterator[bool]:
    """Hold the lock of a key; yields False if it did not come free in time. A killed holder frees it."""
    import filelock

    lock = filelock.FileLock(_room("locks") / f"{key}.lock", timeout=timeout)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _sweep(key: str | None) -> None:
    """Remove left-overs of killed builds: those of `key`, whose lock we hold, and any that are old."""
    for folder in _room("building").iterdir():
        with contextlib.suppress(OSError):  # another process may sweep the same folder
            own = key is not None and folder.name.startswith(f"{key}.")
            if own or time.time() - folder.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)


def _entries() -> list[Path]:
    folder = cache_root() / "v1" / "kernels"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def list_entries() -> list[dict[str, Any]]:
    """One dict for each cached kernel: key, name, target, params, created (unix time), bytes, registers, spill_stores,
    tensor_instructions. Unreadable entries are left out; `verify` names them."""
    rows = []
    for entry in _entries():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((entry / MANIFEST).read_text())
            report = json.loads((entry / "report.json").read_text())
            request = manifest["request"]
            rows.append(
                {
                    "key": entry.name,
                    **{field: request[field] for field in ("name", "target")},
                    "params": dict(request["params"]),
                    "created": manifest["created"],
                    "bytes": _size(entry),
                    **{field: report[field] for field in ("registers", "spill_stores", "tensor_instructions")},
                }
            )
    return rows


def clear() -> dict[str, int]:
    """Remove every entry, quarantined ones and stale builds too. Returns {"entries": removed, "bytes": freed}.

    Kernels that a process has loaded stay usable there; builds in progress are left alone.
    """
    removed, freed = 0, 0
    quarantined = cache_root() / "v1" / "quarantine"
    for folder in [*_entries(), *(quarantined.iterdir() if quarantined.is_dir() else ())]:
        with contextlib.suppress(OSError):
            size = _size(folder)
            shutil.rmtree(folder)
            removed, freed = removed + 1, freed + size
    if (cache_root() / "v1" / "building").is_dir():
        _sweep(None)
    return {"entries": removed, "bytes": freed}


def verify() -> list[dict[str, Any]]:
    """Check every entry: one dict for each with key, ok and problem ("" if ok). Damaged entries go to quarantine/."""
    rows = []
    for entry in _entries():
        problem = ""
        try:
            read_manifest(entry)
        except ValueError as error:
            problem = str(error)
            quarantine(entry.name)
        rows.append({"key": entry.name, "ok": not problem, "problem": problem})
    return rows
