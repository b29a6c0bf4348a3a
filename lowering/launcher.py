"""The host side of a kernel: TileLang's argument checks and a launcher, in one shared object with the machine code.

TileLang generates a C function that checks its arguments and then calls three runtime functions by name: set the
device, encode a TMA descriptor, launch. The library it exports expects them of TileLang's own TVM runtime; Apache TVM's
stock runtime has no `__tvm_tensormap_create_tiled`, refuses the argument type of TMA descriptors and does not know
TileLang's cluster launches. Terrazzo compiles these three (about a hundred lines) into each kernel. So a kernel needs
tvm-ffi and the CUDA driver, nothing else; it runs in any process, with or without a TVM of any kind; and a launch takes
no detour.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.toolchain import find_host_compiler, find_nvcc, package_folder, run_tool

if TYPE_CHECKING:
    from tvm.tir import Var

_LAUNCH_PLACES = {
    **{f"blockIdx.{axis}": place for place, axis in enumerate("xyz")},
    **{f"threadIdx.{axis}": 3 + place for place, axis in enumerate("xyz")},
    **{f"tir.cluster_dim_{axis}": 6 + place for place, axis in enumerate("xyz")},
    "tirx.use_dyn_shared_memory": 9,
}
_ARGUMENT_KINDS = {
    "int32": "v",
    "uint32": "v",
    "int64": "v",
    "uint64": "v",
    "bool": "v",
    "float64": "v",
    "float32": "f",
}
_OBJECT = "host.o"
_RUNTIME_CALL = re.compile(r'TVMBackendGetFuncFromEnv\(__tvm_ffi__library_ctx, "(\w+)"')

_LAUNCHER = r"""
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <pthread.h>
#include <string.h>
#include "tvm/runtime/base.h"
#include "tvm/runtime/c_backend_api.h"
#include "tvm/ffi/c_api.h"
#include "tvm/ffi/extra/c_env_api.h"

namespace terrazzo {
namespace {

constexpr int kDevices = 64;
extern "C" const char terrazzo_image[] __attribute__((visibility("hidden")));

// The driver is loaded at the first launch, so that a kernel can be loaded and inspected where there is none.
#define DRIVER_FUNCTIONS(F) F(cuDevicePrimaryCtxRetain) F(cuCtxGetCurrent) F(cuCtxSetCurrent) F(cuModuleLoadData) \
  F(cuModuleGetFunction) F(cuFuncSetAttribute) F(cuLaunchKernelEx) F(cuTensorMapEncodeTiled) F(cuGetErrorName)
#define DECLARE(name) decltype(&::name) name;
#define RESOLVE(name) if (!(the_driver.name = (decltype(the_driver.name))dlsym(library, #name))) missing = #name;
struct Driver {
  const char *missing;
  DRIVER_FUNCTIONS(DECLARE)
};
Driver the_driver;
void find_driver() {
  const char *&missing = the_driver.missing;
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) { missing = "libcuda.so.1"; return; }
  DRIVER_FUNCTIONS(RESOLVE)
}
// Not a local static: its guard is of the C++ library, which some compilers put into each kernel, 65 KB of it.
const Driver &driver() {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_driver);
  return the_driver;
}

template <class... Values>
int fail(const char *kind, const char *format, Values... values) {
  char text[1024];
  snprintf(text, sizeof text, format, values...);
  TVMFFIErrorSetRaisedFromCStr(kind, text);
  return -1;
}

int fail_cuda(const char *what, const char *name, CUresult status) {
  const char *error = "unknown error";
  driver().cuGetErrorName(status, &error);
  return fail("RuntimeError", "%s %s: %s", what, name, error);
}

#define NEED_DRIVER() \
  if (driver().missing) return fail("RuntimeError", "the CUDA driver is absent or too old: no %s", driver().missing)

