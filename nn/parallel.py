"""Tensor parallelism: the ranks that share a model's layers, and what they tell each other.

A layer's first products (q, k and v; gate and up) are cut along output features, its last ones (o, down) along input
features: two sums over ranks a layer. torch.distributed does them, NCCL inside of captured steps, gloo on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import shards
from terrazzo.ops.shards import Share
from torch import distributed, nn

if TYPE_CHECKING:
    from terrazzo.nn.architectures import Shape


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """One of the ranks that hold a model together.

    Attributes:
        rank, world: which of how many. group: of torch.distributed, None for the default one.

    Raises:
        ArgumentError: no rank, or not the ranks of the group.
    """

    rank: int
    world: int
    group: distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        shards.check_rank(self.rank, self.world)
        if distributed.is_available() and distributed.is_initialized():
            own = distributed.get_rank(self.group), distributed.get_world_size(self.group)
            if own != (self.rank, self.world):
                constraint = f"must be rank and size of the process group, {own}"
                remedy = "pass (torch.distributed.get_rank(), torch.distributed.get_world_size())"
                raise ArgumentError("tensor_parallel", (self.rank, self.world), constraint, remedy)

    @staticmethod
    def of(given: tuple[int, int] | TensorParallel | None) -> TensorParallel | None:
        """Of what `load` takes: None, (rank, world) or a TensorParallel; None for a single rank."""
        if given is None:
            return None
        if isinstance(given, tuple | list) and len(given) == 2:
            given = TensorParallel(*given)
        if not isinstance(given, TensorParallel):
            constraint = "must be (rank, world) or a TensorParallel"
            raise ArgumentError("tensor_parallel", given, constraint, "pass (0, 2) on the first of two ranks")
        return given if given.world > 1 else None

    @staticmethod
    def from_torchrun() -> TensorParallel | None:
        """The ranks that torchrun started, None for one process.

        Begins the default process group where there is none: NCCL, with the GPU of this process as the current device,
        or gloo without a GPU. Later `torch.distributed.destroy_process_group` is the caller's.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return None
        device = None
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not distributed.is_initialized():
            distributed.init_process_group("gloo" if device is None else "nccl", device_id=device)
        return TensorParallel(distributed.get_rank(), distributed.get_world_size())

    def rows(self, unit: int = 1, replicate: bool = False) -> Share:
        """What this rank keeps of output features; see `shards.Part`."""
        return Share(self.rank, self.world, 0, unit, replicate)

    def columns(self) -> Share:
        """What this rank keeps of input features."""
        return Share(self.rank, self.world, 1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x, of any shape [...] and a float dtype, in which the sum over all ranks stands."""
        self._begun()
        distributed.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., world * n] of every rank's x [..., n], in the order of ranks."""
        self._begun()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        found = rows.new_empty(self.world * len(rows), rows.shape[1])
        distributed.all_gather_into_tensor(found, rows, group=self.group)
        found = found.view(self.world, len(rows), -1).transpose(0, 1)
        return found.reshape(*x.shape[:-1], self.world * x.shape[-1])

    def agreed(self, number: int, device: torch.device) -> int:
        """Rank 0's number, on all ranks; device: where it travels."""
        self._begun()
        held = torch.tensor([number], dtype=torch.int64, device=device)
        distributed.broadcast(held, group=self.group, group_src=0)
        return int(held)

    def _begun(self) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            constraint = "needs a process group, and torch.distributed has none"
            remedy = "nn.TensorParallel.from_torchrun(), or torch.distributed.init_process_group, before load"
            raise ArgumentError("tensor_parallel", (self.rank, self.world), constraint, remedy)


def local_shape(shape: Shape, ranks: TensorParallel | None) -> Shape:
    """Sizes of a rank's own heads and feed-forward features.

    Raises:
        ArgumentError: naming `tensor_parallel`, where heads or features cannot be shared by so many ranks.
    """
    if ranks is None:
        return shape
    named = {
        "heads": (shape.heads, ranks.rows()),
        "kv_heads": (shape.kv_heads, ranks.rows(replicate=True)),
        "intermediate": (shape.intermediate, ranks.rows()),
    }
    found = {}
    for name, (size, share) in named.items():
        try:
            found[name] = share.size(size)
        except ArgumentError as error:
            constraint = f"{ranks.world} ranks cannot share the model's {name}, {size}: {error.constraint}"
            raise ArgumentError("tensor_parallel", (ranks.rank, ranks.world), constraint, error.remedy) from None
    return replace(shape, **found)


def shared_heads(scales: torch.Tensor | None, kv_heads: int, ranks: TensorParallel | None) -> torch.Tensor | None:
    """Static scales [layers, kv_heads or 1, D or 1] of a rank's own heads."""
    if scales is None or ranks is None or scales.shape[1] == 1:
        return scales
    return ranks.rows(replicate=True).cut(kv_heads, 1).of(scales)


class SharedHead(nn.Module):
    """Logits of all tokens, of a head whose rows ranks share.

    Args:
        part: the head of this rank's vocabulary. ranks: as many, each with as much.
    """

    def __init__(self, part: nn.Module, ranks: TensorParallel) -> None:
        super().__init__()
        self.part, self.ranks = part, ranks

    @property
    def in_features(self) -> int:
        return self.part.in_features

    @property
    def out_features(self) -> int:
        return self.ranks.world * self.part.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., vocabulary] of x [..., hidden]."""
        return self.ranks.all_gather(self.part(x))
