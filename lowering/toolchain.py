"""Finds compilers, disassemblers and runtime libraries, and their versions, without importing any of them.

A kernel found in the cache or in a bundle must load fast, so nothing here imports tilelang, tvm or torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from terrazzo.lowering.errors import CompileError, ToolchainError

INSTALL_COMPILER = (
    "install what compiles with `pip install 'terrazzo[compile]'` (and a host g++), or load a bundle that "
    "`terrazzo compile -o` made elsewhere, or set TERRAZZO_COMPILER to the python of an environment that has "
    "terrazzo[compile] of this version"
)
INSTALL_DISASSEMBLER = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
# What tile programs are written for, and what that tilelang runs with: from here on, and before there. An engine brings
# others, with which an import of tilelang ends the process.
COMPILES_WITH = {"tilelang": ((0, 1, 15), (0, 1, 16)), "apache-tvm-ffi": ((0, 1, 11), (0, 1, 13))}


@dataclass(frozen=True)
class Toolchain:
    """Everything outside terrazzo that decides a kernel's machine code, the host's included.

    Attributes:
        tilelang, tvm_ffi, nvcc, toolkit: versions, None where a part is missing.
        machine: instruction set of the host, "x86_64" or "aarch64".
    """

    tilelang: str | None
    tvm_ffi: str | None
    nvcc: str | None
    toolkit: str | None
    machine: str = field(default_factory=platform.machine)

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)

    def missing(self) -> list[str]:
        """What a compilation needs and does not find: names, and versions where another one is installed."""
        packages = {"tilelang": self.tilelang, "apache-tvm-ffi": self.tvm_ffi}
        missing = [_wanted(name, version) for name, version in packages.items() if not _fits(name, version)]
        tools = {"nvcc": self.nvcc, "a C++ compiler": find_host_compiler()}
        return missing + [name for name, version in tools.items() if version is None]


def _fits(package: str, version: str | None) -> bool:
    lowest, below = COMPILES_WITH[package]
    return version is not None and lowest <= tuple(map(int, re.findall(r"\d+", version)[:3])) < below


def _wanted(package: str, version: str | None) -> str:
    if version is None:
        return package
    lowest, below = (".".join(map(str, bound)) for bound in COMPILES_WITH[package])
    return f"{package}>={lowest},<{below} (version {version} is installed)"


@cache
def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_folder(module: str) -> Path | None:
    """Folder of an importable package, found without importing it, or None."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _wheel_tools() -> list[Path]:
    """Folders where NVIDIA's wheels put command-line tools (nvidia/cu13/bin of every site folder)."""
    package = package_folder("nvidia")
    return sorted(package.glob("cu*/bin"), reverse=True) if package else []


def find_program(name: str) -> str | None:
    """Path of a program on PATH, whose entries that depend on the working directory ("", ".", "bin") do not count."""
    folders = [folder for folder in os.get_exec_path() if os.path.isabs(folder)]
    return shutil.which(name, path=os.pathsep.join(folders) or os.devnull)


def find_cuda_tool(name: str) -> str | None:
    """Path of a CUDA command-line tool: NVIDIA's wheels, then /usr/local/cuda, then PATH."""
    for folder in [*_wheel_tools(), Path("/usr/local/cuda/bin")]:
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    return find_program(name)


