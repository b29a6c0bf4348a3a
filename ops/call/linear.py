"""y = x w^T of packed weights of every kind: the public calls' arguments, what is kept ready, and the launch.

A warm call is `Linear.gemm`: what an equal call has passed before is not checked again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import derived, dlpack, grouped, launching, weights
from terrazzo.ops.call import plans
from terrazzo.schedules import records

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.grouped import GroupedWeight
    from terrazzo.ops.launching import Plan

Choices = str | tuple[str, ...] | None
"""What a caller may choose of a kind's numerics and programs."""


class Linear(ABC):
    """The calls of one kind of weight and activations.

    Attributes:
        operator: what errors call it. families: the operators whose weights it takes. packed: their classes.
        quantized: classes of activations that it multiplies besides 16-bit ones. plane: the codes of these. given: what
            errors call them.
        scales: the tensor of a weight that kernels read early, as they do its words.
        usual: the choices of a caller who makes none.
    """

    operator: str
    families: str
    packed: type | tuple[type, ...]
    quantized: tuple[type, ...] = ()
    plane = "q"
    given = ""
    scales = "channel_scales"
    usual: Choices = "auto"

    def __init__(self) -> None:
        self.wide = not self.quantized  # whether kernels read 16-bit activations
        self.launches = launching.LaunchTable(self.facts, self.check_weight)
        self.of_experts: dict[tuple, tuple] = {}  # what is ready to launch for stacks of weights
        records.on_change(self.launches.clear)
        records.on_change(self.of_experts.clear)

    @abstractmethod
    def facts(self, w: Any) -> tuple:
        """What a kernel must know of a weight."""

    @abstractmethod
    def product(self, w: Any, key: tuple, experts: int) -> plans.Facts:
        """What plans are made of; `key` is what a launch is kept under. experts: 0 for a weight alone."""

    @abstractmethod
    def check_choices(self, w: Any, out_dtype: str, choices: Choices) -> None:
        """Raise ArgumentError for what no kernel of a weight serves."""

    @abstractmethod
    def node(
        self, x: Any, w: Any, bias: torch.Tensor | None, out_dtype: torch.dtype | None, choices: Choices,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`gemm` as one node of a graph (two, if x must be quantized first). offsets: of experts, whose stacked weight
        w is. out_dtype: None takes x's dtype, or float16."""

    def quantize(self, x: torch.Tensor, w: Any, alone: bool) -> Any:
        """x as kernels multiply it. alone: not for experts, whose activations are kept by nobody."""
        return x

    def check_activations(self, x: Any, w: Any) -> None:
        """Raise ArgumentError unless a caller's quantized activations are such as a weight multiplies."""
        launching.check_no_grad(getattr(x, self.plane), "gemm")

    def operands(self, x: Any, words: torch.Tensor, scales: torch.Tensor | None, more: Any) -> tuple:
        """Arguments of a launch up to the bias, the codes first; `more` is what `stand_ins` gave."""
        return x, words, scales

    def stand_ins(self, x: Any, w: Any, plan: Plan, target: Target, device: Target, m: int) -> tuple[tuple, Any]:
        """(arguments between bias and workspace, stand-ins for what a kernel does not read or None)."""
        return (), None

    def sums_dtype(self, w: Any) -> str:
        """Of the sums in a workspace."""
        return "float32"

    def step(self, plan: Plan, m: int) -> int:
        """Tokens that one launch takes."""
        return m

    def part(self, x: Any, part: slice) -> Any:
        """Some rows of activations, of kinds whose `step` may be less than M."""
        return x[part]

    def check_weight(self, w: Any) -> None:
        """Of a weight that is new or was written to."""
        w.check_layout(w.expected_layout())
        w.check_sizes()

    def check_tensors(self, x: Any) -> None:
        """Raise ArgumentError unless the tensors of quantized activations are what their description says."""
        x.check()

    def _check_options(
        self, w: Any, out_dtype: torch.dtype, choices: Choices, bias: torch.Tensor | None = None
    ) -> None:
        """What a call is asked that needs no look at tensors."""
        import torch

        if type(out_dtype) is not torch.dtype:
            raise ArgumentError("out_dtype", out_dtype, "must be a torch.dtype", "write torch.float16")
        self.check_choices(w, str(out_dtype).removeprefix("torch."), choices)
        if bias is not None:
            launching.check_sums_bias(out_dtype)

    def gemm(
        self,
        x: Any,
        w: Any,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        choices: Choices,
        inside: bool = False,
    ) -> torch.Tensor:
        """y[..., N] = x[..., K] w[N, K]^T + bias: launched, or a node of a graph that is traced.

        What is ready to launch is kept by M, device, stream, dtype of y, choices, and what there is of bias and zeros.

        Args:
            inside: whether a node calls, whose tensors torch has dispatched.
        """
        import torch

        if not isinstance(w, self.packed):
            raise launching.not_packed(w, self.families)
        held = getattr(x, self.plane) if isinstance(x, self.quantized) else x
        if not inside and (
            torch.compiler.is_compiling()
            or type(held) is not torch.Tensor
            or held.layout is not torch.strided
            or held.is_nested
        ):
            if dlpack.is_foreign(held):
                return dlpack.call(self.gemm, locals())
            launching.check_tensor(held, "x", "[..., {}]" + self.given, w.k)
            if launching.is_traced(held):
                return self._traced(x, held, w, bias, out, out_dtype, choices)
        shape, n, k, wide = x.shape, w.n, w.k, self.wide
        if not shape or shape[-1] != k:
            launching.check_last(x, k)
        if held is not x:
            self.check_activations(x, w)
            out_dtype = out_dtype or torch.float16
        else:
            if x.requires_grad:
                launching.check_no_grad(x, "gemm")
            out_dtype = out_dtype or x.dtype
            if not wide:
                if bias is not None or out is not None:
                    launching.check_written(x, n, bias, out, out_dtype)
                x = self.quantize(x, w, True)
                held = getattr(x, self.plane)
        flat = len(shape) == 2  # views cost 1.5 us each
        m = shape[0] if flat else held.shape[0] if not wide else x.numel() // k
        if bias is not None:
            launching.check_bias(bias, n, out_dtype if wide else None, held.device)
            if not wide:
                launching.check_sums_bias(out_dtype)
                bias = bias.float()
        elif w.bias is not None and out_dtype != torch.int32:
            bias = derived.cast_once(w, "bias", out_dtype if wide else torch.float32)
        words, scales = w.words, getattr(w, self.scales)
        launches = self.launches.of(w, words, words if scales is None else scales)
        at = launching.place(held)
        key = (m, at, out_dtype, choices, bias is None, wide or getattr(x, "zeros", None) is None)
        try:
            found = launches.get(key)
        except TypeError:  # of a choice that is no string, which is refused
            found = None
        found = found or self.prepare(launches, key, x, held, w)
        if m and words.get_device() != at[0]:
            raise launching.elsewhere(held, w.device)
        if wide and (not flat or k % 8 or w.perm is not None or not x.is_contiguous() or x.data_ptr() % 16):
            held = x = _rows(x, w.perm, k)
        to = (m, n) if flat else (*shape[:-1], n)
        aside = False  # whether the kernel writes somewhere else than to y
        if out is None:
            rows = held.new_empty((m, n), dtype=out_dtype)
            y = rows if flat else rows.view(to)
        else:
            y = out
            rows, aside = launching.output(held, out, to, m, out_dtype, at[0])
        if m == 0:
            return y
        _, _, before, after, no_bias, step, more = found
        operands = (x, words, scales) if wide else self.operands(x, words, scales, more)
        if m <= step:
            args = (*operands, no_bias if bias is None else bias, *before, rows, *after)
            launching.launch(launches, key, found, args)
        else:
            for lo in range(0, m, step):
                part = slice(lo, lo + step)
                operands = self.operands(self.part(x, part), words, scales, more)
                args = (*operands, no_bias if bias is None else bias, *before, rows[part], *after)
                launching.launch(launches, key, found, args)
        return y.copy_(rows.view(to)) if aside else y

    def _traced(
        self,
        x: Any,
        held: torch.Tensor,
        w: Any,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        choices: Choices,
    ) -> torch.Tensor:
        """`gemm` where it becomes a node: nothing looks at memory."""
        import torch

        launching.check_no_grad(held, "gemm")
        if held is x:
            launching.check_last(x, w.k)
        else:
            self.check_activations(x, w)
        out_dtype = out_dtype or (held.dtype if held is x else torch.float16)
        self._check_options(w, out_dtype, choices)
        if bias is not None:
            launching.check_bias(bias, w.n, held.dtype if self.wide else None, held.device)
            launching.check_sums_bias(out_dtype)
        return launching.copy_out(out, self.node(x, w, bias, out_dtype, choices))

    def grouped_gemm(
        self,
        x: Any,
        w: GroupedWeight,
        expert_offsets: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        choices: Choices,
    ) -> torch.Tensor:
        """y[i] = x[i] w[e]^T + bias[e] of the rows i of each expert e: launched, or a node of a graph."""
        import torch

        grouped.check_kind(w, self.packed, self.families)
        s, wide = w.stacked, self.wide
        held = getattr(x, self.plane) if isinstance(x, self.quantized) else x
        if dlpack.is_foreign(held):
            return dlpack.call(self.grouped_gemm, locals())
        launching.check_tensor(held, "x", "[M, {}]" + self.given, w.k)
        asked = out_dtype or (held.dtype if held is x else torch.float16)
        if launching.is_traced(held):
            grouped.check_traced(x, held, w, expert_offsets, bias, held.dtype if wide else None)
            if held is not x:
                self.check_activations(x, s)
            if wide or not torch.compiler.is_compiling():
                self._check_options(s, asked, choices, bias)
            y = self.node(x, s, bias, asked, choices, expert_offsets)
            return grouped.copy_out(out, y, expert_offsets)
        return self.run_experts(x, held, w, expert_offsets, bias, out, asked, choices)

    def check_call(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        w: GroupedWeight,
        expert_offsets: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
        choices: Choices,
    ) -> None:
        """What a call of experts is asked before x [M, K] is quantized."""
        grouped.check_once(w)
        grouped.check_rows(shape, w.k)
        launching.check_tokens(shape[0])
        self._check_options(w.stacked, out_dtype, choices, bias)
        grouped.check_offsets(expert_offsets, len(w), device)
        if bias is not None:
            grouped.check_bias(bias, len(w), w.n, out_dtype if self.wide else None, device)
        if out is not None:
            launching.check_out(out, (shape[0], w.n), out_dtype, device)
            grouped.check_apart(out, expert_offsets=expert_offsets, bias=bias)

    def run_experts(
        self,
        x: Any,
        held: torch.Tensor,
        w: GroupedWeight,
        expert_offsets: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
        choices: Choices,
    ) -> torch.Tensor:
        """The eager path of `grouped_gemm`; `held` is x, or the codes of quantized x."""
        import torch

        s, wide = w.stacked, self.wide
        launching.check_no_grad(held, "grouped_gemm")
        if held is x:
            grouped.check_dtype(x)
        else:
            self.check_activations(x, s)
        self.check_call(x.shape, held.device, w, expert_offsets, bias, out, out_dtype, choices)
        if wide:
            held = x = _rows(x, None, w.k)
        elif held is x:
            x = self.quantize(x, s, False)
            held = getattr(x, self.plane)
        elif held.shape[0] != x.shape[0]:
            self.check_tensors(x)
        m = held.shape[0]
        grouped.check_apart(out, x=held, scales=None if wide else x.scales)
        no_bias = bias is None and (s.bias is None or out_dtype == torch.int32)
        no_zeros = wide or getattr(x, "zeros", None) is None
        key = (len(w), self.facts(s), m, launching.place(held), out_dtype, choices, no_bias, no_zeros)
        found = self.of_experts.get(key) or self.prepare(self.of_experts, key, x, held, s, len(w))
        if not held.is_cuda or held.device != w.device:
            raise launching.elsewhere(held, w.device)
        y = held.new_empty((m, w.n), dtype=out_dtype) if out is None else out
        if m == 0:
            return y
        if bias is None and not no_bias:
            bias = derived.cast_once(s, "bias", out_dtype if wide else torch.float32)
        elif bias is not None and not wide:
            bias = bias.float()
        words, scales = s.words.flatten(0, 1), getattr(s, self.scales).flatten(0, 1)
        _, _, before, after, none, _, more = found
        written = grouped.written_to(y)
        args = (*self.operands(x, words, scales, more), none if bias is None else bias.view(-1), *before, written)
        launching.launch(self.of_experts, key, found, (*args, *after, expert_offsets))
        return y if written is y else y.copy_(written)

    def prepare(self, kept: dict, key: tuple, x: Any, held: torch.Tensor, w: Any, experts: int = 0) -> tuple:
        """Kernel, its launcher, arguments ahead of y and after it, a stand-in for no bias, tokens of a launch, and
        stand-ins for what else is not read; kept."""
        import torch

        m, at, out_dtype, choices = key[-6:-2]  # of both kinds of keys: those of experts have more in front
        self._check_options(w, out_dtype, choices)
        if held is not x:
            self.check_tensors(x)
        elif weights.dtype_name(x) not in ("float16", "bfloat16"):
            raise ArgumentError("x", weights.dtype_name(x), "must be float16 or bfloat16", "cast the activations")
        launching.check_tokens(m)
        if not held.is_cuda or held.device != w.device:
            raise launching.elsewhere(held, w.device)
        if m == 0:
            return ()
        target, device = launching.targets(w.target, held.device)
        plan = plans.plan(m, self.product(w, key, experts), target, device)
        operator = f"{self.name(w)}.{'grouped_gemm' if experts else 'gemm'}"
        kernel, launcher, *spaces, after = launching.prepared(plan, m, held, at, operator, self.sums_dtype(w))
        ahead, more = self.stand_ins(x, w, plan, target, device, m)
        (no_bias,) = launching.stand_ins(held.device, out_dtype if self.wide else torch.float32)
        own = (launching.argument(no_bias), self.step(plan, m), more)
        found = (kernel, launcher, (*ahead, *spaces), after, *own)
        launching.keep(kept, key, found, plan, held.device)
        return found

    def name(self, w: Any) -> str:
        """Of the operator, in errors."""
        return self.operator


@cache
def calls_of(room: str) -> Linear:
    """The calls of a kind: what nodes of graphs are run by, which the calls name in turn."""
    return import_module(f"terrazzo.ops.{room}.entry").CALLS


def _rows(x: torch.Tensor, perm: torch.Tensor | None, k: int) -> torch.Tensor:
    """16-bit activations as kernels read them: [M, K], in a weight's order, padded to vectors of 16 bytes."""
    import torch

    if perm is not None:
        x = x.index_select(-1, perm)
    if k % 8:
        x = torch.nn.functional.pad(x, (0, -k % 8))
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    return launching.aligned_copy(x) if not x.is_contiguous() or x.data_ptr() % 16 else x
