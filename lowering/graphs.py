"""CUDA graphs in a process of several threads: captured one at a time, and none is replayed or destroyed meanwhile.

torch's captures share what is no thread's own: one stream, the graphs that random numbers are registered with, and
calls that a capture in "global" mode forbids all threads. So a capture has a lock, a stream that nobody else is given,
and the mode "thread_local".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from terrazzo.lowering import driver

if TYPE_CHECKING:
    import torch

lock = threading.Lock()
"""Held while a graph is captured, launched or destroyed, a kernel is loaded, or torch's own generator is drawn from:
before torch 2.13 a draw during a capture of another thread is an error."""
standing: dict[int, int] = {}
"""Handle of the stream of a capture -> that of the stream on which the graph will run, whose workspaces it takes."""
_streams: dict[int, torch.cuda.Stream] = {}
_dropped: list[Any] = []  # graphs that nobody holds any more


def current_stream(index: int) -> int:
    """Handle of the stream of a CUDA device whose workspaces and counters launches of now take."""
    import torch

    handle = torch._C._cuda_getCurrentRawStream(index)
    return standing.get(handle, handle)


class Graph:
    """What `run` launches on a device, captured; whoever runs it does so on the stream that was current then.

    Args:
        run: launches kernels that were launched on this stream before; what it returns is `made`. device: with index.
    """

    def __init__(self, run: Callable[[], Any], device: torch.device) -> None:
        import torch

        self.stream = current_stream(device.index)
        with lock, torch.cuda.device(device):
            _dropped.clear()
            self._graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device)
            standing[stream.cuda_stream] = self.stream
            try:
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    self.made = run()
            finally:
                standing.clear()

    def replay(self) -> None:
        """Launch it once more, on the stream for which it was captured."""
        with lock:
            self._graph.replay()
            if _dropped:
                _dropped.clear()

    def __del__(self, lock: threading.Lock = lock, dropped: list[Any] = _dropped) -> None:
        graph = self.__dict__.pop("_graph", None)
        if graph is None:
            return
        dropped.append(graph)
        del graph
        if lock.acquire(blocking=False):  # else whoever holds it, this thread perhaps, drops the graph later
            try:
                dropped.clear()
            finally:
                lock.release()


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for captures alone: those that torch gives are of 32, in turn, and may be another thread's, too."""
    import torch

    if device.index not in _streams:
        handle = ctypes.c_void_p()
        torch.cuda.current_stream(device).synchronize()  # so that the device's context is this thread's
        status = driver.open_driver().cuStreamCreate(ctypes.byref(handle), 1)  # CU_STREAM_NON_BLOCKING
        if status:
            raise OSError(f"the CUDA driver makes no stream: error {status}")
        _streams[device.index] = torch.cuda.ExternalStream(handle.value, device=device)
    return _streams[device.index]
