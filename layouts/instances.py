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
    """A named derivation: ``build()`` gives the PackedLayout, ``converter`` its usual converter, ``note`` what it is."""

    name: str
    note: str
    fragment: Callable[[], Fragment]
    converter: str
    load_words: int
    placement: tuple[tuple[int, int], ...] = ((0, 0),)
    order: str = "atom"
    block_order: str = "rk"

    def build(self) -> PackedLayout:
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


_K4 = tuple((0, k) for k in range(4))
INSTANCES: dict[str, Instance] = {
    i.name: i
    for i in (
        Instance(
            "w4a16_wgmma",
            "W4A16: wgmma m64k16 A, four k16 steps a load",
            lambda: Fragment.wgmma_a(16),
            "u4_f16_magic",
            4,
            _K4,
        ),
    )
}


@cache
def get_instance(name: str) -> PackedLayout:
    """The packed layout of a registered instance; LayoutError lists the names that exist."""
    if name not in INSTANCES:
        raise LayoutError("instance", name, "is not registered", f"use one of {', '.join(sorted(INSTANCES))}")
    return INSTANCES[name].build()