struct Kernel {
  const char *name;
  const char *kinds;   // one letter per argument: v by value, f float32 passed as double, t TMA descriptor by reference
  const char *places;  // what a launch parameter is: '0'-'2' grid, '3'-'5' block, '6'-'8' cluster, '9' shared memory
  bool dependent;      // may start before its predecessor in the stream ends (griddepcontrol)
  bool cooperative;
  CUfunction function[kDevices];  // written once, and read by launches of other threads
  unsigned shared_memory[kDevices];
};

// No header of the C++ library: they are most of the time of this file's compilation.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
struct Guard {
  Guard() { pthread_mutex_lock(&mutex); }
  ~Guard() { pthread_mutex_unlock(&mutex); }
};
CUcontext contexts[kDevices];
CUmodule modules[kDevices];
thread_local int device = 0;

int set_device(void *, const TVMFFIAny *args, int32_t, TVMFFIAny *) {
  device = args[1].v_int64;
  return device < kDevices ? 0 : fail("RuntimeError", "CUDA device %d is out of range", device);
}

int load(Kernel &kernel) {
  Guard guard;
  if (kernel.function[device]) return 0;
  CUcontext before = nullptr;
  CUresult status = driver().cuDevicePrimaryCtxRetain(&contexts[device], device);
  if (status) return fail_cuda("CUDA device has no context for kernel", kernel.name, status);
  driver().cuCtxGetCurrent(&before);
  driver().cuCtxSetCurrent(contexts[device]);
  CUfunction function = nullptr;
  if (!modules[device]) status = driver().cuModuleLoadData(&modules[device], terrazzo_image);
  if (!status) status = driver().cuModuleGetFunction(&function, modules[device], kernel.name);
  if (!status && strpbrk(kernel.places, "678"))
    status = driver().cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
  driver().cuCtxSetCurrent(before);
  if (status) return fail_cuda("cannot load kernel", kernel.name, status);
  __atomic_store_n(&kernel.function[device], function, __ATOMIC_RELEASE);
  return 0;
}

