"""Captures of several threads: one at a time, on a stream of their own, in the mode that forbids others nothing."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from terrazzo.lowering import graphs

DEVICE = torch.device("cuda", 0)
PRIVATE = 7777


class Pretended:
    """torch.cuda as far as captures need it; `busy` counts who is at work on graphs, which must be one at a time."""

    def __init__(self) -> None:
        self.modes, self.streams, self.most, self.busy = [], [], 0, 0
        self.replayed = self.destroyed = 0
        self.current = threading.local()
        outer = self

        class CUDAGraph:
            def replay(self) -> None:
                with outer.work():
                    outer.replayed += 1

            def __del__(self) -> None:
                with outer.work():
                    outer.destroyed += 1

        self.CUDAGraph = CUDAGraph

    @contextmanager
    def work(self):
        self.busy += 1
        self.most = max(self.most, self.busy)
        time.sleep(0.002)
        yield
        self.busy -= 1

    @contextmanager
    def graph(self, graph, stream=None, capture_error_mode="global"):
        self.modes.append(capture_error_mode)
        self.streams.append(stream.cuda_stream)
        before, self.current.stream = self.stream(0), stream.cuda_stream
        with self.work():
            yield
        self.current.stream = before

    def stream(self, index: int) -> int:
        return getattr(self.current, "stream", 0)


@pytest.fixture
def cuda(monkeypatch) -> Pretended:
    made = Pretended()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", made.stream, raising=False)
    monkeypatch.setattr(graphs, "_streams", {0: SimpleNamespace(cuda_stream=PRIVATE)})
    return made


def in_threads(run, count: int = 8) -> None:
    failed = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads), failed


def test_graphs_are_captured_replayed_and_destroyed_one_at_a_time(cuda):
    def request(number: int) -> None:
        for _ in range(3):
            graph = graphs.Graph(lambda: number, DEVICE)
            assert graph.made == number
            for _ in range(3):
                graph.replay()

    in_threads(request)
    gc.collect()
    with graphs.lock:
        graphs._dropped.clear()
    assert cuda.most == 1 and (cuda.replayed, cuda.destroyed) == (72, 24)
    assert set(cuda.modes) == {"thread_local"} and set(cuda.streams) == {PRIVATE}


def test_a_capture_takes_the_workspaces_of_the_stream_that_will_run_it(cuda):
    seen = {}

    def request(number: int) -> None:
        cuda.current.stream = number
        graph = graphs.Graph(lambda: graphs.current_stream(0), DEVICE)
        seen[number] = graph.made, graph.stream, graphs.current_stream(0)

    in_threads(request)
    assert seen == {number: (number,) * 3 for number in range(8)}
    assert not graphs.standing


def test_a_graph_that_dies_in_a_capture_is_destroyed_after_it(cuda):
    first = [graphs.Graph(lambda: None, DEVICE)]

    def run() -> int:
        first.clear()  # as a collection of garbage may
        return cuda.destroyed

    second = graphs.Graph(run, DEVICE)
    assert second.made == 0
    second.replay()
    assert cuda.destroyed == 1


def test_a_capture_that_fails_leaves_the_lock_and_the_streams_as_they_were(cuda):
    with pytest.raises(ValueError, match="no kernel"):
        graphs.Graph(lambda: (_ for _ in ()).throw(ValueError("no kernel")), DEVICE)
    assert not graphs.lock.locked() and not graphs.standing
    gc.collect()
    assert graphs.Graph(lambda: 1, DEVICE).made == 1
