"""TileLang's bytecode where Python finds none: compiling its thousand modules takes a process two seconds.

pip leaves bytecode beside the modules. Some installers do not, and containers often tell Python to write none
(PYTHONDONTWRITEBYTECODE), so that every process that compiles a kernel would begin with those seconds. Here all cores
compile the modules once, into an entry of the kernel cache, under the rules of its kernels: it is read once, by its
owner, mode and sha256, and what runs is what was read. Python compares each module's text with its bytecode.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering import cache
from terrazzo.lowering.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_SECONDS = 60


@contextlib.contextmanager
def bytecode_of(package: Path) -> Iterator[None]:
    """Import a package's modules from bytecode, inside. Where that cannot be had, Python compiles them as ever."""
    first = package / "__init__.py"
    made = Path(importlib.util.cache_from_source(os.fspath(first)))
    finder = None
    if sys.pycache_prefix is None and not made.is_file() and sys.executable and PathFinder in sys.meta_path:
        with contextlib.suppress(OSError, CacheError, subprocess.SubprocessError):
            finder = _Finder(_codes(package, first))
            sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder:
    """Finds modules as Python does, and gives them bytecode: the path that Python would look for -> its contents."""

    def __init__(self, codes: dict[str, bytes]) -> None:
        self.codes = codes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader and spec.cached in self.codes:
            spec.loader = _Loader(name, spec.loader.path, spec.cached, self.codes[spec.cached])
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, cached: str, code: bytes) -> None:
        super().__init__(name, path)
        self.cached, self.code = cached, code

    def get_data(self, path: str) -> bytes:
        return self.code if path == self.cached else super().get_data(path)


def _codes(package: Path, first: Path) -> dict[str, bytes]:
    """Bytecode of a package's modules, made by one process while others wait for it."""
    seen = first.stat()
    what = {"path": str(first), "time": seen.st_mtime_ns, "size": seen.st_size}
    what |= {"python": sys.implementation.cache_tag, "optimize": sys.flags.optimize}
    key, meta = hashlib.sha256(json.dumps(what).encode()).hexdigest(), {"request": what}
    found = cache.read(key, meta, cache.BYTECODE)
    if found is None:
        cache.get_or_build(key, meta, lambda private: _compile(package, private), _SECONDS, cache.BYTECODE)
        found = cache.read(key, meta, cache.BYTECODE)
    return marshal.loads(found[cache.MODULES]) if found is not None else {}


def _compile(package: Path, private: Path) -> None:
    """Compile all modules of a package. Those that are none for this Python are left out."""
    processes, optimize, tree = str(len(os.sched_getaffinity(0))), ["-O"] * sys.flags.optimize, private / "tree"
    tree.mkdir()  # empty, as Python looks for modules where it is started
    command = [sys.executable, *optimize, "-s", "-S", "-m", "compileall", "-qq", "-j", processes]
    command += ["--invalidation-mode", "checked-hash", os.fspath(package)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPYCACHEPREFIX"], quiet = os.fspath(tree), subprocess.DEVNULL
    subprocess.run(command, env=environment, cwd=tree, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_SECONDS)
    made = {path: Path("/", path.parent.relative_to(tree), "__pycache__", path.name) for path in tree.rglob("*.pyc")}
    if not made:
        raise FileNotFoundError(tree)
    (private / cache.MODULES).write_bytes(marshal.dumps({str(to): path.read_bytes() for path, to in made.items()}))
    shutil.rmtree(tree)
