"""COMET's SM scheduling, simulated: figure 8 on four SMs, and the speedups of figure 14 on an A100.

Needs no GPU. A unit is 128 x 128 outputs by 128 channels; a quarter of the channels is INT8, as in the paper's runs.
Costs come from the A100's datasheet (tensor rates, memory bandwidth), so nothing here is a measurement.
"""

from __future__ import annotations

from terrazzo import Target
from terrazzo.schedules import MODELS, work_items

TILE, UNIT_K, UNIT_BYTES = 128, 128, 2 * 4224
PAPER = {  # figure 14: speedup over W4A8, as the text of section 6.4 states it
    "llama-3-8b": {"naive": 1.31, "remap": 1.56, "decompose": 1.71},
    "llama-3-70b": {"naive": 1.18, "remap": 1.60, "decompose": 1.67},
}


def plans(items: list, sms: int, costs: dict) -> list[work_items.Plan]:
    return [
        work_items.naive(items, sms),
        work_items.barrier_minimal(items, sms),
        work_items.remap(items, sms, costs),
        work_items.decompose(items, sms, costs),
    ]


def figure_8() -> None:
    """Alternating INT8 (cost 2) and INT4 (cost 1) tiles; the paper draws 18, a 256 x 256 x 384 GEMM has 12."""
    costs = {8: 0.25, 4: 0.125}  # of an eighth of a tile
    print("Figure 8, four SMs: makespan in INT4 tiles")
    for count in (18, 12):
        items = [work_items.WorkItem(tile, 0, 8, (8, 4)[tile % 2]) for tile in range(count)]
        found = {p.name: work_items.simulate(p, costs).makespan for p in plans(items, 4, costs)}
        print(f"  {count} tiles  " + "  ".join(f"{name} {span:g}" for name, span in found.items()))


def speedups(n: int, k: int, m: int, target: Target) -> dict[str, float]:
    """Of one layer over the same GEMM with all activations in 8 bits; "w4a4" is the oracle with none."""
    blocks = -(-k // UNIT_K)
    token_blocks = -(-m // TILE)
    tiles = -(-n // TILE) * token_blocks
    tokens = min(TILE, -(-m // 8) * 8)
    costs = work_items.block_costs(
        target, rows=TILE, tokens=tokens, unit_k=UNIT_K, unit_bytes=UNIT_BYTES, sharing=token_blocks
    )
    high = round(blocks * 0.25)
    mixed = work_items.items_of(tiles, (4,) * (blocks - high) + (8,) * high, longest=blocks // 4)
    spans = {p.name: work_items.simulate(p, costs).makespan for p in plans(mixed, target.sms, costs)}
    whole = {name: work_items.items_of(tiles, (bits,) * blocks) for name, bits in (("w4a8", 8), ("w4a4", 4))}
    base = {name: work_items.decompose(items, target.sms, costs) for name, items in whole.items()}
    base = {name: work_items.simulate(plan, costs).makespan for name, plan in base.items()}
    return {name: base["w4a8"] / span for name, span in (spans | {"w4a4": base["w4a4"]}).items()}


def figure_14(target: Target) -> None:
    """Mean over a model's layers of the speedup over W4A8, for each number of tokens."""
    print(f"Figure 14, {target.name}: speedup over W4A8, simulated")
    for model in PAPER:
        for m in (16, 32, 64, 128, 256):
            layers = [speedups(layer.n, layer.k, m, target) for layer in MODELS[model]]
            mean = {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}
            print(f"  {model:<12} M={m:<4} " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in mean.items()))
        print(f"  {model:<12} paper  " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in PAPER[model].items()))


if __name__ == "__main__":
    figure_8()
    figure_14(Target.parse("sm_80"))