int launch(Kernel &kernel, const TVMFFIAny *args) {
  NEED_DRIVER();
  CUfunction function = __atomic_load_n(&kernel.function[device], __ATOMIC_ACQUIRE);
  if (!function) {
    if (load(kernel)) return -1;
    function = kernel.function[device];
  }
  void *params[MAX_ARGUMENTS];
  float floats[MAX_ARGUMENTS];
  int count = 0;
  for (; kernel.kinds[count]; ++count) {
    params[count] = (void *)&args[count].v_int64;
    if (kernel.kinds[count] == 't') params[count] = args[count].v_ptr;
    if (kernel.kinds[count] == 'f') floats[count] = args[count].v_float64, params[count] = &floats[count];
  }
  unsigned size[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
  for (int i = 0; kernel.places[i]; ++i) size[kernel.places[i] - '0'] = args[count + i].v_int64;
  if (!size[0] || !size[1] || !size[2]) return 0;

  CUlaunchAttribute attributes[3] = {};
  unsigned used = 0;
  if (size[6] * size[7] * size[8] > 1) {
    attributes[used].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[used++].value.clusterDim = {size[6], size[7], size[8]};
  }
  if (kernel.dependent) {
    attributes[used].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[used++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (kernel.cooperative) {
    attributes[used].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[used++].value.cooperative = 1;
  }
  CUstream stream = (CUstream)TVMFFIEnvGetStream(kDLCUDA, device);
  CUlaunchConfig config = {size[0], size[1], size[2], size[3], size[4], size[5], size[9], stream, attributes, used};

  CUcontext before = nullptr;
  driver().cuCtxGetCurrent(&before);
  if (before != contexts[device]) driver().cuCtxSetCurrent(contexts[device]);
  CUresult status = CUDA_SUCCESS;
  if (size[9] > __atomic_load_n(&kernel.shared_memory[device], __ATOMIC_ACQUIRE)) {
    status = driver().cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size[9]);
    __atomic_store_n(&kernel.shared_memory[device], size[9], __ATOMIC_RELEASE);
  }
  if (!status) status = driver().cuLaunchKernelEx(&config, function, params, nullptr);
  if (before != contexts[device]) driver().cuCtxSetCurrent(before);
  if (!status) return 0;
  const char *error = "unknown error";
  driver().cuGetErrorName(status, &error);
  return fail("RuntimeError",
              "cannot launch %s: %s; grid (%u, %u, %u), block (%u, %u, %u), cluster (%u, %u, %u), %u B shared",
              kernel.name, error, size[0], size[1], size[2], size[3], size[4], size[5], size[6], size[7], size[8],
              size[9]);
}

// Arguments: the CUtensorMap to fill, data type, rank, device address, then rank values each of size, stride in bytes,
// box and element stride, innermost dimension first, then interleave, swizzle, L2 promotion, out-of-bounds fill.
int encode_tensor_map(void *, const TVMFFIAny *args, int32_t, TVMFFIAny *) {
  NEED_DRIVER();
  int rank = args[2].v_int64;
  cuuint64_t size[5], stride[5];
  cuuint32_t box[5], element_stride[5];
  for (int i = 0; i < rank; ++i) {
    size[i] = args[4 + i].v_int64;
    stride[i] = args[4 + rank + i].v_int64;
    box[i] = args[4 + 2 * rank + i].v_int64;
    element_stride[i] = args[4 + 3 * rank + i].v_int64;
  }
  const TVMFFIAny *mode = args + 4 + 4 * rank;
  void *address = args[3].v_ptr;
  int type = args[1].v_int64;
  CUresult status = driver().cuTensorMapEncodeTiled(  // the innermost stride is implied
      (CUtensorMap *)args[0].v_ptr, (CUtensorMapDataType)type, rank, address, size, stride + 1, box, element_stride,
      (CUtensorMapInterleave)mode[0].v_int64, (CUtensorMapSwizzle)mode[1].v_int64,
      (CUtensorMapL2promotion)mode[2].v_int64, (CUtensorMapFloatOOBfill)mode[3].v_int64);
  if (!status) return 0;
  char text[512];
  int length = snprintf(text, sizeof text, "data type %d, address %p (must be 16-byte aligned)", type, address);
  for (int i = 0; i < rank; ++i)
    length += snprintf(text + length, sizeof text - length, ", dimension %d: size %llu stride %llu box %u", i,
                       (unsigned long long)size[i], (unsigned long long)stride[i], box[i]);
  return fail_cuda("no TMA descriptor for", text, status);
}

KERNELS

const struct { const char *name; TVMFFISafeCallType call; } functions[] = {
  {"__tvm_set_device", set_device}, {"__tvm_tensormap_create_tiled", encode_tensor_map}, FUNCTIONS
};

int find(void *, const char *name, void **out) {
  for (const auto &function : functions)
    if (!strcmp(function.name, name)) return *out = (void *)function.call, 0;
  return fail("RuntimeError", "the launcher has no function %s", name);
}

int call(void *function, TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  return ((TVMFFISafeCallType)function)(nullptr, args, count, result);
}

}  // namespace
}  // namespace terrazzo

