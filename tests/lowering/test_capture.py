"""Whether a graph is being captured is asked of the device on which a kernel would run, not of the current one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import CaptureError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching


@pytest.fixture
def two_devices(monkeypatch):
    """Two CUDA devices as torch would report them: what is current, and on which one's current stream is captured."""
    state = {"current": 0, "captured": 1}

    @contextmanager
    def device(to):
        before, state["current"] = state["current"], torch.device(to).index
        yield
        state["current"] = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["current"] == state["captured"])
    return state


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("captured", [0, 1])
def test_the_device_is_asked(two_devices, current, captured):
    two_devices |= {"current": current, "captured": captured}
    for index in (0, 1):
        assert capturing(torch.device("cuda", index)) == (index == captured)
        assert launching.may_keep(torch.device("cuda", index)) == (index != captured)
    assert capturing(torch.device("cuda")) == (current == captured)
    assert two_devices["current"] == current


def test_a_cold_kernel_is_refused_where_it_would_be_captured(two_devices, monkeypatch):
    """Warm on one device is cold on another."""

    class Kernel:
        def warm_on(self, device):
            return device.index == 0

    monkeypatch.setattr("terrazzo.lowering.kernels.get_kernel", lambda request: Kernel())
    request = KernelRequest("a kernel", "module:build", (), Target.parse("sm_90a"))
    launching.warm_kernel(request, 1, "gemm", torch.device("cuda", 0))
    with pytest.raises(CaptureError, match="a kernel for M = 1 was never launched"):
        launching.warm_kernel(request, 1, "gemm", torch.device("cuda", 1))
    two_devices["captured"] = 0
    launching.warm_kernel(request, 1, "gemm", torch.device("cuda", 1))