def find_nvcc() -> str | None:
    """Path of the nvcc that compiles kernels: $CUDA_HOME or $CUDA_PATH, PATH, NVIDIA's wheel, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return str(Path(home, "bin", "nvcc")) if os.access(Path(home, "bin", "nvcc"), os.X_OK) else None
    return find_program("nvcc") or find_cuda_tool("nvcc")


def find_host_compiler() -> str | None:
    """Path of the C++ compiler that nvcc and the host stub use: $CXX, g++, clang++, c++."""
    chosen = os.environ.get("CXX")
    return next((path for path in map(find_program, [chosen] if chosen else ["g++", "clang++", "c++"]) if path), None)


@cache
def _nvcc_versions(nvcc: str) -> tuple[str, str]:
    """(compiler, toolkit) versions of one nvcc: its own build string, and CUDA_VERSION of the headers beside it."""
    try:
        quiet = subprocess.DEVNULL
        done = subprocess.run([nvcc, "--version"], stdin=quiet, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{nvcc} --version fails ({error}); {INSTALL_COMPILER}") from error
    said = done.stdout.decode(errors="replace")
    compiler = re.search(r"\bV([\d.]+)", said)
    build = re.search(r"^Build (\S+)", said, re.MULTILINE)
    version = " ".join(match.group(1) for match in (compiler, build) if match) or said.strip()
    for root in (Path(nvcc).parent.parent, Path(nvcc).resolve().parent.parent):
        header = root / "include" / "cuda.h"
        if header.is_file():
            number = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(encoding="utf-8", errors="replace"))
            if number:
                return version, f"{int(number.group(1)) // 1000}.{int(number.group(1)) % 1000 // 10}"
    release = re.search(r"release ([\d.]+)", said)
    return version, release.group(1) if release else "unknown"


@contextlib.contextmanager
def build_folder() -> Iterator[Path]:
    """A folder of this process's own for nvcc to work in, removed afterwards.

    nvcc puts paths into commands for a shell, its working directory's too. So the path has letters only: where TMPDIR
    has others, another place is taken.

    Raises:
        CompileError: there is none that can be written.
    """
    problem = "no folder with a plain name"
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")):
        if not re.fullmatch(r"[\w./+@,=-]+", os.path.realpath(place), re.ASCII):
            continue
        try:
            folder = tempfile.TemporaryDirectory(prefix="terrazzo-nvcc-", dir=os.path.realpath(place))
        except OSError as error:
            problem = f"{place}: {error.strerror}"
            continue
        with folder as name:
            yield Path(name)
        return
    raise CompileError(f"a compilation needs a folder for temporary files ({problem}); set TMPDIR to one with room")


def run_tool(command: list[str], folder: Path, **options: str | None) -> subprocess.CompletedProcess[str]:
    """Run a tool of CUDA's in a `build_folder`, where its temporary files lie too.

    NVCC_APPEND_FLAGS and the like would change the code behind the cache's back, and are left out.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVCC_")}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"TMPDIR": "."},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        **({} if "input" in options else {"stdin": subprocess.DEVNULL}),  # where ours is closed, nvcc would have none
        **options,
    )


def toolchain() -> Toolchain:
    """The toolchain that a compilation started now would use."""
    nvcc = find_nvcc()
    version, toolkit = _nvcc_versions(nvcc) if nvcc else (None, None)
    return Toolchain(package_version("tilelang"), package_version("apache-tvm-ffi"), version, toolkit)


def installed() -> Toolchain:
    """As `toolchain`, for showing: an nvcc that does not run counts as none."""
    try:
        return toolchain()
    except ToolchainError:
        return Toolchain(package_version("tilelang"), package_version("apache-tvm-ffi"), None, None)


def loaded_tvm() -> str | None:
    """Which TVM this process has imported: "tilelang" (its vendored copy), "apache-tvm", or None."""
    if "tilelang" in sys.modules:
        return "tilelang"
    module = sys.modules.get("tvm")
    if module is None:
        return None
    return "tilelang" if "tilelang" in Path(module.__file__ or "").parts else "apache-tvm"


def import_tilelang():
    """Import tilelang without letting it change the environment that child processes inherit.

    Raises:
        ToolchainError: tilelang is absent, or it or tvm-ffi has a version that cannot work, or this process already
            runs Apache TVM (two TVMs cannot share a process).
    """
    if loaded_tvm() == "apache-tvm":
        raise ToolchainError(
            "this process has imported apache-tvm, and tilelang brings its own TVM; the two cannot share a process. "
            "Compile in another process (`terrazzo compile -o bundle/`) and load the bundle here"
        )
    unfit = [_wanted(name, package_version(name)) for name in COMPILES_WITH if not _fits(name, package_version(name))]
    if unfit:
        raise ToolchainError(f"compiling a kernel needs {' and '.join(unfit)}; {INSTALL_COMPILER}")
    if "tilelang" in sys.modules:
        return sys.modules["tilelang"]
    from terrazzo.lowering.bytecode import bytecode_of
    from terrazzo.lowering.cache import tilelang_folder

    # tilelang puts its own TVM first on sys.path unless it is there already, and a worker has its parent's entries
    # last, behind an installed apache-tvm.
    vendored = str(package_folder("tilelang") / "3rdparty" / "tvm" / "python")
    sys.path[:] = [entry for entry in sys.path if entry != vendored]
    # On import tilelang prepends its TVM to PYTHONPATH; a child would then import that TVM as `tvm`. It makes its cache
    # folder at once, and home need not be writable.
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "TVM_LIBRARY_PATH", "TILELANG_CACHE_DIR")}
    os.environ["TILELANG_CACHE_DIR"] = folder = tilelang_folder()
    try:
        with bytecode_of(package_folder("tilelang")):
            import tilelang

        tilelang.env.TILELANG_CACHE_DIR = folder
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return tilelang
