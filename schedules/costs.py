"""What parts of launches cost, by form: numbers fitted to measurements, which `tile_costs` and `small_batch` add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from terrazzo.schedules.tile_costs import TileCosts


@dataclass(frozen=True)
class SmallBatchCost:
    """Microseconds of a schedule for each: microsecond of streaming, of padding, of latency, of the last chunk; chunk;
    KB of X; share of a sum of CTAs, and whether there are several; 16 items; 64 KB of partial sums of warps; pairs.
    flight: items under way that hide the latency."""

    stream: float
    padding: float
    latency: float
    tail: float
    chunk: float
    x: float
    kc: float
    split: float
    items: float
    sums: float = 0.0
    joined: float = 0.72
    flight: int = 32


_F16 = TileCosts(  # sharing fitted to 1091 measurements of group 128 on H200, units to 400 (3 % rms),
    # tiles of up to 32 tokens to 340 before
    start=1.45, store=0.615, share=1.786, add=0.743, uneven=1.175, uneven_area=0.628,
    part=1.599, part_area=1.04, part_each=0.342, pair=0.7, pair_area=0.8, traffic=0.881, busy=0.222,
    units={
        (16, 2, 1): 0.427, (16, 2, 2): 0.695, (16, 3, 1): 0.522, (16, 4, 1): 0.66, (16, 4, 2): 1.289,
        (32, 2, 1): 0.392, (32, 2, 2): 0.701, (32, 3, 1): 0.524, (32, 3, 2): 1.052, (32, 4, 1): 0.702,
        (48, 2, 1): 0.431, (48, 2, 2): 0.806, (48, 3, 1): 0.58, (48, 4, 1): 0.79,
        (64, 2, 1): 0.455, (64, 2, 2): 0.88, (64, 3, 1): 0.7, (64, 3, 2): 1.38, (64, 4, 1): 0.89,
        (80, 2, 1): 0.569, (80, 2, 2): 1.0, (80, 4, 1): 0.98, (96, 2, 1): 0.645, (96, 2, 2): 1.16, (96, 4, 1): 1.13,
        (112, 2, 1): 0.687, (112, 2, 2): 1.32, (112, 4, 1): 1.21,
        (128, 2, 1): 0.755, (128, 2, 2): 1.39, (128, 3, 1): 1.03, (128, 4, 1): 1.36,
        (160, 2, 1): 0.86, (192, 2, 1): 1.055, (224, 2, 1): 1.24, (256, 2, 1): 1.36,
    },
)  # fmt: skip
_F16_PAIRS = replace(
    _F16, units={**_F16.units, (128, 1, 1): 0.5, (96, 1, 1): 0.46, (64, 1, 1): 0.34, (32, 1, 1): 0.306}
)
"""Where the CTAs of a tile are pairs, tiles of one warpgroup are worth it too; 70 measurements on H200 (4 % rms)."""
_S8 = TileCosts(  # sharing fitted to 1337 measurements of group 64 on H200, units to 450 (4 % rms),
    # tiles of up to 32 tokens to 192 before
    start=1.58, store=0.985, share=2.308, add=0.728, uneven=0.254, uneven_area=1.398,
    part=1.802, part_area=1.263, part_each=0.349, pair=0.95, pair_area=0.85, traffic=0.952, busy=0.2,
    units={
        (16, 2, 1): 0.232, (16, 2, 2): 0.455, (16, 3, 1): 0.32, (16, 4, 1): 0.43, (16, 4, 2): 0.747,
        (32, 2, 1): 0.232, (32, 2, 2): 0.512, (32, 3, 1): 0.353, (32, 4, 1): 0.448, (32, 4, 2): 0.899,
        (48, 2, 1): 0.245, (48, 3, 1): 0.262, (48, 4, 1): 0.375,
        (64, 2, 1): 0.27, (64, 2, 2): 0.54, (64, 3, 1): 0.37, (64, 4, 1): 0.47,
        (80, 2, 1): 0.301, (80, 2, 2): 0.61, (80, 3, 1): 0.39, (80, 4, 1): 0.51,
        (96, 2, 1): 0.326, (96, 2, 2): 0.67, (96, 4, 1): 0.552,
        (112, 2, 1): 0.349, (112, 2, 2): 0.69, (112, 4, 1): 0.616,
        (128, 2, 1): 0.366, (128, 2, 2): 0.747, (128, 3, 1): 0.51, (128, 4, 1): 0.665,
        (160, 2, 1): 0.42, (192, 2, 1): 0.495, (224, 2, 1): 0.575, (256, 2, 1): 0.655,
    },
)  # fmt: skip
_S8_PAIRS = replace(
    _S8,
    units={
        **_S8.units, (32, 1, 1): 0.17, (64, 1, 1): 0.18, (96, 1, 1): 0.204, (128, 1, 1): 0.235,
        (160, 1, 1): 0.267, (192, 1, 1): 0.32, (224, 1, 1): 0.35,
    },
)  # fmt: skip
"""Where the CTAs of a tile are pairs, tiles of one warpgroup are worth it too; estimates, from W4A16's beside two, by
which the choice is within 0.6 % of the fastest of 33 problems (H200)."""
_E4M3 = replace(  # fitted to 180 measurements of group 128 on H200; tiles up to 32 tokens, and sharing, are int8's
    _S8,
    units={
        **{tile: cost for tile, cost in _S8.units.items() if tile[0] <= 32},
        (32, 1, 1): 0.17, (48, 2, 1): 0.215, (48, 4, 1): 0.375, (64, 1, 1): 0.178, (64, 2, 1): 0.25, (64, 4, 1): 0.5,
        (80, 2, 1): 0.31, (96, 1, 1): 0.22, (96, 2, 1): 0.356, (112, 2, 1): 0.394, (128, 1, 1): 0.264,
        (128, 2, 1): 0.422, (160, 2, 1): 0.604, (192, 2, 1): 0.694, (224, 2, 1): 0.767, (256, 2, 1): 0.817,
    },
)  # fmt: skip
_E4M3_EXPERTS = replace(
    _E4M3,
    units={tile: cost for tile, cost in _E4M3.units.items() if tile[0] > 16 or tile == (16, 2, 1)}
    | {(256, 2, 1): 0.78},
)
"""Of experts: with one token each two warpgroups were up to a fifth faster than four; in launches of 8192 tokens and
more, at the power limit, 256 tokens 4 to 5 % faster than 128 (one run each on an H200, not kept)."""
_MX = replace(  # estimates: with each 32 k a thread has as many factors to make as sums to scale
    _E4M3, units={tile: cost * (1 + tile[0] / 128) for tile, cost in _E4M3.units.items() if tile[0] <= 128}
)
_BLOCKS = replace(  # of two-level scales: units fitted to 330 measurements on H200 (3 % rms), the rest W4A8's
    _S8,
    units={
        (16, 2, 1): 0.232, (16, 4, 1): 0.43, (32, 2, 1): 0.232, (32, 4, 1): 0.448,
        (48, 2, 1): 0.24, (48, 3, 1): 0.38, (48, 4, 1): 0.365, (64, 2, 1): 0.279, (64, 3, 1): 0.449,
        (80, 2, 1): 0.317, (80, 3, 1): 0.432, (96, 2, 1): 0.337, (96, 3, 1): 0.458, (112, 2, 1): 0.361,
        (112, 3, 1): 0.511, (128, 2, 1): 0.354, (128, 3, 1): 0.554,
    },
)  # fmt: skip
_BLOCKS_EXPERTS = replace(_BLOCKS, units={tile: cost for tile, cost in _BLOCKS.units.items() if tile != (48, 4, 1)})
"""Of experts: the state of their table makes that tile spill."""
_SCALED_BLOCKS = (
    replace(  # of a scale for each block: the sums of a tile are scaled with every 128 k; 70 measurements on
        # H200, wide tiles with warpgroups in turn (6 % rms)
        _BLOCKS,
        units={tile: cost * (1 + 0.0075 * tile[0]) for tile, cost in _BLOCKS.units.items()},
    )
)
_DIRECT_TILES = tuple(
    (tokens, *shape)
    for tokens in (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    for shape in (((1, 1), (2, 1), (2, 2), (3, 1), (4, 1)) if tokens < 128 else ((1, 1), (2, 1), (2, 2)))
    if tokens * shape[1] <= {1: 256, 2: 256, 3: 128, 4: 64}[shape[0]]
)


def _direct(scaled: float, alone: float, tall: bool = False) -> TileCosts:
    """Of W8A8: 8 KB of a row block and 128 k as fast as int8's smallest tiles come, or products at the rate of its
    widest, `scaled` of their time longer. 90 tiles of one H100 (benchmarks/results/w8a8_tiles_h100.json) say the rest:
    a warpgroup `alone` takes so many times as long, tiles of 128 x 128 an eighth and widths between 128 and 256 a tenth
    longer. `tall`: 256 rows by 128 tokens, too, which else lose to 128 by 256."""

    def unit(tokens: int, wgs: int, rb: int) -> float:
        products, least = 0.6 * (1 + scaled) * wgs * rb * tokens / 512, 0.23 * wgs * rb
        if tokens >= 128:
            products *= alone if wgs * rb == 1 else 1.125 if tokens * wgs * rb == 256 else 1.0
            products *= 1.0 if tokens in (128, 256) else 1.1
            least = (64 * wgs * rb + tokens) / 860  # both operands come from L2, 110 KB in a microsecond
        return max(least, products) + 0.0002 * tokens

    tiles = [tile for tile in _DIRECT_TILES if tall or tile != (128, 2, 2)]
    return replace(_S8, units={tile: unit(*tile) for tile in tiles}, pair=1.5, scattered=1.4)


_SMALL_F16 = {  # resident rows -> fitted to measurements on H200: 231 of 17 weights up to 8 tokens, 6 % rms, the
    # choice 2 % from the best that was timed (tests/data/tuning/small_batch_h200.json); some 90 of 16
    4: SmallBatchCost(0.596, 0.632, 0.27, 0.684, 0.209, 0.0, 0.134, 0.78, 0.166, 0.0, joined=0.513, flight=48),
    8: SmallBatchCost(1.01, 0.808, 0.176, 0.264, 0.138, 0.014, 0.237, 1.357, 0.0, 0.0, joined=0.907, flight=48),
    16: SmallBatchCost(1.31, 1.50, 1.09, 0.33, 0.493, 0.01, 0.219, 0.0, 0.0),
}
_SMALL_S8 = {  # of small batches: resident rows -> fitted to measurements on H200: 155 of 1 and 4 tokens, 5 % rms, the
    # choice 1 % from the fastest that was timed (tests/data/tuning/small_batch_h200.json: 109 of them); some 40 of 16
    8: SmallBatchCost(0.0494, 0.6, 0.2536, 0.3695, 0.1217, 0.0175, 0.364, 0.9313, 0.4707, joined=0.7125, flight=48),
    16: SmallBatchCost(0.169, 0.0, 0.0, 0.0, 0.434, 0.0032, 0.131, 0.358, 0.512),
    # estimates, not measured: the loop over items takes as many issue slots as with 2 (machine code of a row tile of
    # 16 x 128 k: 103, 110, 105, 108 instructions with 1 to 4 token tiles, 4 IMMA more for each), half of what DRAM
    # takes, so streaming costs the same. A chunk's 0.434 us is split into what grows with its sums and what does not;
    # 128 KB of X come as for W4A16 on 16 tokens; the workspace grows with the tokens.
    24: SmallBatchCost(0.169, 0.0, 0.0, 0.0, 0.23, 0.01, 0.197, 0.358, 0.512, 0.6),
    32: SmallBatchCost(0.169, 0.0, 0.0, 0.0, 0.23, 0.01, 0.262, 0.358, 0.512, 0.6),
}
_SMALL_BLOCKS = _SMALL_S8 | {8: SmallBatchCost(0.685, 0.0, 0.708, 0.172, 0.124, 0.03, 0.3, 0.2, 0.233)}


@dataclass(frozen=True)
class Costs:
    """Of a form: tiles alone and where their CTAs are pairs, tiles of experts, and small batches by resident rows."""

    tiles: TileCosts
    pairs: TileCosts
    experts: TileCosts
    small_batch: Mapping[int, SmallBatchCost]


COSTS: Mapping[str, Costs] = {
    "f16 fold": Costs(_F16, _F16_PAIRS, _F16, _SMALL_F16),
    "f16 post": Costs(_F16, _F16_PAIRS, _F16, _SMALL_F16),
    "s8 integer": Costs(_S8, _S8_PAIRS, _S8, _SMALL_S8),
    "e4m3 post": Costs(_E4M3, _E4M3, _E4M3_EXPERTS, _SMALL_S8),
    "e4m3 mx": Costs(_MX, _MX, _MX, _SMALL_S8),
    "s8 direct": Costs(*[_direct(0.0, 1.1)] * 3, _SMALL_S8),
    "e4m3 fast": Costs(*[_direct(0.0, 1.1)] * 3, _SMALL_S8),
    "e4m3 promoted": Costs(*[_direct(0.1, 1.5)] * 3, _SMALL_S8),
    "e4m3 block": Costs(*[_direct(0.6, 1.4, tall=True)] * 3, _SMALL_S8),
    "s4_s8 block": Costs(_SCALED_BLOCKS, _SCALED_BLOCKS, _SCALED_BLOCKS, _SMALL_BLOCKS),
    "s4_s8 integer": Costs(_BLOCKS, _BLOCKS, _BLOCKS_EXPERTS, _SMALL_BLOCKS),
}
"""A form of `forms.FORMS` -> what it costs."""
