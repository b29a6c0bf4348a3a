"""What is made of a caller's tensors and kept with them: gains in float32, a bias in another dtype, checks passed.

A captured CUDA graph holds the address of what it read, so nothing kept here is freed before its owner, and what is
made anew, after a write to the owner, takes the memory of the one before. Writes that PyTorch counts are seen at the
next call; `forget` tells of others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import launching, weights
from terrazzo.ops.lasting import lasting

if TYPE_CHECKING:
    import torch

_NAME = "_terrazzo_derived"
_TOLD = "_terrazzo_told"  # of a tensor: how often it was forgotten
_NOTES = ("_terrazzo", "_terrazzo_checked")  # of words: that their weight was checked
_keeping = threading.Lock()
_MOST = 8
"""Tensors of one owner; further ones, of vectors that are new in every call, are made each time."""


class _Kept(dict):
    """key -> `_Entry`. A copy or a pickle of the owner has an empty dict instead."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return OrderedDict, ()  # which torch.load takes with weights_only=True, too


@dataclass
class _Entry:
    """made: when the owner was in `state`, on `stream`, where `event` was recorded after it; None once it has ended.
    beside: what must live as long."""

    state: tuple
    made: torch.Tensor
    beside: tuple
    stream: int
    event: torch.cuda.Event | None


def find(owner: Any, key: tuple, state: tuple) -> torch.Tensor | None:
    """What was kept with `owner` under `key`, if the state is that of then."""
    kept = getattr(owner, _NAME, None)
    found = kept.get(key) if kept else None
    if found is None or found.state != state:
        return None
    if found.event is not None and launching.may_keep(found.made.device):
        import torch

        if found.event.query():
            found.event = None
        elif launching.current_stream(found.made) != found.stream:
            found.event.wait(torch.cuda.current_stream(found.made.device))
    return found.made


def keep(owner: Any, key: tuple, state: tuple, make: Callable[[], torch.Tensor], beside: tuple = ()) -> torch.Tensor:
    """What `make` returns, kept with `owner`; in a capture it has no value yet, and is not kept.

    Kernels read it before the one ahead of them on the stream has ended (programmatic dependent launch), so a tiny
    kernel stands after its last writer.

    Args:
        state: what changes when the owner does. beside: objects whose ids are part of the key or of the state.
    """
    import torch

    with _keeping, torch.inference_mode(False), torch.no_grad():
        if (found := find(owner, key, state)) is not None:  # another thread was here
            return found
        made = lasting(owner.device, lambda: make().clone())
        made.new_zeros(1)
        kept = owner.__dict__.get(_NAME)
        if not isinstance(kept, _Kept):
            kept = _Kept()
        before = kept.get(key)
        if not launching.may_keep(made.device) or (before is None and len(kept) >= _MOST):
            return made
        if before is not None:
            old = before.made
            if (old.shape, old.dtype, old.device) == (made.shape, made.dtype, made.device):
                made = old.copy_(made)
                made.new_zeros(1)
            else:
                beside = (*beside, before)  # a captured graph may read it
        event = None
        if made.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(made.device))
        kept[key] = _Entry(state, made, beside, launching.current_stream(made), event)
        owner.__dict__[_NAME] = kept
        return made


def state_of(t: torch.Tensor | None) -> tuple | None:
    """What changes when a tensor is another one, has other memory, was written to as PyTorch counts, or forgotten."""
    if not hasattr(t, "data_ptr"):  # None, or what is refused later
        return None
    return id(t), t.data_ptr(), t.numel(), t.get_device(), launching.writes(t), getattr(t, _TOLD, 0)


def cast_once(owner: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The owner's tensor `name` in another dtype, kept with the owner until PyTorch writes to the tensor."""
    tensor = getattr(owner, name)
    if tensor.dtype == dtype:
        return tensor
    key, state = (name, dtype), state_of(tensor)
    found = find(owner, key, state)
    return keep(owner, key, state, lambda: tensor.to(dtype), (tensor,)) if found is None else found


def forget(*written: Any) -> None:
    """Tell Terrazzo of writes that PyTorch does not count: through `.data`, to inference tensors, by other libraries.

    Gains, smooth vectors and biases are kept in the dtype that kernels read, and weights are checked once, until
    PyTorch counts a write to them. After this call the next one that takes them reads them anew, and graphs captured
    before see what it read.

    Args:
        written: tensors, and weights of any kind.

    Raises:
        ArgumentError: something else.
    """
    import torch

    for it in written:
        weight = getattr(it, "stacked", it)
        if isinstance(it, torch.Tensor):
            tensors = [it]
        elif is_dataclass(weight) and weights.kind(weight).endswith("Weight"):
            tensors = list(weights.tensor_fields(weight).values())
        else:
            seen, constraint = weights.kind(it), "must be a tensor or a weight"
            raise ArgumentError("written", seen, constraint, "pass what was written to")
        for tensor in tensors:
            setattr(tensor, _TOLD, getattr(tensor, _TOLD, 0) + 1)
            for note in _NOTES:
                tensor.__dict__.pop(note, None)
