"""Folders of native code: who may have written them, what they hold, and copies that nobody else can touch.

A folder that `write_manifest` completed has manifest.json with the sha256 of every other file. It is read by handle:
links, pipes and devices are refused, sizes are bounded, and owner and mode are those of what was opened. What is read
is what was checked, as nothing is opened twice.

A folder in the making is a `private_folder`: locked as long as its process lives, so that `sweep` knows what a killed
process left whatever the clock says.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from terrazzo.lowering import data_files

MANIFEST = "manifest.json"
LOCK = ".lock"
LIBRARY = "kernel.so"
FILES = (LIBRARY, "kernel.cu", "report.json")
"""Of every compiled kernel; a manifest that leaves one out vouches for nothing."""
MANIFEST_BYTES = 16 << 20
FILE_BYTES = 512 << 20
_DEPTH = 32  # of JSON values; ours have 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MARK = b"\0terrazzo kernel\0"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM, errno.EROFS}
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class DistrustError(ValueError):
    """Somebody else may have written a folder or a file; the text says how that is known."""


def owners(*others: int) -> frozenset[int]:
    """Whose files this process runs: its own user's, root's and those of `others`."""
    return frozenset((0, os.geteuid(), *others))


def require_trusted(what: str, seen: os.stat_result, trusted: Collection[int]) -> None:
    """Raise DistrustError if another user owns what `seen` describes, or may write it.

    Rights that an access control list gives show in the mode of the group.
    """
    if seen.st_uid not in trusted:
        raise DistrustError(f"{what} belongs to {_user(seen.st_uid)}, neither to {_user(os.geteuid())} nor to root")
    if seen.st_mode & 0o022:
        raise DistrustError(f"{what} may be written by others, its mode is {stat.S_IMODE(seen.st_mode):04o}")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except (KeyError, OverflowError):
        return f"user {uid}"


def kind_of(seen: os.stat_result) -> str:
    """ "a link", "a pipe" and the like."""
    return _KINDS.get(stat.S_IFMT(seen.st_mode), "a device" if not stat.S_ISREG(seen.st_mode) else "a file")


class Folder:
    """A folder held open, whose files are read without following links.

    Args:
        path: the folder, a link to one counts as it. trusted: users who may own it and its files.

    Raises:
        DistrustError: another user owns it, or may write to it.
        ValueError: it cannot be opened.
    """

    def __init__(self, path: Path, trusted: Collection[int] | None = None) -> None:
        self.path, self.trusted = path, owners() if trusted is None else trusted
        try:
            self._handle = os.open(path, _FOLDER)
        except OSError as error:
            raise ValueError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            require_trusted(str(path), os.fstat(self._handle), self.trusted)
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def replaced(self) -> bool:
        """Whether its path leads to another folder by now."""
        with contextlib.suppress(OSError):
            return not os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        return False

    def read(self, name: str, limit: int = FILE_BYTES) -> bytes:
        """Contents of a file by its path inside the folder, "kernels/0123/kernel.so".

        Raises:
            DistrustError: another user owns it or a folder on the way, or may write there.
            ValueError: no such path inside the folder, no plain file, too long, or it cannot be read.
        """
        *folders, last = _parts(name)
        handles = [self._handle]
        try:
            for part in folders:
                handles.append(self._open(part, name, handles[-1], stat.S_IFDIR))
            with open(self._open(last, name, handles[-1], stat.S_IFREG), "rb") as file:
                small = os.fstat(file.fileno()).st_size <= limit
                data = file.read(limit + 1) if small else b""
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from error
        finally:
            for handle in handles[1:]:
                os.close(handle)
        if not small or len(data) > limit:
            raise ValueError(f"{name} is longer than {limit} bytes")
        return data

    def _open(self, part: str, name: str, folder: int, kind: int) -> int:
        """Handle of one part of a path, looked at before it is opened: opening a device may do something."""
        self._require(kind, name, os.stat(part, dir_fd=folder, follow_symlinks=False))
        flags = _FOLDER if kind == stat.S_IFDIR else os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
        try:
            self._require(kind, name, os.fstat(handle))
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _require(self, kind: int, name: str, seen: os.stat_result) -> None:
        if stat.S_IFMT(seen.st_mode) != kind:
            raise ValueError(f"{name} is {kind_of(seen)}, or one is on the way to it, where a plain file must be")
        require_trusted(f"{self.path}/{name}", seen, self.trusted)


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if not all(_PLAIN.fullmatch(part) for part in parts):
        raise ValueError(f"{name[:200]!r} is no path inside the folder")
    return parts


def parse_json(data: bytes) -> Any:
    """A JSON value of bounded depth and integers, whose strings can be written again.

    Raises:
        ValueError: whatever is wrong with it.
    """
    value = data_files.parse_json(data.decode())
    todo = [(value, 0)]
    while todo:
        one, depth = todo.pop()
        if depth > _DEPTH or (type(one) is int and abs(one) >= 2**64):
            raise ValueError("nested too deeply" if depth > _DEPTH else "an integer of more than 64 bits")
        if isinstance(one, str):
            one.encode()
        elif isinstance(one, dict):
            todo += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list):
            todo += [(part, depth + 1) for part in one]
    return value


def same_json(left: object, right: object) -> bool:
    """Whether two values are the same JSON text; 1, 1.0 and true are not."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_manifest(folder: Path, meta: Mapping[str, Any], file_mode: int = 0o600) -> None:
    """Complete a folder: modes of its files and folders, manifest.json with `meta` and every sha256, all on the disk.

    Args:
        file_mode: 0o600 for this user alone, 0o644 for others to read.
    """
    inside = sorted(path for path in folder.rglob("*") if path.name != LOCK)
    files = {path.relative_to(folder).as_posix(): sha256(path.read_bytes()) for path in inside if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps({**meta, "files": files}, indent=1), encoding="utf-8")
    for path in [*inside, folder / MANIFEST, folder]:
        path.chmod(file_mode | (file_mode & 0o444) >> 2 | 0o100 if path.is_dir() else file_mode)
        flush(path)


