"""Smaller stand-ins for the headers that take most of a kernel's compile time.

A kernel uses a handful of wgmma instructions, and TileLang's header declares a class for each of some 2,500, from 3 MB
of CUTLASS. A stand-in has the same text with the classes of other shapes left out, so that the code which remains
cannot differ. Standard headers that CUTLASS includes for the host are cut to what device code could name. Where a
kernel needs more than this it does not compile, and is compiled with the headers themselves.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from terrazzo.lowering.toolchain import package_folder

_WGMMA = "tl_templates/cuda/instruction/wgmma.h"
_CUTLASS = ("cute/arch/mma_sm90_gmma.hpp", "cute/arch/mma_sm90_gmma_ext.hpp")
# libstdc++'s own parts; with another library they do not exist, and the headers themselves are taken.
_HOST_ONLY = {
    "iostream": "#include <iosfwd>\n",
    "iomanip": "",
    "functional": "#include <type_traits>\n#include <bits/stl_function.h>\n",
    "algorithm": "#include <bits/stl_algobase.h>\n",
}
_CLASS = re.compile(r"^(?:template\s*<[^>]*>\s*)?struct\s+MMA_64x(\d+)x\w+\s*\{.*?^\};\n", re.MULTILINE | re.DOTALL)
_FOREACH = re.compile(r"^TL_WGMMA_FOREACH_N_\w+\((\w+)\);", re.MULTILINE)
_SHAPES = (re.compile(r"wgmma_[rs]s<[^;]*?,\s*64,\s*(\d+),\s*\d+,"), re.compile(r"MMA_64x(\d+)x"))


@cache
def _original(name: str) -> str:
    tilelang = package_folder("tilelang")
    root = tilelang / "src" if name == _WGMMA else tilelang / "3rdparty" / "cutlass" / "include"
    return (root / name).read_text(encoding="utf-8").replace('"../common.h"', "<tl_templates/cuda/common.h>")


@cache
def _cutlass_for(name: str, widths: frozenset[int]) -> str:
    return _CLASS.sub(lambda found: found[0] if int(found[1]) in widths else "", _original(name))


def write_slim_headers(code: str, folder: Path) -> None:
    """Write the stand-ins for a kernel's text into a folder, which stands before all others on the compiler's path."""
    widths = frozenset(int(width) for shape in _SHAPES for width in shape.findall(code))
    texts = {name: _cutlass_for(name, widths) for name in _CUTLASS} | _HOST_ONLY
    texts[_WGMMA] = _FOREACH.sub(
        lambda found: " ".join(f"{found[1]}({width})" for width in sorted(widths)), _original(_WGMMA)
    )
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
