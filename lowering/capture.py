"""Whether a CUDA graph is being captured where a kernel would be launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream of `device`.

    Kernels run where their tensors are; torch's own question is about the current device, which may be another one.
    """
    import torch

    elsewhere = device.type == "cuda" and device.index is not None and torch.cuda.is_initialized()
    if elsewhere and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()
