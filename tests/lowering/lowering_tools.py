"""Helpers of the ground floor's tests (a module, so that tests/gpu can use them too)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from terrazzo.lowering import KernelRequest
from terrazzo.lowering.toolchain import toolchain

HERE = Path(__file__).parent

# A process without tilelang (an import of it fails) that launches on tensors which claim to lie on a CUDA device.
DRIVE = """
import ctypes, sys
class NoTileLang:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tilelang", "tvm"):
            raise ImportError(name + " is not allowed here")
sys.meta_path.insert(0, NoTileLang())
from pathlib import Path
from terrazzo.lowering import Kernel
import tvm_ffi

class DLManagedTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

class OnDevice:
    def __init__(self, address, shape, bits, device=0):
        self.sizes = (ctypes.c_int64 * 4)(*shape, shape[1], 1)
        base = ctypes.addressof(self.sizes)
        self.tensor = DLManagedTensor(address, (2, device), 2, 2, bits, 1, base, base + 16, 0, None, None)
    def __dlpack_device__(self):
        return tuple(self.tensor.device)
    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

keep = []
def tensor(*arguments, **options):
    keep.append(OnDevice(*arguments, **options))
    return tvm_ffi.from_dlpack(keep[-1])

launch = Kernel("test", Path(FOLDER))._function
"""

needs_compiler = pytest.mark.skipif(
    bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"
)


def request_for(program: str, target: str = "sm_80", flags=(), **params) -> KernelRequest:
    return KernelRequest(f"test.{program}", f"programs:{program}", params, target, flags=flags)


def run_python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run Python text in a process of its own that finds `programs`, and packages of the folder `path` first."""
    paths = os.pathsep.join(str(entry) for entry in (path, HERE, os.environ.get("PYTHONPATH")) if entry)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
