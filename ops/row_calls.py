"""The call path of operators on rows: choice of a kernel, what is ready to launch, checks, vectors that are kept.

An operator's `run` finds in `ready` what an equal call has passed before; a call without an equal goes through `apart`,
which checks it, and `prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, dlpack, launching, quantized, weights
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import torch

DTYPES = ("float16", "bfloat16")
UNFIT = (AttributeError, TypeError, RuntimeError, IndexError, ZeroDivisionError)
"""What making a key of a call raises where its checks refuse it."""
ready: dict[tuple, tuple] = {}
"""What tells two calls apart -> (kernel, launcher, stand-ins)."""


@dataclass(frozen=True)
class Choices:
    """What chooses an operator's kernel besides M and target: fields that its program's `build` takes. An operator adds
    them, and `check`, which raises ArgumentError where no kernel serves them."""

    NAME: ClassVar[str]
    PROGRAM: ClassVar[ModuleType]

    def params(self) -> dict[str, Any]:
        """Arguments of `build`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def schedule(self, m: int, target: Target, device: Target) -> rows.Rows | None:
        """How a program of `target` shares m rows out on a GPU."""
        return None

    def requests(self, m: int | Sequence[int] | None, target: Target | str) -> list[KernelRequest]:
        """The kernels for these numbers of rows, None for any; see an operator's `kernel_requests`."""
        at, device = launching.requested_targets(target)
        self.check()
        tokens = rows.tokens(device) if m is None else launching.tokens_of(m)
        return list(dict.fromkeys(plan(t, self, at, device) for t in tokens))


