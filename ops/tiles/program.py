"""What the tile programs agree on: pass options, and the registers and limits of tiles on wgmma."""

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, TypeVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles.types import Scalar

if TYPE_CHECKING:
    from terrazzo.schedules.stream_k import StreamK

OWN_BARRIERS = (  # placed by hand: the automatic ones stand around every access by a primitive
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
OWN_BARRIERS_AND_BOUNDS = (("tl.disable_safe_memory_legalize", True), *OWN_BARRIERS)
REGISTERS = {
    (1, 1): (40, 240), (2, 1): (40, 232), (3, 1): (40, 152), (4, 1): (32, 112), (1, 2): (40, 208), (2, 2): (32, 104)
}  # fmt: skip
"""(Warpgroups that multiply, beside one of producers; CTAs on an SM) -> registers of a producer's thread, of theirs."""

_T = TypeVar("_T")


def take(kind: Callable[..., _T], params: dict[str, Scalar]) -> _T:
    """What `kind` makes of those of a builder's parameters that are its own; they leave `params`."""
    return kind(**{name: params.pop(name) for name in signature(kind).parameters if name in params})


def check_tile(schedule: "StreamK") -> None:
    """Raise ArgumentError for a tile on wgmma with more sums than registers, or with a ring of one stage."""
    if not schedule.legal():
        warpgroups = f"{schedule.warpgroups} warpgroups of {schedule.row_blocks} row blocks"
        raise ArgumentError(
            "block_tokens", schedule.block_tokens, f"is too wide for {warpgroups} (registers)", "take fewer of them"
        )
    if schedule.stages < 2:
        raise ArgumentError("stages", schedule.stages, "must be at least 2", "take a smaller tile")