def flush(path: Path) -> None:
    """Write a file or a folder to the disk; places that cannot do so keep it as they do."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def read_manifest(
    folder: Folder, needed: Sequence[str] = FILES, each: Callable[[str, bytes], None] | None = None
) -> dict[str, Any]:
    """Read and verify a folder made by `write_manifest`, whose manifest must name the `needed` files.

    Args:
        each: called with name and contents of every file once its sha256 is right.

    Raises:
        DistrustError: somebody else may have written it.
        ValueError: what is wrong: no manifest, one that cannot be read or names too few files, a file that is missing
            or whose sha256 differs.
    """
    manifest = open_manifest(folder)
    require_listed(manifest, needed)
    verify_files(folder, manifest, each)
    return manifest


def open_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of a folder, which has names and sha256 of files, themselves not looked at; ValueError otherwise."""
    data = folder.read(MANIFEST, MANIFEST_BYTES)
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError(f"{MANIFEST} is damaged: it has no names and sha256 of files")
    return manifest


def verify_files(folder: Folder, manifest: Mapping[str, Any], each: Callable[[str, bytes], None] | None = None) -> None:
    """Compare every file that a manifest lists with its sha256; `each` and errors as `read_manifest`."""
    for name in manifest["files"]:
        contents = read_listed(folder, manifest, name)
        if each is not None:
            each(name, contents)


