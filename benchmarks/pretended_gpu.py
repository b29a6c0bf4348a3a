"""Lets a machine without a GPU compile what another machine's GPU will launch.

    python -m benchmarks.compile_ahead --gpu nvidia/nvidia-h200 attention     the kernels of a benchmark
    pytest tests/gpu --compile-only --gpu nvidia/nvidia-h200                  those of the GPU tests

The kernel cache is then copied to that machine, where they are found if its toolkit and packages are of the same
versions. Everything that a plan asks of the current GPU is answered from the named target; tensors stay on the CPU, so
nothing can be launched.
"""

from __future__ import annotations

from typing import Any

import torch
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from torch.overrides import TorchFunctionMode

_CUDA = torch.device("cuda", 0)  # made before `_OnCpu` is there


class _OnCpu(TorchFunctionMode):
    """What would be made on, or moved to, a CUDA device stays on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        named = {name: _here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_here, args), **named)


def _here(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def pretend(name: str) -> Target:
    """From now on this process takes the GPU of a target name ("nvidia/nvidia-h200") for the current one, to compile.

    Raises:
        TargetError: no such target.
    """
    target = Target.parse(name)
    cuda = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": target.name,
        "get_device_capability": divmod(int(target.arch.removeprefix("sm_").rstrip("a")), 10), "_lazy_init": None,
    }  # fmt: skip
    for asked, answer in cuda.items():
        setattr(torch.cuda, asked, lambda *args, _answer=answer, **options: _answer)
    Target.detect = classmethod(lambda cls, *args: target)
    placed = launching.targets
    launching.targets = lambda packed_for, device, argument="w": placed(packed_for, _CUDA, argument)
    _OnCpu().__enter__()
    return target
