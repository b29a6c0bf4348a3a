"""Calls as opaque nodes of a graph, `torch.ops.terrazzo.<name>_gemm` and `<name>_grouped_gemm`: what torch.compile,
torch.export and fake tensors see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from terrazzo.ops import launching
from terrazzo.ops.call.linear import Choices, calls_of
from terrazzo.ops.grouped import GroupedWeight, check_dtype

if TYPE_CHECKING:
    import torch

TYPES = {
    **dict.fromkeys("n k group_size blocks8 m".split(), "SymInt"),
    **dict.fromkeys("symmetric block asymmetric ue8m0".split(), "bool"),
    "out_dtype": "ScalarType",
    **dict.fromkeys("scale_dtype layout target order codes granularity x_order".split(), "str"),
    **dict.fromkeys("numerics dequantization pipeline accumulate activation".split(), "str"),
    "eps": "float",
    "input_scale": "float?",
    "input_zero": "SymInt",
}
"""Of arguments that are no tensors."""


def register(
    name: str,
    arguments: str,
    run: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    results: str = "Tensor",
) -> tuple[str, ...]:
    """Register an operator of torch; the names of its arguments.

    Args:
        name: "w4a16_gemm". arguments: their names, in order. A question mark stands after a tensor that may be None, an
            exclamation mark after one that is written, "=False" after the last one if it may be left out.
        run, fake: take arguments as a tuple that has their names. results: as torch's schemas write them.
    """
    import torch

    names, typed = [], []
    for at, it in enumerate(arguments.split()):
        argument, _, default = it.partition("=")
        name_of = argument.rstrip("?!")
        kind = {"?": "Tensor?", "!": f"Tensor(a{at}!)"}.get(argument[-1], "Tensor")
        names.append(name_of)
        typed.append(f"{TYPES.get(name_of, kind)} {name_of}" + (f"={default}" if default else ""))
    given = namedtuple(name, names, defaults=[False] * arguments.count("=False"))
    schema = f"({', '.join(typed)}) -> {results}"
    op, written = lambda *values: run(given(*values)), [it[:-1] for it in arguments.split() if it[-1] == "!"]
    made = torch.library.custom_op(f"terrazzo::{name}", op, mutates_args=written, schema=schema)
    made.register_fake(lambda *values: fake(given(*values)))
    return tuple(names)


class Node(ABC):
    """The two operators of torch for a kind of weight and activations. Making one registers them.

    Args:
        name: what they begin with. room: whose calls they run.
        gemm, experts: their arguments, as `register` takes them. A weight's own fields are taken from it, what else
            there is from `values`.
    """

    def __init__(self, name: str, room: str, gemm: str, experts: str) -> None:
        self.name, self.room = name, room
        self.gemm = register(f"{name}_gemm", gemm, self._run, self._fake)
        self.experts = register(f"{name}_grouped_gemm", experts, self._run, self._fake)

    @abstractmethod
    def values(self, x: Any, w: Any, choices: Choices) -> dict[str, Any]:
        """Arguments by name."""

    @abstractmethod
    def weight(self, given: Any) -> Any:
        """The packed weight that arguments are of."""

    @abstractmethod
    def activations(self, given: Any) -> Any:
        """The quantized activations, or x."""

    @abstractmethod
    def choices(self, given: Any) -> Choices:
        """As `Linear.gemm` takes them."""

    @abstractmethod
    def reference(
        self, x: Any, w: Any, bias: torch.Tensor | None, out_dtype: torch.dtype, choices: Choices
    ) -> torch.Tensor:
        """y on a device without kernels."""

    def call(
        self, x: Any, w: Any, bias: torch.Tensor | None, out_dtype: torch.dtype, choices: Choices,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The node. With the offsets of experts, w is their stacked weight."""
        import torch

        if bias is None and w.bias is not None and out_dtype != torch.int32:
            bias = w.bias
        names, prefix = (self.gemm, "") if offsets is None else (self.experts, "grouped_")
        own = self.values(x, w, choices)
        own |= dict(bias=bias, expert_offsets=offsets, out_dtype=out_dtype, target=w.target or "")
        arguments = [own[name] if name in own else getattr(w, name) for name in names]
        y = getattr(torch.ops.terrazzo, f"{self.name}_{prefix}gemm")(*arguments)
        return y if offsets is not None or y.ndim == len(x.shape) else y.view(*x.shape[:-1], w.n)

    def _run(self, given: Any) -> torch.Tensor:
        import torch

        calls, bias, offsets = calls_of(self.room), given.bias, getattr(given, "expert_offsets", None)
        w, x, choices = self.weight(given), self.activations(given), self.choices(given)
        held = x if calls.wide else getattr(x, calls.plane)
        out_dtype = getattr(given, "out_dtype", held.dtype)
        if offsets is None:
            if held.is_cuda:
                return calls.gemm(x, w, bias, None, out_dtype, choices, True)
            return self.reference(x, w, bias, out_dtype, choices)
        stack = GroupedWeight(w)
        if held.is_cuda:
            return calls.run_experts(x, held, stack, offsets, bias, None, out_dtype, choices)
        if calls.wide:
            check_dtype(x)
        calls.check_call(x.shape, held.device, stack, offsets, bias, None, out_dtype, choices)
        some = lambda rows: x[rows] if calls.wide else x.of_tokens(rows)
        product = lambda rows, one, own: self.reference(some(rows), one, own, out_dtype, choices)
        return stack.reference(product, torch.arange(len(held), device=held.device), offsets, bias)

    def _fake(self, given: Any) -> torch.Tensor:
        if calls_of(self.room).wide:
            x = given.x
            launching.check_last(x, given.k)
            return x.new_empty((*x.shape[:-1], given.n))
        held = getattr(given, calls_of(self.room).plane)
        return held.new_empty((getattr(given, "m", held.shape[0]), given.n), dtype=given.out_dtype)
