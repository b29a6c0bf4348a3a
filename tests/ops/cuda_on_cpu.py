"""Runs the CUDA text of a generated kernel on the CPU, a fiber for each thread: for machines without a GPU.

Warp primitives, tensor-core products and barriers are emulated (emulator/*.h); several CTAs run at once. Asynchronous
copies poison their destination when they are issued and deliver when they are waited for, so that a stage that is read
too early or refilled too soon is seen. In a process that test_emulated_sanitizers.py starts, a sanitizer watches: an
access behind the end of a tensor, or one that nothing orders against another thread's, fails where results are right.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from terrazzo.lowering.compiler import load_builder
from terrazzo.lowering.kernels import find_compiled
from terrazzo.lowering.parallel import compile_many
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import import_tilelang
from terrazzo.ops.tiles.cuda.attention import PRIMITIVES as attention_primitives

SANITIZER = "TERRAZZO_EMULATE_SANITIZER"
"""Environment variable: `thread` or `address`, a colon, and the file of the reports less the process number."""
RESIDENT, SEED = 3, 0
"""CTAs that run at once; what picks the next one (0: they take turns)."""
FOLDER = Path(__file__).parent / "emulator"


def emulator(name: str) -> str:
    return (FOLDER / f"{name}.h").read_text()


LDMATRIX, EARLY, VOTES = emulator("ldmatrix"), emulator("early"), emulator("votes")


def built(request: KernelRequest) -> Path:
    """The folder of a kernel that another process compiles: z3 throws, which AddressSanitizer does not survive."""
    found = compile_many([request])[0]
    assert isinstance(found, Path), found
    return found


def cuda_text(request: KernelRequest) -> str:
    """The CUDA text of a kernel. One that is not in the cache is lowered only: nvcc would take as long again."""
    if SANITIZER in os.environ:
        return (built(request) / "kernel.cu").read_text()
    known = find_compiled(request)
    return lowered(request) if known is None else (known / "kernel.cu").read_text()


@cache
def lowered(request: KernelRequest) -> str:
    """Its CUDA text from TileLang, once for all tests of a process."""
    tilelang = import_tilelang()
    from tvm.target import Target

    program = load_builder(request)(target=request.target, **dict(request.params))
    target = Target({"kind": "cuda", "arch": request.target.arch})
    with tilelang.transform.PassContext(opt_level=3, config=dict(request.pass_configs)), target:
        made = tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    return made.kernel_source


def gxx(flags: Iterable[str], *words: str) -> None:
    command = ["g++", "-std=c++20", "-w", "-fPIC", *flags, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@cache
def header(flags: tuple[str, ...]) -> Path:
    """What every emulation begins with, read once by g++: a third of its time."""
    folder = tempfile.TemporaryDirectory(prefix="terrazzo-emulator-")
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "emulator.h"
    compare = attention_primitives["compare"].source  # host C++ as it is
    file.write_text("\n".join([*map(emulator, ("threads", "warp", "memory")), compare]))
    gxx(flags, "-x", "c++-header", "-o", f"{file}.gch", str(file))
    return file


def compile_cpp(text: str, flags: tuple[str, ...], library: Path) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(text)
    gxx(flags, "-shared", "-include", str(header(flags)), "-o", str(library), str(source))


class CpuKernel:
    """A compiled emulation; call it with the grid and every kernel parameter by name."""

    known = 0  # characters of the sanitizer's reports that a test has seen
    made: ClassVar[dict[tuple[str, ...], Path]] = {}  # libraries of this process, by flags and text

    def __init__(self, source: str, converters: list[str], threads: int, folder: Path, cluster: int = 1) -> None:
        text = source[source.index('extern "C" __global__') :]
        start = text.index("main_kernel", text.index("main_kernel") + 1)  # the second is the definition
        body = text[text.rindex("extern", 0, start) :]
        kinds = r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];"
        body = re.sub(kinds, r"\1 *const \2 = (\1 *)shared_memory();", body)
        slots = itertools.count()
        one = r"__shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[(\d+)\];"
        body = re.sub(one, lambda f: f"{f[1]} *const {f[2]} = ({f[1]} *)shared_slot({next(slots)});", body)
        found = re.search(r"main_kernel\((.*?)\) \{", body, re.S).group(1)
        self.params = [(p.strip().rpartition(" ")[0], p.strip().rpartition(" ")[2]) for p in found.split(",")]
        args = ", ".join(
            f"*(({kind.replace('__restrict__', '').strip()} *)slots[{i}])" for i, (kind, _) in enumerate(self.params)
        )
        library = folder / "kernel.so"
        clustered = [f"constexpr int CLUSTER = {cluster};", emulator("cluster")] if cluster > 1 else []
        cpp = "\n".join([*converters, *clustered, body, emulator("launch").replace("ARGS", args)])
        kind, _, self.reports = os.environ.get(SANITIZER, "").partition(":")
        flags = ("-Og",)  # g++ takes far longer than what it makes
        if kind:
            flags = ("-O1", "-g", f"-fsanitize={kind}", *(["-DRACES"] if kind == "thread" else []))
        made = CpuKernel.made.get((*flags, cpp))
        if made is not None and made.exists():
            shutil.copyfile(made, library)  # a file of its own has statics of its own
        else:
            compile_cpp(cpp, flags, library)
            CpuKernel.made[(*flags, cpp)] = library
        self.library, self.threads, self.held = ctypes.CDLL(str(library)), threads, []
        # what lands late is there for all CTAs at once
        self.resident = max(cluster, RESIDENT if EARLY not in converters else 1)

    def give(self, request: KernelRequest) -> None:
        """No more shared memory than a launch of the compiled kernel gives, as AddressSanitizer sees it."""
        if SANITIZER not in os.environ:
            return
        size = json.loads((built(request) / "report.json").read_text())["smem_dynamic"]
        ctypes.c_long.in_dll(self.library, "dynamic_shared").value = size

    def late(self, tensor: torch.Tensor, stale: torch.Tensor) -> None:
        """Until a block waits for the kernel ahead, it sees `stale` in place of the tensor (with `EARLY`)."""
        held = tensor.clone()
        tensor.copy_(stale)
        self.held.append(held)
        self.library.late(*(ctypes.c_void_p(t.data_ptr()) for t in (tensor, held)), held.nbytes)

    def allocation(self, tensor: torch.Tensor) -> None:
        """Memory that may be prefetched, and no other (with `EARLY`)."""
        self.library.allocation(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_long(tensor.nbytes))

    def __call__(self, grid: tuple[int, int, int], /, **values) -> None:
        held = []
        for kind, name in self.params:
            value = values[re.sub(r"_desc_\d+$", "_desc", name)]  # tensor maps of one tensor, a box each
            if "*" in kind:
                held.append(ctypes.c_void_p(value.data_ptr()))
            else:
                held.append(ctypes.c_float(value) if "float" in kind else ctypes.c_int(value))
        slots = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        stuck = self.library.launch(slots, *grid, self.threads, self.resident, SEED)
        assert not stuck, "the kernel waits for something that never happens"
        reports = Path(f"{self.reports}.{os.getpid()}")
        found = reports.read_text(encoding="utf-8")[CpuKernel.known :] if self.reports and reports.exists() else ""
        CpuKernel.known += len(found)
        assert "SUMMARY" not in found, found[:4000]