#define TVMBackendGetFuncFromEnv terrazzo::find
#define TVMFFIFunctionCall terrazzo::call
"""


_IMAGE = """.section .rodata
.balign 64
.hidden terrazzo_image
.global terrazzo_image
terrazzo_image:
.incbin "{image}"
.byte 0
.section .note.GNU-stack,"",@progbits
"""
"""Assembly of the machine code as data, without a stack that is executable."""


def host_text(host: str, device_functions: list[Any]) -> str:
    """C++ text of a kernel's shared object.

    Args:
        host: TileLang's generated host function.
        device_functions: the lowered device PrimFuncs, whose parameters and attributes say how to launch them.

    Raises:
        CompileError: the program uses something that the launcher does not know.
    """
    kernels, table, longest = [], [], 1
    for index, function in enumerate(device_functions):
        kinds = "".join(_argument_kind(parameter) for parameter in function.params)
        tags = [str(tag) for tag in function.attrs["tirx.kernel_launch_params"]]
        unknown = set(tags) - set(_LAUNCH_PLACES)
        if unknown:
            raise CompileError(f"the launcher does not know the launch parameters {', '.join(sorted(unknown))}")
        places = "".join(str(_LAUNCH_PLACES[tag]) for tag in tags)
        name = str(function.attrs["global_symbol"])
        dependent, cooperative = (
            str(bool(function.attrs.get(attribute, 0))).lower()
            for attribute in ("has_cuda_pdl_sync", "use_cooperative_groups")
        )
        kernels.append(f'Kernel kernel_{index} = {{"{name}", "{kinds}", "{places}", {dependent}, {cooperative}}};')
        kernels.append(
            f"int launch_{index}(void *, const TVMFFIAny *args, int32_t, TVMFFIAny *) "
            f"{{ return launch(kernel_{index}, args); }}"
        )
        table.append(f'{{"{name}", launch_{index}}}')
        longest = max(longest, len(kinds))
    known = {"__tvm_set_device", "__tvm_tensormap_create_tiled"} | {
        str(f.attrs["global_symbol"]) for f in device_functions
    }
    foreign = set(_RUNTIME_CALL.findall(host)) - known
    if foreign:
        raise CompileError(f"the program calls runtime functions that the launcher lacks: {', '.join(sorted(foreign))}")
    launcher = _LAUNCHER.replace("KERNELS", "\n".join(kernels)).replace("FUNCTIONS\n};", ", ".join(table) + "\n};")
    return f"#define MAX_ARGUMENTS {longest}\n{launcher}\n{host}"


def _argument_kind(parameter: Var) -> str:
    dtype = str(parameter.dtype)
    if dtype == "handle":
        return "t" if getattr(parameter.type_annotation, "storage_scope", "") == "grid_constant" else "v"
    if dtype not in _ARGUMENT_KINDS:
        raise CompileError(
            f"kernel argument {parameter.name} has dtype {dtype}; scalars may be {', '.join(_ARGUMENT_KINDS)}"
        )
    return _ARGUMENT_KINDS[dtype]


def compile_host(text: str, folder: Path) -> None:
    """Compile the text of `host_text` in a `build_folder`, to what `link_host` takes.

    Raises:
        CompileError: the compiler refuses it; the message carries its words.
    """
    from tvm_ffi import libinfo

    # by links: nvcc puts these paths into commands for a shell
    includes = {
        "tvm": package_folder("tilelang") / "3rdparty" / "tvm" / "include",
        "ffi": libinfo.find_include_path(),
        "dlpack": libinfo.find_dlpack_include_path(),
    }
    for name, place in includes.items():
        (folder / name).symlink_to(place)
    # nvcc knows where its own cuda.h lies; the text is plain C++ for the host compiler. It checks and launches once for
    # a kernel that runs for microseconds: more than -O1 gains nothing.
    command = [find_nvcc(), "-ccbin", find_host_compiler(), "-x", "c++", "-std=c++17", "-O1", "-w", "-c"]
    command += ["-Xcompiler", "-fPIC,-fno-exceptions,-fno-rtti", *(f"-I{name}" for name in includes)]
    _run([*command, "-o", _OBJECT, "-"], folder, input=text)


def link_host(folder: Path, image: str, library: str) -> None:
    """The shared object of what `compile_host` made and of the machine code, the file `image`, in a `build_folder`.

    Raises:
        CompileError: the linker refuses it; the message carries its words.
    """
    (folder / "image.s").write_text(_IMAGE.format(image=image), encoding="utf-8")
    # -s: symbols are a tenth of its zipped bytes
    _run([find_host_compiler(), "-shared", "-s", "-o", library, _OBJECT, "image.s", "-ldl"], folder)


def _run(command: list[str | Path], folder: Path, **options: str | None) -> None:
    done = run_tool(command, folder, **options)
    if done.returncode:
        raise CompileError(
            f"the host side does not compile\n{' '.join(command)}\n{(done.stdout + done.stderr).strip()}"
        )
