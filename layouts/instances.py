"""The packed layouts that Terrazzo uses or is compatible with, each one a derivation (specs.md B.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from terrazzo.layouts.converters.base import get_converter
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.packed import PackedLayout, derive
from terrazzo.lowering.errors import LayoutError


@dataclass(frozen=True)
class Instance:
    """A named derivation: ``build()`` gives the layout, ``converter`` its usual converter, ``note`` what it is."""

    name: str
    note: str
    fragment: Callable[[], Fragment]
    converter: str
    load_words: int
    placement: tuple[tuple[int, int], ...] = ((0, 0),)
    order: str = "atom"
    block_order: str = "rk"

    def build(self) -> PackedLayout:
        """The layout, derived; `get_instance` keeps it."""
        converter = get_converter(self.converter)
        return derive(
            self.fragment(),
            converter,
            converter.storage_bits,
            self.load_words,
            self.placement,
            self.order,
            self.block_order,
        )


def _k(count: int) -> tuple[tuple[int, int], ...]:
    """``count`` atoms one after another along K."""
    return tuple((0, k) for k in range(count))


def _n(*rows: int) -> tuple[tuple[int, int], ...]:
    """Atoms at these positions along the rows."""
    return tuple((row, 0) for row in rows)


def _wgmma(bits: int) -> Callable[[], Fragment]:
    return lambda: Fragment.wgmma_a(bits)


def _mma_a(bits: int) -> Callable[[], Fragment]:
    return lambda: Fragment.mma_a(bits)


def _mma_b(bits: int, n: int) -> Callable[[], Fragment]:
    return lambda: Fragment.mma_b(bits, n)


INSTANCES: dict[str, Instance] = {}
"""Name -> instance: every packed layout that the library uses, and published ones that it derives too."""


def _add(instance: Instance) -> None:
    INSTANCES[instance.name] = instance


_add(
    Instance(
        "w4a16_wgmma",
        "W4A16 on every target: four k16 steps of A in one load",
        _wgmma(16),
        "u4_f16_magic",
        4,
        _k(4),
    )
)
_add(
    Instance(
        "w4a16",
        "W4A16 as packed: w4a16_wgmma with the row blocks of one k block side by side, one bulk copy for a tile",
        _wgmma(16),
        "u4_f16_magic",
        4,
        _k(4),
        block_order="kr",
    )
)
_add(Instance("w4a8_wgmma", "W4A8 dual-MMA, as LiquidGEMM", _wgmma(8), "u4_s8_lqq", 4, _k(2), "reg"))
_add(Instance("w4a8_mma", "W4A8 for mma.sync, weights as A", _mma_a(8), "u4_s8_lqq", 4, _k(2), "reg"))
_add(
    Instance(
        "w4a8_fp8", "W4A8 with e4m3 activations, every target that has e4m3", _wgmma(8), "z4_e4m3", 4, _k(2), "reg"
    )
)
_add(
    Instance(
        "mxfp4_fp8",
        "MXFP4 with e4m3 activations: the blocks of w4a8_fp8, bits of a word where e4m3 has them",
        _wgmma(8),
        "e2m1_e4m3",
        4,
        _k(2),
        "reg",
    )
)
_add(
    Instance(
        "mxfp4",
        "MXFP4 with 16-bit activations: the blocks of w4a16, bits of a word where bf16 has them",
        _wgmma(16),
        "e2m1_bf16_scaled",
        4,
        _k(4),
        block_order="kr",
    )
)
_add(
    Instance(
        "nvfp4",
        "NVFP4 with 16-bit activations: the same, some bits of a half in the other one",
        _wgmma(16),
        "e2m1_bf16_paired",
        4,
        _k(4),
        block_order="kr",
    )
)
_add(
    Instance(
        "nf4",
        "NF4 with 16-bit activations: the same, three bits of a code where a byte permute reads them",
        _wgmma(16),
        "nf4_bf16_words",
        4,
        _k(4),
        block_order="kr",
    )
)
_add(
    Instance(
        "w8a16",
        "INT8 with 16-bit activations, every target: two k16 steps of A in one load",
        _wgmma(16),
        "u8_f16_exact",
        4,
        _k(2),
        block_order="kr",
    )
)
_add(
    Instance(
        "fp8",
        "weight-only FP8 with 16-bit activations, every target: two k16 steps of A in one load",
        _wgmma(16),
        "e4m3_bf16_words",
        4,
        _k(2),
        block_order="kr",
    )
)
_add(
    Instance(
        "w8a8",
        "W8A8 on every target, int8 or e4m3: tiles of 64 x 128 as wgmma reads them in shared memory, and ldmatrix",
        lambda: Fragment.wgmma_shared(8),
        "s8_s8",
        4,
        block_order="kr",
    )
)
_add(Instance("w4a4_mma", "W4A4 blocks for native s4 mma.sync (sm_80, sm_86, sm_89)", _mma_a(4), "s4_s4", 4))
_add(
    Instance(
        "kv2_wgmma",
        "2-bit keys or values as A: eight k16 steps in one load",
        _wgmma(16),
        "u2_f16_subnormal",
        4,
        _k(8),
    )
)
_add(Instance("marlin_u4", "Marlin's u4 weights", _mma_b(16, 16), "u4_f16_magic", 4, _n(0, 1, 2, 3), "atom", "kr"))
_add(Instance("turbomind_u4", "TurboMind u4, dense", _mma_b(16, 16), "u4_f16_fused", 2, _n(0, 1), "atom", "kr"))
_add(Instance("turbomind_u4_moe", "TurboMind u4, grouped (MoE)", _mma_b(16, 16), "u4_f16_fused", 2, _n(0, 1)))
_add(Instance("turbomind_mxfp4", "TurboMind MXFP4 weights as A", _mma_a(16), "e2m1_bf16", 1, block_order="kr"))
_add(Instance("turbomind_e4m3", "TurboMind weight-only FP8 as A", _mma_a(16), "e4m3_bf16", 2, block_order="kr"))
_add(Instance("qserve_g128", "QServe W4A8 g128 weights as B", _mma_b(8, 8), "u4_u8", 4, _n(0, 2, 1, 3), "reg"))


@cache
def get_instance(name: str) -> PackedLayout:
    """The packed layout of a registered instance; LayoutError lists the names that exist."""
    if name not in INSTANCES:
        raise LayoutError("instance", name, "is not registered", f"use one of {', '.join(sorted(INSTANCES))}")
    return INSTANCES[name].build()
