"""What layers ask of the process that they serve in, whatever the engine: settings, the device, kernels in time."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from terrazzo.integrations.engines import attention, kernels, weights
from terrazzo.integrations.engines.settings import Settings
from terrazzo.integrations.engines.weights import Facts, Wanted
from terrazzo.lowering.errors import TargetError
from terrazzo.lowering.kernels import get_kernel
from terrazzo.lowering.targets import Target

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.ops.grouped import GroupedWeight
    from terrazzo.ops.weight.base import AnyPacked as Packed


class Engine(ABC):
    """One process of an engine. A subclass asks the engine itself; it imports torch.

    Args:
        name: of the engine. log: where it says what it says.
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self.name, self.log = name, log
        self._said: set[str] = set()
        self._compiling: dict[Settings, kernels.Compiling] = {}
        self._launched: set[Hashable] = set()
        weights.register_operators()

    @abstractmethod
    def settings(self) -> Settings:
        """Of the engine that is being built."""

    @abstractmethod
    def most_tokens(self) -> int:
        """Of one step: what the scheduler allows, or the largest CUDA graph."""

    @abstractmethod
    def captured(self) -> list[int]:
        """Sizes of the engine's CUDA graphs, ascending."""

    @abstractmethod
    def target(self) -> Target | None:
        """The GPU of this process, None on a CPU.

        Raises:
            TargetError: a GPU that no kernel is for.
        """

    @abstractmethod
    def unserved(self, how: Settings) -> str | None:
        """Why kernels have no device here, None if they have one."""

    def likely(self, wanted: Wanted) -> Wanted:
        """A layer as its weights will say that it is, as far as that is known before."""
        return wanted

    def once(self, level: int, text: str) -> None:
        """Log what concerns many layers alike one time."""
        if text not in self._said:
            self._said.add(text)
            self.log.log(level, "terrazzo: %s", text)

    def compiling(self, how: Settings) -> kernels.Compiling:
        """One for each process; its bundle is loaded."""
        if how not in self._compiling:
            self._compiling[how] = kernels.Compiling(how, self.target(), self.log)
        return self._compiling[how]

    def declined_here(self, how: Settings) -> str | None:
        """Why no layer of this process is taken, None if some are."""
        if (reason := self.unserved(how)) is not None:
            return reason
        try:
            self.target()
        except TargetError as error:
            return str(error)
        return None

    def declined(self, wanted: Wanted, how: Settings) -> str | None:
        """Why a layer is left to the engine's own kernels, None if it is taken."""
        reason = self.declined_here(how) or wanted.refusal(self.target())
        if reason is None and self.target() is not None and not how.strict:  # strict says so itself, as an error
            found = kernels.requests_of(self.likely(wanted), not wanted.zero_points, False, 1, self.target())
            reason = self.uncompiled(how, found)
        return reason

    def uncompiled(self, how: Settings, found: Sequence[KernelRequest]) -> str | None:
        """Why kernels cannot be had, None if they can."""
        self.compiling(how)
        reason = kernels.lacking(found)
        if reason is not None:
            self.once(logging.WARNING, f"layers stay with {self.name}'s own kernels: {reason}")
        return reason

    def ready(
        self, found: Sequence[KernelRequest], how: Settings, key: Hashable, launch: Callable[[int], object]
    ) -> None:
        """Wait until kernels are compiled, and launch those that CUDA graphs will hold once for each key: they are
        loaded, and their memory is there before the engine measures how much is free."""
        self.compiling(how).want(found)
        self.compiling(how).wait(found)
        if key not in self._launched:
            self._launched.add(key)
            for m in {*self.captured(), 1}:
                launch(m)

    def hold(self, layer: torch.nn.Module, names: Sequence[str], packed: Packed, dtype: torch.dtype) -> Facts:
        """Keep a packed weight's tensors under two names of a layer, and have its kernels ready; its facts."""
        import torch

        for name, tensor in zip(names, weights.tensors_of(packed)):
            replace_parameter(layer, name, tensor)
        facts = weights.facts_of(packed)
        if packed.words.is_cuda:
            bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
            own = (str(dtype).removeprefix("torch."), bias is not None, self.most_tokens(), self.target())

            def launch(m: int) -> None:
                x = torch.zeros(m, packed.k, dtype=dtype, device=packed.words.device)
                weights.product(x, *weights.tensors_of(packed), bias, facts)

            found = kernels.requests_of_packed(packed, *own)
            self.ready(found, self.settings(), (facts, dtype, bias is not None, packed.words.device), launch)
        return facts

    def hold_experts(
        self, packed: Sequence[GroupedWeight], how: Settings, gates: Callable[[str], list[KernelRequest]],
        launch: Callable[[int], object], facts: tuple[str, bool, int],
    ) -> None:  # fmt: skip
        """Have the kernels of both products of experts ready.

        Args:
            gates: of an operator, what stands between them. launch: of so many tokens. facts: dtype of activations,
                whether there are biases, experts of a token.
        """
        found, (dtype, bias, top_k) = [], facts
        for grouped in packed:
            own = (dtype, bias, self.most_tokens(), self.target(), len(grouped), top_k)
            found += kernels.requests_of_packed(grouped.stacked, *own) + gates(grouped.stacked._product.record)
        self.ready(found, how, tuple((weights.facts_of(g.stacked), len(g)) for g in packed), launch)

    def hold_attention(self, kind: attention.Kind, how: Settings, sequences: int, device: torch.device) -> None:
        """Wait for the kernels of layers of a kind, load them, and launch those that CUDA graphs will hold."""
        if (kind, device) in self._launched:
            return
        self._launched.add((kind, device))
        found = kind.requests(self.target())
        self.compiling(how).want(found)
        self.compiling(how).wait(found)
        for request in found:
            get_kernel(request)
        attention.warm(kind, sequences, device)
        self.log.info("terrazzo: %d attention kernels are ready for %s", len(found), kind.layout.identity)


def replace_parameter(layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A plain parameter in the place of a loader's, under all names that it has."""
    import torch

    old = getattr(layer, name)
    made = torch.nn.Parameter(tensor, requires_grad=False)
    for each in [key for key, value in layer._parameters.items() if value is old] or [name]:
        layer.register_parameter(each, made)
