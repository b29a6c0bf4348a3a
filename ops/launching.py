"""What every operator does between its plan and the launch: workspaces, semaphores, targets, checks of arguments."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Any

from terrazzo.lowering import graphs
from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError, CaptureError, TargetError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import weights
from terrazzo.ops.lasting import lasting
from terrazzo.schedules import tile_costs

if TYPE_CHECKING:
    import torch
    from terrazzo.schedules import w4ax

SEMAPHORES = 4096
"""int32 for each stream: a counter for each row range, or a flag for each warp."""
STREAMS = 128
"""Of a device: torch has 32 of each priority, and the default one."""
LARGEST = 1 << 31
"""Rows, columns and tokens are int32 in kernels; addresses have 64 bits."""
MOST_ROWS = 1 << 27
"""Output features of a weight."""
ALL_TOKENS = (1, 2, 4, 8, *sorted({tile_costs.bucket(m) for m in range(9, 4097)}))
"""One M of every bucket: up to 8 tokens those of small batches, beyond them those that tiles are chosen for."""


@dataclass(frozen=True)
class Plan:
    """What one M of one weight format launches.

    Attributes:
        request: the kernel. stand_in: another one for the same arguments that gives the same bits, and is compiled for
            many weights at once; it answers until `request` is compiled.
        workspace: shape, of 4-byte elements. semaphores: shape, int32. scalars: trailing arguments.
        listed: the schedule whose work list the kernel follows, of W4Ax on native s4.
    """

    request: KernelRequest
    workspace: tuple[int, ...]
    semaphores: tuple[int, ...]
    scalars: tuple[int, ...]
    stand_in: KernelRequest | None = None
    listed: w4ax.Persistent | None = None


def tokens_of(m: int | Iterable[int] | None) -> tuple[int, ...]:
    """The numbers of tokens that a request names: one, several, or (None) one of every bucket; 0 needs no kernel.

    Raises:
        ArgumentError: something else than numbers of tokens.
    """
    try:
        tokens = ALL_TOKENS if m is None else (m,) if isinstance(m, int) else tuple(m)
    except TypeError:
        tokens = (m,)
    if not all(type(t) is int and 0 <= t < LARGEST for t in tokens):
        raise ArgumentError("m", m, f"must be a number of tokens, or several, 0..{LARGEST - 1}", "write m=[1, 16, 256]")
    return tuple(t for t in tokens if t > 0)


def check_shape(n: int, k: int) -> None:
    """Raise ArgumentError unless [n, k] can be a weight: kernels count channels in 32 bits, blocks of rows in 22."""
    for name, size, end in (("n", n, MOST_ROWS), ("k", k, LARGEST)):
        if type(size) is not int or not 1 <= size < end:
            raise ArgumentError(name, size, f"must be an integer, 1..{end - 1}", "pass the weight's shape [N, K]")


def check_flags(**flags: bool) -> None:
    """Raise ArgumentError unless each is True or False: plans are kept, and 1 would find, or name, that of True."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ArgumentError(name, flag, "must be True or False", "pass a bool")


def check_group(group_size: int, k: int, groups: tuple[int, ...]) -> None:
    """Raise ArgumentError unless the group size is one of `groups`, or K: one group."""
    if type(group_size) is not int or group_size not in (*groups, k):
        constraint = f"must be one of {groups}, or K = {k} for one group"
        raise ArgumentError("group_size", group_size, constraint, "pass the group size of the weight")


@dataclass
class _Pool:
    """Of one device, for each stream: semaphores, zero between launches, and workspaces."""

    semaphores: torch.Tensor
    slots: dict[int, int]
    workspaces: dict[int, list[torch.Tensor]]


_pools: dict[torch.device, _Pool] = {}
_pools_lock = threading.Lock()


def ready(plan: Plan, m: int, device: torch.device, stream: int, operator: str, dtype: str = "float32") -> tuple:
    """(kernel, workspace of `dtype`, semaphores, scalars) for launches of a plan on a stream.

    Both tensors are tvm-ffi's, which a launch takes without converting them.

    Raises:
        CaptureError: a CUDA graph is being captured, and the kernel was never launched or the device never used.
        ArgumentError: more streams than STREAMS. ToolchainError, CompileError: see `get_kernel`.
    """
    import torch

    kernel = warm_kernel(answering(plan, device), m, operator, device)
    with _pools_lock:  # two threads must not find the same slot free for two streams
        pool = _pool(device, operator)
        slot = pool.slots.setdefault(stream, len(pool.slots))
    if slot >= STREAMS:
        raise ArgumentError("stream", stream, f"at most {STREAMS} streams of a device", "reuse streams")
    semaphores = pool.semaphores[slot, : prod(plan.semaphores)].view(plan.semaphores)
    size = prod(plan.workspace)
    spaces = pool.workspaces.setdefault(stream, [])
    if not spaces or spaces[-1].numel() < size:
        make = lambda: torch.empty(size, dtype=torch.float32, device=device)
        spaces.append(lasting(device, make))  # captured graphs keep the smaller ones
    workspace = spaces[-1][:size].view(getattr(torch, dtype)).view(plan.workspace)
    return kernel, argument(workspace), argument(semaphores), plan.scalars


