"""Memory that outlives the call which makes it: workspaces, semaphores, vectors kept with their owners.

A pool that torch fills for the calling thread (`torch.cuda.use_mem_pool`, and what `torch.compile` does before it
captures a graph, mode="reduce-overhead") belongs to whoever set it up and is freed or used again with it. PyTorch sends
there what that thread allocates, so what must last is allocated by another one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from terrazzo.lowering.capture import capturing

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")


def lasting(device: torch.device, make: Callable[[], Made]) -> Made:
    """What `make` returns, in memory of the device's common pool, and not as inference tensors.

    `make` runs on the current stream of the device. In a capture it allocates from the graph's pool as anything else
    does: what may be kept then is the caller's concern (`launching.may_keep`).
    """
    import torch

    def run() -> Made:
        with torch.inference_mode(False), torch.no_grad():
            return make()

    if device.type != "cuda" or capturing(device):
        return run()
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index)

    def run_there() -> Made:
        with torch.cuda.device(index), torch.cuda.stream(stream):
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run_there).result()
