"""Memory that outlives a call is not allocated by the thread that torch may have given a pool. No GPU."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from terrazzo.ops.lasting import lasting


@pytest.fixture
def given(monkeypatch):
    """What torch.cuda was told: a pretended GPU, where `capturing` may be set."""
    seen = {"capturing": False, "in": []}

    def context(name):
        @contextmanager
        def enter(it):
            seen["in"].append((name, it, threading.get_ident()))
            yield

        return enter

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: seen["capturing"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, context(name))
    return seen


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_another_thread_makes_it_on_the_callers_device_and_stream(given, device, index):
    made = lasting(torch.device(device), lambda: (threading.get_ident(), torch.is_grad_enabled()))
    assert made[0] != threading.get_ident() and not made[1]
    assert given["in"] == [("device", index, made[0]), ("stream", f"stream of {index}", made[0])]


def test_a_capture_keeps_its_own_memory(given):
    given["capturing"] = True
    assert lasting(torch.device("cuda"), threading.get_ident) == threading.get_ident() and not given["in"]


def test_errors_come_back(given):
    with pytest.raises(ZeroDivisionError):
        lasting(torch.device("cuda"), lambda: 1 // 0)


def test_nothing_that_lasts_is_an_inference_tensor():
    with torch.inference_mode():
        made = lasting(torch.device("cpu"), lambda: torch.zeros(2))
    assert not made.is_inference() and made.add_(1).tolist() == [1, 1]