def stand_ins(device: torch.device, *dtypes: torch.dtype) -> list[torch.Tensor]:
    """A tensor of one element for each argument that a kernel does not read; zero, as a kernel that looks at the extent
    of its bias reads one element where y has one column."""
    import torch

    return lasting(device, lambda: [torch.zeros(1, dtype=dtype, device=device) for dtype in dtypes])


def argument(tensor: torch.Tensor) -> Any:
    """The same memory as a tensor of tvm-ffi: made once for arguments of many launches, 0.2 us less for each.

    A launch takes its stream from the first tensor of torch among its arguments: one must remain.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


class Launches(dict):
    """What is ready to launch for weights of one format, by whatever else may differ between two calls.

    A weight keeps the object; where the weight is copied or pickled, None takes its place.

    Attributes:
        facts: what a kernel must know of the weight.
    """

    def __init__(self, facts: tuple) -> None:
        super().__init__()
        self.facts = facts

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(None), ()


class LaunchTable:
    """`Launches` of one operator, by format of the weight.

    Args:
        facts: what a kernel must know of a weight. check: raises where a weight is not what it says it is.
    """

    def __init__(self, facts: Callable[[Any], tuple], check: Callable[[Any], None]) -> None:
        self._formats: dict[tuple, Launches] = {}
        self._facts, self.check = facts, check

    def of(self, w: Any, words: torch.Tensor, params: torch.Tensor) -> Launches:
        """The launches of a weight's format. A weight that is new or was written to is checked first.

        Args:
            words, params: of the weight, what kernels read before the kernel ahead has ended.
        """
        launches = w.__dict__.get("_launches")
        if launches is None:
            launches = self._keep(w)
        note = getattr(words, "_terrazzo", None)
        if (  # not what `adopt` noted, or PyTorch has written to it since
            note is None
            or note[0] != launches.facts
            or note[1] != words.data_ptr()
            or note[2] != params.data_ptr()
            or (note[3] >= 0 and note[3] != words._version + params._version)
        ):
            self.check(w)
            adopt(words, params, launches.facts)
        return launches

    def _keep(self, w: Any) -> Launches:
        """The launches of a weight, whose vectors are checked, and which keeps them."""
        weights.check_vectors(w)
        facts = self._facts(w)
        found = self._formats.get(facts)
        if found is None:
            found = self._formats.setdefault(facts, Launches(facts))
        w.__dict__["_launches"] = found
        return found

    def clear(self) -> None:
        """Forget what is ready, wherever it is kept."""
        for launches in self._formats.values():
            launches.clear()


def answering(plan: Plan, device: torch.device) -> KernelRequest:
    """The kernel that a launch takes now: the plan's own, or its stand-in until that is compiled. In a capture the
    stand-in, too, as long as the other one was never launched."""
    from terrazzo.lowering import kernels, replacing

    own, stand_in = plan.request, plan.stand_in
    if stand_in is None or replacing.off():
        return own
    if capturing(device):
        loaded = kernels.loaded(own)
        if loaded is not None and loaded.warm_on(device):
            return own
        standing = kernels.loaded(stand_in)
        if standing is None or not standing.warm_on(device):
            return stand_in  # which is refused: it cannot be captured either
        said = f"a CUDA graph keeps a slower kernel of {own.name}, as the one for its shape was not launched before it"
        remedy = "call terrazzo.prepare(model, tokens) and then the layer, or set TERRAZZO_BACKGROUND=0"
        warnings.warn(f"{said}; {remedy}", RuntimeWarning, stacklevel=2)
        return stand_in
    return own if kernels.is_ready(own) or not kernels.may_have(stand_in) else stand_in


_keeping = threading.Lock()


def keep(kept: dict, key: tuple, found: tuple, plan: Plan, device: torch.device) -> None:
    """Keep what is ready to launch, `prepared`. A stand-in is forgotten once the plan's own kernel is compiled, so that
    the next call finds that one; what a CUDA graph captures meanwhile stays in the graph."""
    from terrazzo.lowering import kernels, replacing

    kernel = found[0]
    if plan.stand_in is None or kernels.loaded(plan.stand_in) is not kernel:
        kept[key] = found
        return
    if capturing(device):  # asked again behind the capture
        return

    def forget() -> None:
        with _keeping:
            if key in kept and kept[key][0] is kernel:
                del kept[key]

    kept[key] = found
    replacing.when_ready(plan.request, forget)


def launch(kept: dict, key: tuple, found: tuple, args: tuple) -> None:
    """Launch `found`, kept under `key`: a kernel, its launcher (another one once it is warm), and more."""
    kernel, launcher = found[0], found[1]
    try:
        launcher(*args)
    except RuntimeError as error:
        kernel.explain(args, error)
    if launcher is kernel:
        with _keeping:
            if kept.get(key) is found:  # and was not forgotten meanwhile
                kept[key] = (kernel, kernel.launcher(args[0].get_device()), *found[2:])


def prepared(plan: Plan, m: int, x: torch.Tensor, at: tuple[int, int], operator: str, dtype: str = "float32") -> tuple:
    """What a table keeps of a plan for launches at a `place`: the kernel, its launcher, and what else `ready` says."""
    kernel, *launch = ready(plan, m, x.device, at[1], operator, dtype)
    return (kernel, kernel.launcher(at[0]), *launch)


def output(
    x: torch.Tensor, out: torch.Tensor, shape: tuple[int, ...], m: int, dtype: torch.dtype, index: int
) -> tuple[torch.Tensor, bool]:
    """What a kernel writes for a caller's `out` of this shape, [M, N] on x's device, and whether that is other memory:
    kernels store 16 bytes at a time.

    Raises:
        ArgumentError: `out` does not fit, or shares memory with x.
    """
    if not output_fits(out, shape, dtype, index):
        check_out(out, shape, dtype, x.device)
    if out.data_ptr() % 16:
        return x.new_empty((m, shape[-1]), dtype=dtype), True
    if m:
        check_apart(out, "out", x=x)
    return out if len(shape) == 2 else out.view(m, shape[-1]), False


def adopt(words: torch.Tensor, params: torch.Tensor, facts: tuple) -> None:
    """Note on its words, which outlive the weight around them, that a weight was checked.

    Kernels fetch weights before the kernel ahead of them on the stream has ended (programmatic dependent launch), so
    the last writer of the weight must not be that kernel: a tiny one is launched between.

    Raises:
        ArgumentError: memory that is not 16-byte aligned, as a view into a larger tensor may be.
    """
    for place in (words.data_ptr(), params.data_ptr()):
        if place % 16:
            constraint = "must hold tensors at multiples of 16 bytes, which kernels copy at a time"
            raise ArgumentError("w", f"a tensor at {place:#x}", constraint, "clone the tensors of the weight")
    params.new_zeros(1)
    words._terrazzo = (facts, words.data_ptr(), params.data_ptr(), writes(words, params))


def warm_kernel(request: KernelRequest, m: int, operator: str, device: torch.device) -> Any:
    """The kernel of a request; a CaptureError where a CUDA graph is being captured on the device, and it was
    never launched there."""
    from terrazzo.lowering.kernels import get_kernel

    kernel = get_kernel(request)
    if capturing(device) and not kernel.warm_on(device):
        raise CaptureError(
            f"{request.name} for M = {m} was never launched, and a CUDA graph is being captured; call {operator} once "
            "with each M before the capture"
        )
    return kernel


def _pool(device: torch.device, operator: str) -> _Pool:
    import torch

    if device not in _pools:
        if capturing(device):
            raise CaptureError(
                f"{operator} was never called on {device}, and a CUDA graph is being captured; call it once before the "
                "capture"
            )
        make = lambda: torch.zeros(STREAMS, SEMAPHORES, dtype=torch.int32, device=device)
        _pools[device] = _Pool(lasting(device, make), {}, {})
        settle(device)
    return _pools[device]


def settle(device: torch.device) -> None:
    """Wait for what was just made on the current stream of a device, as other streams may use it at once.

    Not for the device: another thread may be capturing a graph there, which that would end.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@cache
