"""The one runtime function that TMA kernels need and Apache TVM's stock runtime lacks.

The host stub of a TMA kernel asks its module for `__tvm_tensormap_create_tiled`, with these arguments (TileLang,
src/cuda/runtime.cc): the 128-byte CUtensorMap to fill, data type, rank, device address, then rank values each of size,
stride in bytes, box and element stride, innermost dimension first, then interleave, swizzle, L2 promotion, out-of-bounds
fill. The innermost stride is implied and not passed on to the driver.

Registering such a function globally would collide with TileLang's own when tilelang is imported later, and a Python
callback costs microseconds in each launch. So it is compiled into a small library beside the kernel, and the loader
makes it an import of the kernel's module: those are asked before the global table.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.toolchain import find_host_compiler

FUNCTION = "__tvm_tensormap_create_tiled"
LIBRARY = "tensor_map.so"

SOURCE = r"""
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>

// The stable C ABI of tvm-ffi: type_index is 1 for an integer, 4 for an opaque pointer.
struct Any { int32_t type_index; uint32_t padding; union { int64_t integer; void *pointer; }; };
extern "C" void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

typedef int (*Encode)(void *map, int type, uint32_t rank, void *address, const uint64_t *size, const uint64_t *stride,
                      const uint32_t *box, const uint32_t *element_stride, int interleave, int swizzle, int l2, int fill);

static int raise(const char *kind, const char *message) { TVMFFIErrorSetRaisedFromCStr(kind, message); return -1; }

static Encode find_encode() {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? (Encode)dlsym(driver, "cuTensorMapEncodeTiled") : nullptr;
}

extern "C" int __tvm_ffi___tvm_tensormap_create_tiled(void *, const Any *args, int32_t count, Any *result) {
  static const Encode encode = find_encode();
  if (!encode) return raise("RuntimeError", "the CUDA driver (libcuda.so.1) has no cuTensorMapEncodeTiled: TMA kernels need driver 12.0 or newer");
  int64_t rank = count > 2 ? args[2].integer : 0;
  if (rank < 1 || rank > 5 || count != 8 + 4 * rank) return raise("TypeError", "a tensor map takes 8 + 4 * rank arguments, rank 1 to 5");
  uint64_t size[5], stride[5];
  uint32_t box[5], element_stride[5];
  for (int i = 0; i < rank; ++i) {
    size[i] = args[4 + i].integer;
    stride[i] = args[4 + rank + i].integer;
    box[i] = args[4 + 2 * rank + i].integer;
    element_stride[i] = args[4 + 3 * rank + i].integer;
  }
  const Any *mode = args + 4 + 4 * rank;
  int status = encode(args[0].pointer, args[1].integer, rank, args[3].pointer, size, stride + 1, box, element_stride,
                      mode[0].integer, mode[1].integer, mode[2].integer, mode[3].integer);
  if (status) {
    char text[768];
    int n = snprintf(text, sizeof text, "cuTensorMapEncodeTiled fails with CUDA error %d: type %d, address %p (16-byte aligned?), swizzle %d",
                     status, (int)args[1].integer, args[3].pointer, (int)mode[1].integer);
    for (int i = 0; i < rank; ++i)
      n += snprintf(text + n, sizeof text - n, "; dimension %d: size %llu, stride %llu bytes, box %u", i,
                    (unsigned long long)size[i], (unsigned long long)stride[i], box[i]);
    return raise("RuntimeError", text);
  }
  result->type_index = 1;
  result->padding = 0;
  result->integer = 0;
  return 0;
}
"""


def build_tensor_map_library(folder: Path) -> Path:
    """Compile SOURCE into `folder`/tensor_map.so.

    Raises:
        CompileError: the C++ compiler fails.
    """
    command = [find_host_compiler(), "-x", "c++", "-O2", "-shared", "-fPIC", "-o", str(folder / LIBRARY), "-", "-ldl"]
    done = subprocess.run(command, input=SOURCE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"the tensor-map library does not compile\n{' '.join(command)}\n{done.stderr.strip()}")
    return folder / LIBRARY
