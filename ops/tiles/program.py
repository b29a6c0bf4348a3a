"""What the tile programs agree on: pass options, and the registers and limits of tiles on wgmma."""

from typing import Any

from terrazzo.lowering.errors import ArgumentError

OWN_BARRIERS = (  # placed by hand: the automatic ones stand around every access by a primitive
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
OWN_BARRIERS_AND_BOUNDS = (("tl.disable_safe_memory_legalize", True), *OWN_BARRIERS)
REGISTERS = {
    (1, 1): (40, 240), (2, 1): (40, 232), (3, 1): (40, 152), (4, 1): (32, 112), (1, 2): (40, 208), (2, 2): (32, 104)
}  # fmt: skip
"""(Warpgroups that multiply, beside one of producers; CTAs on an SM) -> registers of a producer's thread, of theirs."""


def check_tile(schedule: Any) -> None:
    """Refuse a tile on wgmma that no kernel can be compiled for.

    Args:
        schedule: with block_tokens, warpgroups, stages, legal(), and row_blocks where a warpgroup may have several.

    Raises:
        ArgumentError: more sums than registers, or a ring of one stage.
    """
    if not schedule.legal():
        warpgroups = f"{schedule.warpgroups} warpgroups"
        if hasattr(schedule, "row_blocks"):
            warpgroups += f" of {schedule.row_blocks} row blocks"
        raise ArgumentError(
            "block_tokens", schedule.block_tokens, f"is too wide for {warpgroups} (registers)", "take fewer of them"
        )
    if schedule.stages < 2:
        raise ArgumentError("stages", schedule.stages, "must be at least 2", "take a smaller tile")
