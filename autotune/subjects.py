"""What a measuring process knows of a problem: its data on the GPU, one launch of it, and what the output must be.

An operator's `Subject` is all that tuning needs besides its search space: copies of what a launch streams, the inputs
of one size, an oracle, and a comparison.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from terrazzo.autotune import gemm_bench, measure

if TYPE_CHECKING:
    import torch
    from terrazzo.autotune.gemm_bench import Shape
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.ops.weight.base import AnyPacked as Packed


Given, Copy, Expected = TypeVar("Given"), TypeVar("Copy"), TypeVar("Expected")


class Subject(ABC, Generic[Given, Copy, Expected]):
    """The data of one weight or cache on the GPU. Every launch takes the schedule of `records.forced`."""

    @abstractmethod
    def inputs(self, m: int) -> Given:
        """What launches of size m are given, made once."""

    @abstractmethod
    def copies(self, m: int) -> Sequence[Copy]:
        """Copies of what a launch of size m streams, together beyond the L2 cache."""

    @abstractmethod
    def output(self, m: int) -> torch.Tensor:
        """A poisoned output."""

    @abstractmethod
    def launch(self, given: Given, copy: Copy, out: torch.Tensor) -> None:
        """One call of the operator on the current stream."""

    @abstractmethod
    def expected(self, given: Given, m: int) -> Expected:
        """What the forced schedule must compute, in float64, and its error bound."""

    @abstractmethod
    def wrong(self, out: torch.Tensor, expected: Expected) -> str:
        """What is wrong with an output, or ""."""

    def kind(self, m: int) -> str:
        """What of the forced schedule changes `expected`: the numerics of its program."""
        return ""

    def peer(self, given: Given) -> tuple[str, Sequence[Callable[[], object]]] | None:
        """Another implementation of the same problem: its name, and a call for each copy of its data."""
        return None

    def drop(self) -> None:
        """Let go of the data."""
        self.__dict__.clear()


class Gemm(Subject[tuple["torch.Tensor", Callable], "Packed", tuple]):
    """A weight of `gemm_bench.Shape`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def inputs(self, m: int) -> tuple[torch.Tensor, Callable]:
        x = self.shape.tokens(m)
        return x, self.shape.calls(x)[gemm_bench.OURS]

    def copies(self, m: int) -> Sequence[Packed]:
        return self.shape.packed

    def output(self, m: int) -> torch.Tensor:
        return measure.poisoned((m, self.shape.n), self.shape.dtype, gemm_bench.DEVICE)

    def launch(self, given: tuple[torch.Tensor, Callable], copy: Packed, out: torch.Tensor) -> None:
        given[1](copy, out)

    def _requests(self, m: int) -> Sequence[KernelRequest]:
        shape = self.shape
        return shape.requests(shape.n, shape.k, m, shape.settings, shape.target)

    def kind(self, m: int) -> str:
        return next((str(value) for key, value in self._requests(m)[0].params if key == "numerics"), "")

    def expected(self, given: tuple[torch.Tensor, Callable], m: int) -> tuple:
        return self.shape.expected(given[0], self._requests(m))[:3]

    def wrong(self, out: torch.Tensor, expected: tuple) -> str:
        return gemm_bench.wrong(out, *expected)

    def peer(self, given: tuple[torch.Tensor, Callable]) -> tuple[str, Sequence[Callable[[], object]]] | None:
        peer, loaded = self.shape.peers[gemm_bench.Cublas.name]
        return peer.name, [gemm_bench.peer_call(peer, given[0], copy) for copy in loaded]

    def drop(self) -> None:
        self.shape.drop()
        super().drop()
