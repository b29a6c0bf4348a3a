"""One tile program -> CUDA text -> machine code -> a shared object that launches it.

TileLang lowers the program and asks the global function `tilelang_callback_cuda_compile` for machine code. Terrazzo
answers that call itself while it compiles, for three reasons: the binary is needed for the report, TileLang's own
binary cache does not know which nvcc made an entry, and a request may ask for PTX beside the machine code.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import CompileError, TerrazzoError
from terrazzo.lowering.launcher import compile_host, host_text, link_host
from terrazzo.lowering.report import make_report
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.slim_headers import write_slim_headers
from terrazzo.lowering.toolchain import (
    build_folder,
    find_host_compiler,
    find_nvcc,
    import_tilelang,
    package_folder,
    run_tool,
)

if TYPE_CHECKING:
    from types import ModuleType

    from tilelang.engine.param import CompiledArtifact

NVCC_TIMEOUT_S = 600
SOURCE, BINARY, LIBRARY = "kernel.cu", "kernel.cubin", "kernel.so"
_CALLBACK = "tilelang_callback_cuda_compile"
_lock = threading.RLock()  # one lowering at a time in a process; compile_many is the way to several
_current: ContextVar[_Nvcc | None] = ContextVar("terrazzo_nvcc", default=None)


class _Nvcc:
    """Answers TileLang's request for machine code, and keeps what came out.

    Args:
        folder: of this compilation. nvcc runs in it, and is told relative names only.
        beside: where nvcc runs, so that the host side is lowered and compiled meanwhile.
    """

    def __init__(self, request: KernelRequest, folder: Path, beside: ThreadPoolExecutor) -> None:
        self.request, self.folder, self.beside = request, folder, beside
        self.log = ""
        self.running: Future | None = None

    def command(self, pass_config: dict[str, Any]) -> list[str]:
        arch = self.request.target.arch
        virtual = arch.replace("sm", "compute")
        code = f"[{arch},{self.request.ptx}]" if self.request.ptx else arch
        command = [find_nvcc(), "-ccbin", find_host_compiler(), "-std=c++17", "-O3", "-w", "-Xptxas", "-v"]
        command += ["--fatbin" if self.request.ptx else "--cubin", "-gencode", f"arch={virtual},code={code}"]
        command += ["-Islim", "-Itilelang/src", "-Itilelang/3rdparty/cutlass/include"]
        command += ["--use_fast_math"] * bool(pass_config.get("tl.enable_fast_math"))
        level = pass_config.get("tl.ptxas_register_usage_level")
        command += [] if level is None else ["-Xptxas", f"--register-usage-level={int(level)}"]
        command += [flag for flag in self.request.flags if not flag.startswith("ptx=")]
        return [*command, "-o", BINARY, SOURCE]

    def __call__(self, code: str, pass_config: dict[str, Any]) -> bytes:
        """Start nvcc. TileLang is told no machine code: it would only keep what it has no use for."""
        self.running = self.beside.submit(self.compile, code, pass_config)
        return b"\x7fELF"

    def wait(self) -> None:
        """Until nvcc is done; raises its CompileError."""
        if self.running is not None:
            self.running.result()

    def compile(self, code: str, pass_config: dict[str, Any]) -> None:
        """Make BINARY of CUDA text."""
        (self.folder / SOURCE).write_text(code, encoding="utf-8")
        slim = self.folder / "slim"
        write_slim_headers(code, slim)
        command = self.command(pass_config)
        if self._run(command):  # it may need what a slim header leaves out; if not, what is said is about the others
            shutil.rmtree(slim)
            if self._run(command):
                raise CompileError(f"{self.request}: nvcc fails\n{' '.join(command)}\n{self.log.strip()}")

    def _run(self, command: list[str]) -> int:
        try:
            done = run_tool(command, self.folder, timeout=NVCC_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{self.request}: nvcc took longer than {NVCC_TIMEOUT_S} s") from error
        self.log = done.stdout + done.stderr
        return done.returncode


@cache
def _install_callback() -> None:
    """Put our answer before TileLang's own; outside a Terrazzo compilation TileLang's still gives the answer."""
    import tvm_ffi

    original = tvm_ffi.get_global_func(_CALLBACK)

    def compile_cuda(code, target, pass_config=None):
        nvcc = _current.get()
        if nvcc is None:
            return original(code, target, pass_config)
        return bytearray(nvcc(code, dict(pass_config or {})))

    tvm_ffi.register_global_func(_CALLBACK, compile_cuda, override=True)


def in_use() -> bool:
    """Whether another thread compiles; after a fork: whether one did, which is gone."""
    if not _lock.acquire(blocking=False):
        return True
    _lock.release()
    return False


def load_builder(request: KernelRequest):
    """The function that `request.entry` names.

    Raises:
        CompileError: the module cannot be imported or has no such function.
    """
    module, _, function = request.entry.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise CompileError(f"{request}: entry {request.entry!r} cannot be loaded: {error}") from error


def compile_into(request: KernelRequest, folder: Path, count: bool = True) -> None:
    """Compile `request` into an existing folder: kernel.so, which is all that a launch needs, and for inspection
    kernel.cu, kernel.cubin (a fatbin if the request asks for PTX) and report.json, in which instructions are counted
    with `count` only. Needs no GPU.

    Raises:
        ToolchainError: tilelang cannot be imported.
        CompileError: the builder, the lowering or nvcc failed; the message carries the tool's words.
        OSError: the folder cannot be written.
    """
    with _lock, build_folder() as private, ThreadPoolExecutor(1) as beside:
        tilelang = import_tilelang()
        _install_callback()
        (private / "tilelang").symlink_to(package_folder("tilelang"))
        nvcc = _Nvcc(request, private, beside)
        token = _current.set(nvcc)
        try:
            artifact = _lower(tilelang, request)
            functions = [function for _, function in artifact.device_mod.functions.items()]
            host = host_text(artifact.rt_mod.inspect_source(), functions)
        except TerrazzoError:
            raise
        except Exception as error:
            raise CompileError(f"{request}: {type(error).__name__}: {error}") from error
        finally:
            _current.reset(token)
        compile_host(host, private)
        nvcc.wait()
        link_host(private, BINARY, LIBRARY)
        report = make_report(private / BINARY, nvcc.log, _dynamic_shared_memory(functions), count)
        (folder / SOURCE).write_text(artifact.kernel_source, encoding="utf-8")
        for name in (BINARY, LIBRARY):
            shutil.copyfile(private / name, folder / name)
    said = report.as_dict()
    if not count:
        for name in ("instructions", "tensor_instructions", "note"):
            del said[name]
    (folder / "report.json").write_text(json.dumps(said, indent=1), encoding="utf-8")


def _lower(tilelang: ModuleType, request: KernelRequest) -> CompiledArtifact:
    from tvm.target import Target as TvmTarget

    program = load_builder(request)(target=request.target, **dict(request.params))
    target = TvmTarget({"kind": "cuda", "arch": request.target.arch})
    with tilelang.transform.PassContext(opt_level=3, config=dict(request.pass_configs)), target:
        return tilelang.lower(program, target=target, enable_host_codegen=True, enable_device_compile=True)


def _dynamic_shared_memory(functions: list[Any]) -> int | None:
    """Dynamic shared memory of the largest kernel, bytes; None if it depends on the arguments."""
    sizes = [function.attrs.get("dyn_shared_memory_buf", 0) for function in functions]
    try:
        return max(map(int, sizes), default=0)
    except TypeError:
        return None