def detect(index: int) -> Target:
    """The GPU of a CUDA device."""
    return Target.detect(index)


def targets(packed_for: str | None, device: torch.device, argument: str = "w") -> tuple[Target, Target]:
    """The target whose program runs, and the GPU that runs it: the same, or sm_80 code on a newer GPU."""
    import torch

    if device.type != "cuda":
        raise ArgumentError(argument, str(device), "must be on a CUDA device", f"move it with {argument}.to('cuda')")
    here = detect(torch.cuda.current_device() if device.index is None else device.index)
    if packed_for is None or packed_for == here.arch:
        return here, here
    if packed_for == "sm_80":
        return Target.parse("sm_80"), here
    raise TargetError(
        argument, packed_for, f"was packed for another GPU than {here.name} ({here.arch})", "pack it for this target"
    )


def requested_targets(target: Target | str | None) -> tuple[Target, Target]:
    """(the target whose program a call with `target` launches, the GPU that runs it), to compile ahead.

    The GPU is the current one where it runs programs of an architecture, and where a device is named as it is. Another
    device, a Target, and an architecture that no GPU here runs, stand for both.

    Raises:
        TargetError: an unknown target, or None without a GPU.
    """
    at = None if target is None else Target.parse(target)
    if isinstance(target, Target):
        return target, target
    device = isinstance(target, str) and target != at.arch
    try:
        here = Target.detect()
    except TargetError:
        if at is None:
            raise
        return at, at
    if device and at.name != here.name:
        return at, at
    if at is None or at.arch == here.arch:
        return here, here
    return at, here if at.arch == "sm_80" else at


