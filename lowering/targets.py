"""GPU targets: what a schedule may ask of a device, and which instructions it runs natively.

Figures are NVIDIA's datasheets (dense rates, 32-bit accumulation); shared-memory sizes are those that the CUDA driver
reports. The capability table is specs.md A (SASS of one instruction each): on sm_90a the s4 and fp8 forms of `mma.sync`
assemble, but into emulation routines, so they are no capabilities there.

Blackwell runs the programs of `mma.sync`. sm_100a's tcgen05 has none here, so products stay below its rates.
sm_120a gets the programs of sm_89: a bulk copy to `.shared::cluster` becomes a call of a routine there.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.lowering.errors import TargetError

_AMPERE = {"ldmatrix", "movmatrix", "cp_async", "mma.f16", "mma.bf16", "mma.s8", "mma.s4"}
_HOPPER = {"tma", "bulk_copy", "cluster", "setmaxnreg", "stmatrix", "pdl"}
_WGMMA = {"wgmma.f16", "wgmma.bf16", "wgmma.s8", "wgmma.e4m3"}
CAPABILITIES: dict[str, frozenset[str]] = {
    "sm_80": frozenset(_AMPERE),
    "sm_86": frozenset(_AMPERE),
    "sm_89": frozenset(_AMPERE | {"mma.e4m3"}),
    "sm_90a": frozenset(_AMPERE - {"mma.s4"} | _HOPPER | _WGMMA),
    "sm_100a": frozenset(_AMPERE - {"mma.s4"} | _HOPPER),
    "sm_120a": frozenset(_AMPERE - {"mma.s4"} | {"mma.e4m3"}),
}
"""Architecture -> instructions that are native there, as "mma.e4m3". An emulated one is no capability."""
KNOWN_CAPABILITIES = frozenset().union(*CAPABILITIES.values())


def _rates(arch: str, f16: float, s8: float) -> tuple[tuple[str, float], ...]:
    """Dense TFLOP/s by operand dtype: e4m3 runs at twice the f16 rate, s4 at twice the s8 rate, where native."""
    native = CAPABILITIES[arch]
    rates = [("f16", f16), ("bf16", f16), ("s8", s8)]
    return tuple(
        rates
        + [("e4m3", 2 * f16)] * bool({"mma.e4m3", "wgmma.e4m3"} & native)
        + [("s4", 2 * s8)] * ("mma.s4" in native)
    )


@dataclass(frozen=True)
class Target:
    """One GPU as schedules see it. Make one with `Target.parse` or `Target.detect`.

    Attributes:
        arch: exact CUDA architecture: "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a" or "sm_120a".
        name: device name.
        sms: number of streaming multiprocessors.
        smem_per_block: largest shared memory of one block after opt-in, bytes.
        smem_per_sm: shared memory of one SM, bytes.
        registers_per_sm: 32-bit registers of one SM.
        l2_bytes: L2 cache, bytes.
        dram_gb_s: datasheet memory bandwidth, GB/s.
        tensor_tflops: pairs (operand dtype, dense TFLOP/s).
        capabilities: native instructions, see `supports`.
    """

    arch: str
    name: str
    sms: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    dram_gb_s: float
    tensor_tflops: tuple[tuple[str, float], ...]
    capabilities: frozenset[str]

    @staticmethod
    def parse(spec: Any = None) -> Target:
        """A Target from an arch ("sm_90a"), a TVM tag ("nvidia/nvidia-h100"), a TVM Target, a Target, or None (detect).

        An arch stands for its default device: A100-80GB, A40, L40S, H200, B200 and RTX 5090. So
        does a TVM Target, which keeps no tag.

        Raises:
            TargetError: an architecture or device that is not supported; the message lists those that are.
        """
        if spec is None:
            return Target.detect()
        if isinstance(spec, Target):
            return spec
        if isinstance(spec, str):
            device = spec.removeprefix("nvidia/")
            if spec in _DEFAULT_DEVICE:
                return _DEVICES[_DEFAULT_DEVICE[spec]]
            if device in _DEVICES:
                return _DEVICES[device]
            raise _unsupported(spec)
        if getattr(getattr(spec, "kind", None), "name", None) == "cuda":
            return Target.parse(str(spec.attrs["arch"]) if "arch" in spec.attrs else "cuda")
        raise _unsupported(spec)

    @staticmethod
    def detect(device: Any = None) -> Target:
        """The Target of a CUDA device (torch device, index, None for the current one), with its own SM count and sizes.

        Bandwidth and tensor rates come from the datasheet of the device's model; for a model that is not in the table,
        the rates of the architecture's default device are scaled by the number of SMs.

        Raises:
            TargetError: no CUDA device, or one of an unsupported architecture.
        """
        try:
            import torch
        except ImportError:
            torch = None
        if torch is None or not torch.cuda.is_available():
            raise TargetError(
                "target", device, "no CUDA device can be seen to detect a target from", "name one, " + _choices()
            )
        return Target.of_properties(
            torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
        )

    @staticmethod
    def of_properties(seen: Any) -> Target:
        """The Target of a device by its properties, of `torch.cuda.get_device_properties` or `DeviceProperties`.

        Raises:
            TargetError: a device of an unsupported architecture.
        """
        arch = f"sm_{seen.major}{seen.minor}" + ("a" if seen.major >= 9 else "")
        if arch not in CAPABILITIES:
            raise _unsupported(f"{seen.name} ({arch})")
        base = _DEVICES[_model(seen.name, arch) or _DEFAULT_DEVICE[arch]]
        scale = 1.0 if _model(seen.name, arch) else seen.multi_processor_count / base.sms
        return replace(
            base,
            name=seen.name,
            sms=seen.multi_processor_count,
            smem_per_block=getattr(seen, "shared_memory_per_block_optin", base.smem_per_block),
            smem_per_sm=getattr(seen, "shared_memory_per_multiprocessor", base.smem_per_sm),
            registers_per_sm=getattr(seen, "regs_per_multiprocessor", base.registers_per_sm),
            l2_bytes=seen.L2_cache_size,
            dram_gb_s=base.dram_gb_s * scale,
            tensor_tflops=tuple((dtype, rate * scale) for dtype, rate in base.tensor_tflops),
        )

    def supports(self, capability: str) -> bool:
        """Whether an instruction is native on this target, for example `supports("wgmma.f16")`.

        Raises:
            TargetError: a name that no target has; a misspelt capability is never silently False.
        """
        if capability not in KNOWN_CAPABILITIES:
            known = ", ".join(sorted(KNOWN_CAPABILITIES))
            raise TargetError(
                "capability", capability, "no target has a capability of this name", f"use one of {known}"
            )
        return capability in self.capabilities

    def tflops(self, dtype: str) -> float:
        """Dense tensor-core rate for an operand dtype ("f16", "bf16", "s8", "e4m3", "s4"), TFLOP/s.

        Raises:
            TargetError: this target has no tensor-core instruction for the dtype.
        """
        rates = dict(self.tensor_tflops)
        if dtype not in rates:
            raise TargetError(
                "dtype", dtype, f"{self.arch} has no native tensor rate for it", f"use one of {', '.join(rates)}"
            )
        return rates[dtype]


def _device(arch: str, name: str, sms: int, l2_mb: int, dram_gb_s: float, f16: float, s8: float) -> Target:
    kilobytes = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90a": 228, "sm_100a": 228, "sm_120a": 100}[arch]
    return Target(
        arch=arch,
        name=name,
        sms=sms,
        smem_per_block=(kilobytes - 1) * 1024,  # the driver keeps 1 KiB of every block for itself
        smem_per_sm=kilobytes * 1024,
        registers_per_sm=65536,
        l2_bytes=l2_mb * 2**20,
        dram_gb_s=dram_gb_s,
        tensor_tflops=_rates(arch, f16, s8),
        capabilities=CAPABILITIES[arch],
    )


# SMs, L2 in MiB, GB/s, dense f16 TFLOP/s, dense s8 TOP/s. GeForce halves f16 with f32 accumulation, not s8.
# Keys are TVM's tag names without "nvidia/"; those of l4, l40s, h200 and Blackwell are ours.
_DEVICES = {
    "nvidia-a100": _device("sm_80", "NVIDIA A100-SXM4-80GB", 108, 40, 2039, 312, 624),
    "nvidia-a30": _device("sm_80", "NVIDIA A30", 56, 24, 933, 165, 330),
    "nvidia-a40": _device("sm_86", "NVIDIA A40", 84, 6, 696, 149.7, 299.4),
    "nvidia-a10": _device("sm_86", "NVIDIA A10", 72, 6, 600, 125, 250),
    "nvidia-a10g": _device("sm_86", "NVIDIA A10G", 80, 6, 600, 70, 140),
    "rtx-a6000": _device("sm_86", "NVIDIA RTX A6000", 84, 6, 768, 154.8, 309.6),
    "geforce-rtx-3090": _device("sm_86", "NVIDIA GeForce RTX 3090", 82, 6, 936, 71, 284),
    "geforce-rtx-4090": _device("sm_89", "NVIDIA GeForce RTX 4090", 128, 72, 1008, 165.2, 660.8),
    "nvidia-l4": _device("sm_89", "NVIDIA L4", 58, 48, 300, 121, 242),
    "nvidia-l40s": _device("sm_89", "NVIDIA L40S", 142, 96, 864, 362, 724),
    "nvidia-h100": _device("sm_90a", "NVIDIA H100 80GB HBM3", 132, 50, 3352, 989.5, 1979),
    "nvidia-h200": _device("sm_90a", "NVIDIA H200", 132, 60, 4800, 989.5, 1979),
    "nvidia-b200": _device("sm_100a", "NVIDIA B200", 148, 126, 8000, 2250, 4500),
    "geforce-rtx-5090": _device("sm_120a", "NVIDIA GeForce RTX 5090", 170, 96, 1792, 209.5, 838),
    "rtx-pro-6000": _device("sm_120a", "NVIDIA RTX PRO 6000 Blackwell", 188, 128, 1792, 503.8, 1007.6),
}
_DEFAULT_DEVICE = {
    "sm_80": "nvidia-a100",
    "sm_86": "nvidia-a40",
    "sm_89": "nvidia-l40s",
    "sm_90a": "nvidia-h200",
    "sm_100a": "nvidia-b200",
    "sm_120a": "geforce-rtx-5090",
}
TARGET_NAMES = tuple(_DEFAULT_DEVICE) + tuple(f"nvidia/{tag}" for tag in _DEVICES)
"""What `Target.parse` takes: architectures, and devices as "nvidia/nvidia-h200"."""


def _model(name: str, arch: str) -> str | None:
    """The table's key of a device that a driver calls `name`: the longest tag whose words all appear in it."""
    words = set(name.lower().replace("-", " ").split())
    fits = [tag for tag, device in _DEVICES.items() if device.arch == arch and set(tag.split("-")) <= words]
    return max(fits, key=len, default=None)


def _near(spec: object) -> str:
    """The names most like what was asked for, for messages; "" for none."""
    names = {name.removeprefix("nvidia/").removeprefix("nvidia-"): name for name in TARGET_NAMES}
    word = str(spec).lower().removeprefix("nvidia/").removeprefix("nvidia-")
    found = [names[each] for each in difflib.get_close_matches(word, names, n=3, cutoff=0.6)]
    return f"{' or '.join(map(repr, found))}; or " if found else ""


def _choices() -> str:
    return f"for example Target.parse({next(reversed(_DEFAULT_DEVICE))!r}); supported: {', '.join(TARGET_NAMES)}"


def _unsupported(spec: object) -> TargetError:
    return TargetError("target", spec, "this GPU target is not supported", f"use {_near(spec)}{_choices()}")