@lru_cache(maxsize=2048)
def plan(
    m: int, choices: Choices, target: Target, device: Target | None = None, schedule: rows.Rows | None = None
) -> KernelRequest:
    """The kernel for m >= 1 rows.

    Args:
        device: the GPU, where that is newer than `target`. schedule: None for what the operator chooses.
    """
    params, program = choices.params(), choices.PROGRAM
    if "quant" in params:
        quantized.check_codes_on(target, params["quant"])
        params["output"] = params.pop("quant") or "none"
    schedule = schedule or choices.schedule(m, target, device or target)
    params |= {} if schedule is None else schedule.params()
    entry, flags = f"{program.__name__}:build", launching.ptx_flags(target, device)
    return KernelRequest(choices.NAME, entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


def seen(t: torch.Tensor, shape: object = None) -> tuple:
    """What checks look at in a tensor beside x; shape: what they ask of its shape, where that is not the shape."""
    return type(t), t.dtype, t.layout, t.get_device(), t.shape if shape is None else shape


def apart(operator: Callable, call: Any, check: Callable[[Any], None], torch_op: ModuleType) -> Any:
    """What a call returns that is not launched from here: one of other libraries' arrays, in a trace, on a CPU; else
    None.

    Args:
        operator: the public one. call: its arguments by name, x first. check: raises an error for one that does not
            fit. torch_op: its module with `call`, a node of a graph, and `on_cpu`.
    """
    if any(map(dlpack.is_foreign, call)):
        return dlpack.call(operator, call._asdict())
    check(call)
    traced = launching.is_traced(call[0])
    if call[0].is_cuda and not traced:
        return None
    return torch_op.call(call) if traced else torch_op.on_cpu(call)


def beside(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """x for a node that writes to another argument, or a copy where they share memory: torch.compile leaves the
    clone out that `written` is of an x which nobody reads later."""
    start, end = written.data_ptr(), written.data_ptr() + written.nbytes
    return x.clone() if x.data_ptr() < end and start < x.data_ptr() + x.nbytes else x


def launched(op: ModuleType, call: Any) -> tuple:
    """What `run` of an operator's module gives for a call on a GPU that may be new."""
    made = op.run(call)
    if made is None:
        op.check(call)
        made = op.run(call, new=True)
    return made


def prepare(key: tuple, m: int, choices: Choices, x: torch.Tensor, target: str | None, *vectors: torch.dtype) -> tuple:
    """(kernel, its launcher, stand-ins for what is not there: x's rows, codes, a vector of each dtype); in `ready`."""
    import torch

    launching.check_tokens(m)
    at, device = launching.targets(target, x.device, key[0]._fields[0])  # of the operator's Call: how it names x
    kernel = launching.warm_kernel(plan(max(1, m), choices, at, device), m, choices.NAME, x.device)
    rows_, codes, *rest = launching.stand_ins(x.device, x.dtype, torch.int8, *vectors)
    made = map(launching.argument, (rows_.view(1, 1), codes.view(1, 1), *rest))
    found = ready[key] = (kernel, kernel.launcher(x.device.index), *made)
    return found


def check_columns(k: int, name: str = "x") -> None:
    """Raise ArgumentError unless rows of k values are whole vectors that a CTA holds."""
    if type(k) is not int or not 0 < k <= rows.MAX_COLUMNS or k % rows.VECTOR:
        constraint = f"must have rows of a multiple of {rows.VECTOR} values, at most {rows.MAX_COLUMNS}"
        raise ArgumentError(name, k, constraint, "pad rows with zeros, or split them")


def check_choice(name: str, value: Any, known: tuple) -> None:
    """Raise ArgumentError unless a value is one of the known ones."""
    if value not in known:
        raise ArgumentError(name, value, f"must be one of {known}", f"leave {name} out")


def check_rows(x: Any, operator: str, name: str = "x", what: str = "[..., K]") -> None:
    """Raise ArgumentError unless x is a float16 or bfloat16 tensor of rows, without a gradient to keep."""
    launching.check_tensor(x, name, what)
    if x.requires_grad:
        launching.check_no_grad(x, operator, name)
    if weights.dtype_name(x) not in DTYPES:
        raise ArgumentError(name, weights.dtype_name(x), f"must be one of {DTYPES}", "cast the activations")
    if not x.ndim or not x.shape[-1]:
        raise ArgumentError(name, list(x.shape), f"must be {what}", "pass activations")


def check_vector(vector: Any, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ArgumentError unless a vector is a float tensor of this shape on x's device."""
    launching.check_tensor(vector, name, "float {}", list(shape))
    if tuple(vector.shape) != shape or not vector.dtype.is_floating_point or vector.device != device:
        seen = f"{weights.described(vector)} on {vector.device}"
        constraint = f"must be a float tensor {list(shape)} on {device}"
        raise ArgumentError(name, seen, constraint, "pass a value for each channel")


def bucket(m: int, index: int) -> int:
    """The bucket of M on a CUDA device."""
    return rows.bucket(launching.detect(index), m)


def vector(x: torch.Tensor) -> torch.Tensor:
    """x as kernels read vectors: contiguous, at a multiple of 16 bytes."""
    return launching.aligned_copy(x) if not x.is_contiguous() or x.data_ptr() % 16 else x


def kept(owner: torch.Tensor, other: torch.Tensor | None, kind: tuple, make: Callable[[], Any]) -> torch.Tensor:
    """A vector made of `owner` and `other`, kept with `owner` until one of them changes."""
    key, state = (*kind, id(other)), (derived.state_of(owner), derived.state_of(other))
    found = derived.find(owner, key, state)
    return derived.keep(owner, key, state, make, (other,)) if found is None else found


def inverse_of(smooth: torch.Tensor) -> torch.Tensor:
    """float32: 1 / smooth, kept with it."""
    return kept(smooth, None, ("rows", "inverse"), lambda: 1 / smooth.float())


def allocate(
    x: torch.Tensor, shape: tuple[int, ...], quant: str | None, plain: bool, column_scales: bool
) -> tuple[Any, Any]:
    """(y or None, codes or None) with nothing in them."""
    y = x.new_empty(shape) if plain or quant is None else None
    return y, None if quant is None else quantized.allocate(x, shape, quant, column_scales)


def returned(y: Any, codes: Any) -> Any:
    """What a call gives: y, codes, or both."""
    return y if codes is None else codes if y is None else (codes, y)
