"""What this machine offers to terrazzo, and what is missing: the facts behind `terrazzo info`."""

from __future__ import annotations

import platform
import re
from typing import Any

from terrazzo.lowering import cache
from terrazzo.lowering.compilers import compiler_report
from terrazzo.lowering.driver import device_properties, open_driver
from terrazzo.lowering.errors import CacheError, TargetError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import (
    INSTALL_COMPILER,
    INSTALL_DISASSEMBLER,
    find_cuda_tool,
    find_host_compiler,
    find_nvcc,
    installed,
    package_folder,
    package_version,
)


def environment_report() -> dict[str, Any]:
    """Versions, tools, devices, cache, and `missing`: a list of {"what", "needed_for", "remedy"}."""
    missing = []

    def miss(what: str, needed_for: str, remedy: str) -> None:
        missing.append({"what": what, "needed_for": needed_for, "remedy": remedy})

    compiling, tools = compiler_report(), installed()
    if compiling["problem"] is not None:
        what = f"the compiler that {compiling['named_by']} names" if compiling["named_by"] else "a working nvcc"
        miss(what, "compiling kernels (bundles run without)", compiling["problem"])
    torch, devices = _devices()
    made_by = compiling["toolchain"] or tools.as_dict()
    driver, needed = driver_version(), driver_needed(made_by["toolkit"])
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
    if driver is not None and made_by["toolkit"] is not None and is_older(driver, needed):
        remedy = f"update the driver, which is for CUDA {driver}, or compile with CUDA {driver.partition('.')[0]}"
        miss(f"a driver for CUDA {needed} or newer", f"running what nvcc of CUDA {made_by['toolkit']} makes", remedy)
    for part in compiling["missing"] or ():
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
        "compiler": compiling,
        "nvcc": {"path": find_nvcc(), "version": tools.nvcc, "toolkit": tools.toolkit, "driver": needed},
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


def _devices() -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """torch's versions, and the CUDA devices that it would see. torch is not imported: that takes seconds."""
    if package_version("torch") is None:
        return None, []
    versions = {"version": package_version("torch"), "cuda": _torch_cuda()}
    if versions["cuda"] is None:
        return versions, []
    devices = []
    for index, seen in enumerate(device_properties() or ()):
        device = {"index": index, "name": seen.name, "memory_bytes": seen.total_memory, "target": None, "problem": ""}
        try:
            target = Target.of_properties(seen)
            device |= {"target": target.arch, "sms": target.sms, "l2_bytes": target.l2_bytes}
        except TargetError as error:
            device["problem"] = str(error)
        devices.append(device)
    return versions, devices


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, None for a CPU build."""
    folder = package_folder("torch")
    text = (
        (folder / "version.py").read_text(encoding="utf-8", errors="replace")
        if folder and (folder / "version.py").is_file()
        else ""
    )
    found = re.search(r"^cuda(?::[^=\n]*)?\s*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found and found.group(1)


def driver_version() -> str | None:
    """CUDA version that the installed driver supports, for example "13.0"; None without a driver."""
    import ctypes

    number, driver = ctypes.c_int(), open_driver()
    try:
        if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)):
            return None
    except AttributeError:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def driver_needed(toolkit: str | None, ptx: bool = False) -> str:
    """The oldest CUDA version that a driver must support to load what a toolkit compiles.

    Machine code runs on every driver of the toolkit's major version; PTX needs the toolkit's own version or a newer one
    (https://docs.nvidia.com/deploy/cuda-compatibility). Launches by cuLaunchKernelEx and TMA descriptors need 12.0.
    """
    if toolkit is None or not _VERSION.fullmatch(toolkit):
        return _OLDEST
    needed = toolkit if ptx else f"{toolkit.partition('.')[0]}.0"
    return _OLDEST if is_older(needed, _OLDEST) else needed


def is_older(version: str, other: str) -> bool:
    """Whether "12.8" comes before "13.0"."""
    left, right = ([int(part) for part in one.split(".")] for one in (version, other))
    return left < right


_VERSION = re.compile(r"\d{1,3}\.\d{1,2}", re.ASCII)
_OLDEST = "12.0"