def ptx_flags(target: Target, device: Target | None) -> tuple[str, ...]:
    """nvcc flags: code for an older target than the GPU that runs it comes from its PTX."""
    return () if (device or target).arch == target.arch else ("ptx=compute_80",)


def place(x: torch.Tensor) -> tuple[int, int]:
    """Index of the CUDA device and handle of its current stream, in `graphs.Graph` of the one that will run it; (-1, 0)
    for a tensor that is elsewhere."""
    import torch

    if not x.is_cuda:
        return -1, 0
    index = x.get_device()
    handle = torch._C._cuda_getCurrentRawStream(index)  # torch.cuda.current_stream builds an object: 2 us
    return index, graphs.standing.get(handle, handle)


def current_stream(x: torch.Tensor) -> int:
    return place(x)[1]


def writes(first: torch.Tensor, *more: torch.Tensor) -> int:
    """Counts PyTorch's in-place writes to some tensors; inference tensors keep no count."""
    if first.is_inference() or any(t.is_inference() for t in more):
        return -1
    return first._version + sum(t._version for t in more) if more else first._version


def elsewhere(x: torch.Tensor, device: torch.device) -> ArgumentError:
    constraint = f"must be on a CUDA device together with w, which is on {device}"
    return ArgumentError("x", str(x.device), constraint, "move both there")


def not_packed(w: Any, operator: str) -> ArgumentError:
    """What to say of `w` where a PackedWeight of `operator` is needed."""
    kind = weights.kind(w)
    family, _, form = kind.rpartition(".")
    if form == "GroupedWeight":
        remedy = "call grouped_gemm with it, or gemm with one expert: w[0]"
    elif form in ("QuantizedWeight", "PackedWeight"):
        packed, own = "w" if form == "PackedWeight" else "w.pack()", family.partition(".")[0]
        remedy = f"call {own}.gemm with {packed}"
    else:
        remedy = f"make one with pack, quantize or an importer of {operator}"
    return ArgumentError("w", kind, f"must be a PackedWeight of {operator}", remedy)


def check_tensor(x: Any, name: str, what: str, *sizes: Any) -> None:
    """Raise ArgumentError unless x is a dense torch tensor; `what` it is, with `{}` for each of `sizes`.

    The text is made for an error only: torch.compile makes no strings of sizes that it holds as symbols.
    """
    import torch

    if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested:
        return
    what = what.format(*sizes)
    if not isinstance(x, torch.Tensor):
        convert = "from_dlpack" if hasattr(type(x), "__dlpack__") else "as_tensor"
        raise ArgumentError(name, type(x).__name__, f"must be a torch tensor, {what}", f"convert it: torch.{convert}")
    seen, convert = (
        ("nested", "pad it: x.to_padded_tensor(0.0)") if x.is_nested else (x.layout, "convert it: x.to_dense()")
    )
    raise ArgumentError(name, str(seen), f"must be a dense tensor, {what}", convert)


def is_traced(*given: Any) -> bool:
    """Whether a call goes to torch's dispatcher: it is compiled, or a tensor is fake or of another subclass."""
    import torch

    if torch.compiler.is_compiling():
        return True
    for x in given:
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter and isinstance(x, torch.Tensor):
            return True
    return False


