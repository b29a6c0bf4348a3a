"""TileLang's bytecode where Python finds none: compiling its thousand modules takes a process two seconds.

pip leaves bytecode beside the modules. Some installers do not, and containers often tell Python to write none
(PYTHONDONTWRITEBYTECODE), so that every process that compiles a kernel would begin with those seconds. Here all cores
compile the modules once, into a folder of the kernel cache, and Python reads them from there. It compares each with its
module's time and size.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from terrazzo.lowering import cache, folders
from terrazzo.lowering.errors import CacheError

_SECONDS = 60


@contextlib.contextmanager
def bytecode_of(package: Path) -> Iterator[None]:
    """Import a package's modules from bytecode, inside. Where that cannot be had, Python compiles them as ever."""
    first, before = package / "__init__.py", sys.pycache_prefix
    made = Path(importlib.util.cache_from_source(os.fspath(first)))
    if before is not None or made.is_file() or not sys.executable:
        yield
        return
    found = None
    with contextlib.suppress(OSError, CacheError, subprocess.SubprocessError):
        found = _folder(package, first)
    sys.pycache_prefix = before if found is None else os.fspath(found)
    try:
        yield
    finally:
        sys.pycache_prefix = before


def _folder(package: Path, first: Path) -> Path:
    """Folder of the cache with the bytecode of a package, made by one process while others wait for it."""
    seen = first.stat()
    what = f"{first}\0{seen.st_mtime_ns}\0{seen.st_size}\0{sys.implementation.cache_tag}\0{sys.flags.optimize}"
    key = hashlib.sha256(what.encode()).hexdigest()
    folder = cache.room(cache.VERSION, "bytecode") / key
    if not folder.is_dir():
        with cache.key_lock(key, _SECONDS) as mine:
            if mine and not folder.is_dir():
                with folders.private_folder(cache.room(cache.VERSION, "building"), key) as private:
                    _compile(package, private)
                    if next(private.rglob("*.pyc"), None) is None:
                        raise FileNotFoundError(private)
                    folders.publish_folder(private, folder)
    return folder


def _compile(package: Path, into: Path) -> None:
    """Compile all modules of a package. Those that are none for this Python are left out."""
    processes, optimize = str(len(os.sched_getaffinity(0))), ["-O"] * sys.flags.optimize
    command = [sys.executable, *optimize, "-s", "-S", "-m", "compileall", "-qq", "-j", processes, os.fspath(package)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPYCACHEPREFIX"], quiet = os.fspath(into), subprocess.DEVNULL
    # in an empty folder, as Python looks for modules where it is started
    subprocess.run(command, env=environment, cwd=into, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_SECONDS)