def require_listed(manifest: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Raise ValueError unless a manifest has the sha256 of these files."""
    absent = [name for name in needed if name not in manifest["files"]]
    if absent:
        raise ValueError(f"{MANIFEST} has no sha256 of {', '.join(absent)}")


def read_listed(folder: Folder, manifest: Mapping[str, Any], name: str) -> bytes:
    """Contents of a file that a manifest lists, with the sha256 that it says; ValueError otherwise."""
    contents = folder.read(name)
    seen, digest = sha256(contents), manifest["files"][name]
    if seen != digest:
        raise ValueError(f"{name} has sha256 {seen[:12]}..., the manifest says {digest[:12]}...")
    return contents


def mark_library(library: Path, identity: str) -> None:
    """Write the identity of its request after a shared object's last section, where loaders do not look."""
    if _mark(library.read_bytes()) != identity:
        with library.open("ab") as file:
            file.write(_MARK + identity.encode())


def _mark(contents: bytes) -> str:
    _, _, marked = contents[-256:].rpartition(_MARK)
    return marked.decode(errors="replace") if _MARK in contents[-256:] else ""


def require_mark(contents: bytes, identity: str) -> None:
    """Raise ValueError unless a shared object was compiled from the request of this identity."""
    marked = _mark(contents)
    if marked != identity:
        seen = f"kernel {marked[:12]}..." if marked else "no kernel"
        raise ValueError(f"{LIBRARY} is {seen} by its own mark, wanted is {identity[:12]}...")


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, for this user alone whatever the umask. OSError if that is impossible."""
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            place.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


@contextlib.contextmanager
def private_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder `<prefix>.<8 characters>` of this user alone, locked while in use, then removed."""
    folder, handle = locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """As `private_folder`, without the end: the folder, and the handle that locks it until it is closed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}.", dir=parent))
        handle = _lock(folder)
        if handle is not None:
            return folder, handle


def _lock(folder: Path) -> int | None:
    """Handle of a new folder's lock; None if a sweeping process took the folder for a left-over before that."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # no locks in this file system: nothing is swept there either
        return handle
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(folder / LOCK)):
            return handle
    os.close(handle)
    return None


def sweep(parent: Path, prefix: str, before: Callable[[Path], None] | None = None) -> None:
    """Remove what killed processes left of `private_folder`s; `prefix` is a regular expression. Never follows links.

    Args:
        before: called with each, locked, before it is removed; it stays if an OSError is raised.
    """
    name = re.compile(rf"(?:{prefix})\.[a-z0-9_]{{8}}")
    for folder in list(parent.iterdir()):
        if name.fullmatch(folder.name):
            with contextlib.suppress(OSError):  # in use, swept by another process, or where locks do not work
                _remove_unused(folder, before)


def _remove_unused(folder: Path, before: Callable[[Path], None] | None) -> None:
    seen = os.lstat(folder)
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        return
    for _ in range(2):
        try:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            try:
                return os.rmdir(folder)  # just made and not locked yet: its process makes another one
            except OSError:
                continue  # locked meanwhile, or half removed
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if before is not None:
                before(folder)
            return shutil.rmtree(folder)
        finally:
            os.close(handle)
    shutil.rmtree(folder)  # files and no lock: a removal that was killed


def publish_folder(private: Path, final: Path) -> bool:
    """Rename a complete private folder to its final name; False if another one was there first."""
    try:
        os.rename(private, final)
    except OSError:
        if not final.is_dir():
            raise
        return False
    with contextlib.suppress(OSError):  # nothing reads it
        (final / LOCK).unlink()
    flush(final.parent)
    return True


def exchange(one: Path, other: Path) -> bool:
    """Let two paths have each other's place in one step; False where that is not possible, and nothing was done."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2  # of Linux; Python has no name for it
    except (AttributeError, OSError):
        return False
    return renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


@contextlib.contextmanager
def private_copy(code: bytes, places: Iterable[Path]) -> Iterator[Path]:
    """Path of a shared object with this code, that nobody else can write, in the first place where code may be run.

    It is gone afterwards; a process that loaded it keeps it. So a file that is cut short or replaced later ends no
    process (a mapped file would: SIGBUS), and what runs is what was verified.

    Raises:
        OSError: no place can be written, or none lets code run.
    """
    refused = []
    for place in places:
        try:
            if os.statvfs(place).f_flag & os.ST_NOEXEC:
                raise PermissionError(errno.EACCES, "mounted noexec", str(place))
            folder = tempfile.mkdtemp(prefix="terrazzo-load.", dir=place)
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
            continue
        try:
            try:
                handle = os.open(f"{folder}/{LIBRARY}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(handle, "wb") as file:
                    file.write(code)
            except OSError as error:
                refused.append(f"{place}: {error.strerror}")
                continue
            yield Path(folder, LIBRARY)
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    raise OSError(errno.ENOSPC, f"no folder holds a copy to load ({'; '.join(refused) or 'none is there'})")
