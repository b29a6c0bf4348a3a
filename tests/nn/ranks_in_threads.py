"""Ranks that are threads of one process, in the place of those of torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from terrazzo.nn import TensorParallel


@dataclass(frozen=True, eq=False)
class Threads(TensorParallel):
    """Ranks that are threads of this process and lay their tensors on one board."""

    board: Any = None

    def _exchanged(self, x: torch.Tensor) -> list[torch.Tensor]:
        held, barrier = self.board
        held[self.rank] = x.clone()
        barrier.wait(60)
        found = list(held)
        barrier.wait(60)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(each.float() for each in self._exchanged(x)))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchanged(x), dim=-1)

    def agreed(self, number: int, device: torch.device) -> int:
        return int(self._exchanged(torch.tensor([number]))[0])


def together(world: int, run: Callable[[Threads], Any]) -> list[Any]:
    """What `run` of each rank gives."""
    board, found, failed = ([None] * world, threading.Barrier(world)), [None] * world, []

    def one(rank: int) -> None:
        try:
            found[rank] = run(Threads(rank, world, board=board))
        except BaseException as error:
            failed.append(error)
            board[1].abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found
