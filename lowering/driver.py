"""CUDA devices as the driver describes them, without torch: importing it takes seconds, asking the driver does not."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

_ATTRIBUTES = {
    "multi_processor_count": 16, "L2_cache_size": 38, "major": 75, "minor": 76, "shared_memory_per_multiprocessor": 81,
    "regs_per_multiprocessor": 82, "shared_memory_per_block_optin": 97,
}  # fmt: skip
"""Field -> CUdevice_attribute of cuda.h."""


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a device that `Target.of_properties` reads, named as torch.cuda.get_device_properties has them.

    Attributes:
        name: as the driver says it. major, minor: compute capability. total_memory, L2_cache_size: bytes.
        multi_processor_count, regs_per_multiprocessor: numbers.
        shared_memory_per_block_optin, shared_memory_per_multiprocessor: bytes.
    """

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    regs_per_multiprocessor: int


def open_driver() -> ctypes.CDLL | None:
    """The CUDA driver's library, None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def device_properties() -> list[DeviceProperties] | None:
    """The devices that CUDA_VISIBLE_DEVICES lets this process see; None where the driver is absent or fails."""
    driver, count = open_driver(), ctypes.c_int()
    if driver is None:
        return None
    try:
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return None
        return [_properties(driver, index) for index in range(count.value)]
    except (AttributeError, OSError):
        return None


def _properties(driver: ctypes.CDLL, index: int) -> DeviceProperties:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver.cuDeviceGetName(name, len(name), device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    found = {}
    for field, attribute in _ATTRIBUTES.items():
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        found[field] = value.value
    assert {*found, "name", "total_memory"} == {field.name for field in fields(DeviceProperties)}
    return DeviceProperties(name=name.value.decode(errors="replace"), total_memory=memory.value, **found)


def _check(status: int) -> None:
    if status:
        raise OSError(f"the CUDA driver answers with error {status}")
