"""What this machine offers to terrazzo, and what is missing: the facts behind `terrazzo info`."""

from __future__ import annotations

import platform
from typing import Any

from terrazzo.lowering import cache
from terrazzo.lowering.errors import CacheError, TargetError, TerrazzoError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import (
    INSTALL_COMPILER,
    INSTALL_DISASSEMBLER,
    Toolchain,
    find_cuda_tool,
    find_host_compiler,
    find_nvcc,
    package_version,
    toolchain,
)


def environment_report() -> dict[str, Any]:
    """Versions, tools, devices, cache, and `missing`: a list of {"what", "needed_for", "remedy"}."""
    missing = []

    def miss(what: str, needed_for: str, remedy: str) -> None:
        missing.append({"what": what, "needed_for": needed_for, "remedy": remedy})

    try:
        tools = toolchain()
    except TerrazzoError as error:
        tools = Toolchain(package_version("tilelang"), package_version("apache-tvm-ffi"), None, None)
        miss("a working nvcc", "compiling kernels", str(error))
    torch, devices, driver = _devices()
    if package_version("torch") is None:
        miss("torch", "running anything", "pip install torch")
    elif torch["cuda"] is None:
        miss("a CUDA build of torch", "running kernels (compiling works without)", "install torch from its CUDA index")
    elif not devices:
        miss(
            "a CUDA device", "running kernels (compiling works without)", "use a machine with one of the supported GPUs"
        )
    for device in devices:
        if device["target"] is None:
            miss(f"support for {device['name']}", "running kernels on it", device["problem"])
    for part in tools.missing():
        miss(part, "compiling kernels (bundles run without)", INSTALL_COMPILER)
    disassembler = find_cuda_tool("cuobjdump")
    if disassembler is None or find_cuda_tool("nvdisasm") is None:
        miss("cuobjdump and nvdisasm", "instruction counts in reports", INSTALL_DISASSEMBLER)
    try:
        place, entries = str(cache.cache_root()), cache.list_entries()
    except CacheError as error:
        place, entries = None, []
        miss("a folder for the kernel cache", "compiling kernels (bundles run without)", str(error))
    return {
        "terrazzo": package_version("terrazzo"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch,
        "tilelang": tools.tilelang,
        "tvm_ffi": tools.tvm_ffi,
        "nvcc": {"path": find_nvcc(), "version": tools.nvcc, "toolkit": tools.toolkit},
        "host_compiler": find_host_compiler(),
        "disassembler": disassembler,
        "driver": driver,
        "devices": devices,
        "cache": {
            "path": place,
            "entries": len(entries),
            "bytes": sum(entry["bytes"] for entry in entries),
        },
        "missing": missing,
    }


def _devices() -> tuple[dict[str, Any] | None, list[dict[str, Any]], str | None]:
    """torch's versions, the CUDA devices it sees, and the newest CUDA version that the driver supports."""
    if package_version("torch") is None:
        return None, [], None
    import torch

    versions = {"version": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return versions, [], None
    devices = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        device = {"index": index, "name": seen.name, "memory_bytes": seen.total_memory, "target": None, "problem": ""}
        try:
            target = Target.detect(index)
            device |= {"target": target.arch, "sms": target.sms, "l2_bytes": target.l2_bytes}
        except TargetError as error:
            device["problem"] = str(error)
        devices.append(device)
    return versions, devices, _driver_version()


def _driver_version() -> str | None:
    """CUDA version that the installed driver supports, for example "13.0"."""
    import ctypes

    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except OSError:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
