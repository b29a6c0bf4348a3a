"""Who compiles cold kernels: this environment, or another one whose interpreter TERRAZZO_COMPILER names.

A process beside an engine has the engine's tilelang and tvm-ffi, with which tile programs cannot be compiled. It names
an interpreter whose environment has terrazzo[compile] of the same version; what is missing in the cache is compiled
there (`worker.py`), into the same cache and under the same keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from terrazzo.lowering import toolchain as local
from terrazzo.lowering.data_files import parse_json
from terrazzo.lowering.errors import ToolchainError
from terrazzo.lowering.settings import COMPILER, clean_environment
from terrazzo.lowering.toolchain import INSTALL_COMPILER, Toolchain, package_version

VARIABLE = COMPILER.variable
PROBE_S = 60.0
# "" stands first on the path of `python -c`: the working directory answers for no module.
START = "import sys; sys.path[:] = [entry for entry in sys.path if entry]; "
_PROBE = START + f"from {__name__} import _describe; _describe()"


@dataclass(frozen=True)
class Compiler:
    """What compiles cold kernels.

    Attributes:
        python: interpreter of another environment, None for this one.
        toolchain: its versions, which are part of a kernel's key in the cache.
        missing: parts without which it cannot compile.
    """

    python: str | None
    toolchain: Toolchain
    missing: tuple[str, ...]

    def require(self, purpose: str) -> None:
        """Raise ToolchainError, naming what is missing and how to get it, unless a kernel can be compiled."""
        if self.missing:
            where = f" with {self.python}" if self.python else ""
            raise ToolchainError(
                f"cannot compile {purpose}{where}: {', '.join(self.missing)} missing; {INSTALL_COMPILER}"
            )


def set_compiler(path: str | os.PathLike | None) -> Compiler | None:
    """Let the interpreter at `path` compile the cold kernels of this user's processes; None: each compiles its own.

    It is kept in the configuration file. TERRAZZO_COMPILER, where it is set, is asked first.

    Returns:
        What was found there, None for None.

    Raises:
        ToolchainError: it is no interpreter with terrazzo[compile] of this version, or cannot be written down.
    """
    found = None
    if path is not None:
        found = _probe(os.path.abspath(os.path.expanduser(os.fspath(path))))
        found.require("kernels")
    COMPILER.keep(None if found is None else found.python)
    return found


def header_entry() -> str | None:
    """Which entry of sys.path a compiling process must import tvm-ffi from, for its headers: see `import_tvm_ffi`.

    "" where they are found as it is, None where they are nowhere.

    An engine's environment is often slimmed. Where its tvm-ffi has no headers, a complete one of the same version may
    lie behind it.
    """
    folder = local.package_folder("tvm_ffi")
    if folder is None or _has_headers(folder, None):
        return ""
    version = package_version("apache-tvm-ffi")
    return next((entry for entry in sys.path if entry and _has_headers(Path(entry, "tvm_ffi"), version)), None)


def import_tvm_ffi(entry: str) -> None:
    """Import tvm-ffi from an entry that does not stay on sys.path: what lies beside it may be of other versions."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  tvm-ffi imports it
    sys.path.insert(0, entry)  # its library is looked for beside its metadata
    try:
        import tvm_ffi  # noqa: F401
    finally:
        sys.path.remove(entry)


def _has_headers(folder: Path, version: str | None) -> bool:
    """Whether a tvm-ffi has headers, of the release of this version unless it is None."""
    header = folder / "include" / "tvm" / "ffi" / "c_api.h"
    if not header.is_file() or not (folder / "include" / "dlpack").is_dir():
        return False
    numbers = re.findall(r"#define\s+TVM_FFI_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(encoding="utf-8"))
    return version is None or numbers == re.findall(r"\d+", version)[:3]  # 0.1.12.post1 has the headers of 0.1.12


def compiler() -> Compiler:
    """What would compile a kernel now.

    Raises:
        ToolchainError: the interpreter that is named is absent or broken, or has another terrazzo; or nvcc fails here.
    """
    named = COMPILER.find()
    if named is None:
        tools = local.toolchain()
        missing = tools.missing()
        if not missing and header_entry() is None:
            missing.append("the headers of apache-tvm-ffi")
        return Compiler(None, tools, tuple(missing))
    return _probe(named[0])


def toolchain() -> Toolchain:
    """Versions of what would compile a kernel now; errors as `compiler`."""
    return compiler().toolchain


def compiler_report() -> dict[str, Any]:
    """What `terrazzo info` shows: python (None: this environment compiles) and named_by; then toolchain and missing, as
    `Compiler` has them, or a problem, for which both are None."""
    report: dict[str, Any] = {"python": None, "named_by": None, "toolchain": None, "missing": None, "problem": None}
    try:
        named = COMPILER.find()
        if named is not None:
            report |= {"python": named[0], "named_by": named[1]}
        found = compiler()
        report |= {"toolchain": found.toolchain.as_dict(), "missing": list(found.missing)}
    except ToolchainError as error:
        report["problem"] = str(error)
    return report


def _remedy() -> str:
    wanted = f"terrazzo[compile]=={package_version('terrazzo')}"
    return f"name the python of an environment that has {wanted}, in {VARIABLE} or with `terrazzo config compiler`"


@cache
def _probe(python: str) -> Compiler:
    """What an interpreter says of itself."""
    if not os.path.isabs(python):
        raise ToolchainError(f"compiler {python!r} is no absolute path; {_remedy()}")
    if not os.access(python, os.X_OK) or os.path.isdir(python):
        raise ToolchainError(f"compiler {python!r} does not exist or is no program; {_remedy()}")
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            env=clean_environment() | {VARIABLE: ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"compiler {python} cannot be run: {error}; {_remedy()}") from error
    words = " ".join(done.stderr.decode(errors="replace").split())[-500:]
    if done.returncode:
        raise ToolchainError(
            f"compiler {python} has no terrazzo that works: {words or f'it ends with {done.returncode}'}; {_remedy()}"
        )
    try:
        said = parse_json(done.stdout)
        version, problem = said["terrazzo"], said["problem"]
        found = Compiler(python, Toolchain(**said["toolchain"]), tuple(said["missing"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ToolchainError(f"compiler {python} does not answer as terrazzo does; {_remedy()}") from error
    if version != package_version("terrazzo"):
        raise ToolchainError(
            f"compiler {python} has terrazzo {version}, this is {package_version('terrazzo')}; {_remedy()}"
        )
    if problem:
        raise ToolchainError(f"compiler {python}: {problem}")
    return found


def _describe() -> None:
    """What `_probe` reads, of this process's own environment."""
    problem = ""
    try:
        tools = local.toolchain()
    except ToolchainError as error:
        tools, problem = Toolchain(None, None, None, None), str(error)
    said = {"terrazzo": package_version("terrazzo"), "problem": problem, "toolchain": tools.as_dict()}
    print(json.dumps({**said, "missing": tools.missing()}))