def check_untraced(**options: Any) -> None:
    """Raise ArgumentError for an option that a traced call would not hand on."""
    for name, value in options.items():
        if value is not None:
            constraint = "cannot be given where a call is traced (torch.compile, fake tensors, subclasses)"
            raise ArgumentError(name, value, constraint, "leave it out")


def check_last(x: Any, k: int) -> None:
    """Raise ArgumentError unless x, a tensor or quantized activations, is [..., K]."""
    if not x.shape or x.shape[-1] != k:
        raise ArgumentError("x", list(x.shape), f"its last dimension must be K = {k}", "pass activations [..., K]")


def check_tokens(m: int) -> None:
    if m >= LARGEST:
        raise ArgumentError("x", m, f"must have less than {LARGEST} rows", "split it: rows do not depend on each other")


def check_no_grad(x: torch.Tensor, operator: str, name: str = "x") -> None:
    import torch

    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(name, "requires_grad=True", f"{operator} has no gradient", "call it under torch.no_grad()")


def check_eps(eps: float) -> None:
    """Raise ArgumentError unless RMSNorm can add eps to a mean square."""
    if not isinstance(eps, (int, float)) or not 0 <= eps < inf:
        raise ArgumentError("eps", eps, "must be a finite number, not negative", "pass that of the norm, 1e-6")


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, at an address that copies of 16 bytes take."""
    import torch

    return x.clone(memory_format=torch.contiguous_format)


def output_fits(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> bool:
    """`check_out` in a hurry; where it says no, that one says why."""
    same = getattr(out, "shape", None) == shape and out.dtype is dtype
    return same and out.get_device() == index and out.is_contiguous()


def check_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = "out") -> None:
    check_tensor(out, name, "{} {}", dtype, list(shape))
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != device or not out.is_contiguous():
        raise ArgumentError(
            name,
            f"{out.dtype} {list(out.shape)} strides {list(out.stride())} on {out.device}",
            f"must be contiguous {dtype} {list(shape)} on {device}",
            "allocate it with torch.empty of that shape",
        )


def check_written(
    x: torch.Tensor, n: int, bias: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """What a product of x [..., K] checks before x is quantized: a float bias, and `out` of this dtype."""
    if bias is not None:
        check_bias(bias, n, None, x.device)
    if out is not None and not output_fits(out, (*x.shape[:-1], n), dtype, x.get_device()):
        check_out(out, (*x.shape[:-1], n), dtype, x.device)


def copy_out(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """y of a traced operator, in `out` if that is given."""
    if out is None:
        return y
    check_out(out, y.shape, y.dtype, y.device)
    return out.copy_(y)


def check_apart(out: torch.Tensor, name: str, /, **read: torch.Tensor | None) -> None:
    """Raise ArgumentError if contiguous `out`, which a kernel writes to, shares memory with one of the contiguous
    others, which it reads or writes."""
    start = out.data_ptr()
    end = start + out.nbytes
    for other, x in read.items():
        if x is not None and x.data_ptr() < end and start < x.data_ptr() + x.nbytes:
            constraint = f"shares memory with {other}, which the same kernel reads or writes"
            raise ArgumentError(name, f"{list(out.shape)}", constraint, f"write to other memory, or clone {other}")


def check_bias(bias: Any, n: int, dtype: torch.dtype | None, device: torch.device) -> None:
    """`dtype` None accepts any float."""
    check_tensor(bias, "bias", "{} [{}]", dtype or "float", n)
    fits = bias.dtype == dtype if dtype is not None else bias.dtype.is_floating_point
    if tuple(bias.shape) != (n,) or not fits or bias.device != device or not bias.is_contiguous():
        raise ArgumentError(
            "bias",
            f"{bias.dtype} {list(bias.shape)} strides {list(bias.stride())} on {bias.device}",
            f"must be contiguous {dtype or 'float'} [{n}] on {device}",
            "cast and move it",
        )


def check_sums_bias(out_dtype: torch.dtype | None) -> None:
    """Raise ArgumentError where the output beside a bias is raw sums."""
    import torch

    if out_dtype == torch.int32:
        raise ArgumentError("bias", "given", "cannot be added to int32 sums", "ask for float16 or bfloat16")


def may_keep(device: torch.device) -> bool:
    """Whether what a device computes now may serve later calls: in a capture it has no value before the replay."""
    import torch

    return not (torch.cuda.is_initialized() and capturing(device))
