"""Compile throughput: what is counted, and real kernels on two processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from terrazzo.autotune import throughput
from terrazzo.cli import main
from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.targets import Target

H200 = Target.parse("nvidia/nvidia-h200")


class Sleeping:
    """A pool whose processes take 0.5 s to start and 0.02 s for each kernel."""

    def __init__(self, done, workers):
        self.done, self.todo, self.lock = done, [], threading.Lock()
        self.threads = [threading.Thread(target=self.work) for _ in range(workers)]

    def submit(self, request):
        self.todo.append(request)

    def work(self):
        time.sleep(0.5)
        while True:
            with self.lock:
                if not self.todo:
                    return
                request = self.todo.pop()
            time.sleep(0.02)
            failed = isinstance(request, CompileError)
            self.done(request, request if failed else Path(os.environ["TERRAZZO_CACHE_DIR"]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return


def begin(pool):
    """A pool that starts when its first round is submitted."""

    class Begun(pool):
        def submit(self, request):
            super().submit(request)
            if len(self.todo) == self.expected:
                for thread in self.threads:
                    thread.start()

    return Begun


@pytest.mark.parametrize("workers", [1, 4])
def test_start_up_does_not_count(workers, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", "before")
    pool = begin(Sleeping)
    pool.expected = 5 * workers
    found = throughput.measure(workers, list(range(100)), pool, rounds=5)
    assert found.kernels == 4 * workers and 0.05 < found.seconds < 0.5
    assert os.environ["TERRAZZO_CACHE_DIR"] == "before"
    pool.expected = 2
    with pytest.raises(CompileError, match="nvcc"):
        throughput.measure(1, [CompileError("nvcc said no")] * 2, pool, rounds=2)


def test_the_kernels_differ():
    wanted = throughput.requests(64, H200)
    assert len({request.identity() for request in wanted}) == 64


def test_the_command_prints_a_line_for_each_number(monkeypatch, capsys):
    asked = []

    def measured(workers, wanted):
        asked.append((workers, len(wanted)))
        return throughput.Rate(workers, 3 * workers, 10.0)

    monkeypatch.setattr(throughput, "measure", measured)
    assert main(["tune", "throughput", "--workers", "1,2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "0.60 kernels/s, 100% of 1-process" in said[1]
    assert asked == [(1, 2 * throughput.ROUNDS), (2, 2 * throughput.ROUNDS)]
