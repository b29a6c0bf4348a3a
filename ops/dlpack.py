"""Arrays of other libraries (CuPy, JAX, tvm-ffi, NumPy) in calls of operators: read and handed back without a copy.

An array is read through DLPack, and a result is given back as an array of the library that the call's first foreign
argument is of. The stream protocol of DLPack orders both: the producer makes its work come before that of torch's
current stream, where the operator runs; the library's current stream waits for the operator's work before it goes on,
so that it may use results, overwrite arguments and free them. What a library does on further streams is not known to
DLPack: arguments are held until the operator's work has ended; a result's memory, once the library drops its array,
until the work that its current stream has then. No handle of a library's stream is kept: it may be destroyed first.

Torch tensors never come here.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError, CaptureError

if TYPE_CHECKING:
    import torch
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")
    Array = TypeVar("Array", bound="SupportsDLPack", default=torch.Tensor)

WRITTEN = ("out", "lse")
"""Arguments of operators that are written to."""
IMMUTABLE = ("jax", "jaxlib", "tensorflow")
"""Packages whose arrays must not be written to, which their DLPack capsules do not say."""
CUDA = 2
"""kDLCUDA of dlpack.h."""


class SupportsDLPack(Protocol):
    """An array of any library: torch.Tensor, cupy.ndarray, jax.Array, tvm_ffi.Tensor, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


def is_foreign(value: Any) -> bool:
    """Whether a value is an array of another library than torch."""
    import torch

    return not isinstance(value, torch.Tensor) and hasattr(type(value), "__dlpack__")


def accepting(operator: Callable[P, R]) -> Callable[P, R]:
    """`operator`, which takes torch tensors, for arrays of every library; for functions whose call may cost 1 us."""

    @functools.wraps(operator)
    def taking(*args: P.args, **options: P.kwargs) -> R:
        if any(map(is_foreign, args)) or any(map(is_foreign, options.values())):
            return call(operator, inspect.signature(operator).bind(*args, **options).arguments)
        return operator(*args, **options)

    return taking


def call(operator: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call `operator`, which takes torch tensors, with arguments some of which are arrays of other libraries.

    Args:
        given: its arguments by name; other names are left out, so that it may be `locals()`.

    Returns:
        What the operator returns; a tensor as `out` where that was given, else as an array of the library that the
        first foreign argument is of, or as the tensor where that library cannot take it (has no `from_dlpack`).

    Raises:
        ArgumentError: an array that torch cannot read, or must not write to; a result that the library cannot take.
        CaptureError: a CUDA graph is being captured. And what the operator raises.
    """
    import torch

    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(operator).parameters.items():
        if name in given:
            arguments |= given[name] if parameter.kind is parameter.VAR_KEYWORD else {name: given[name]}
    foreign = {name: value for name, value in arguments.items() if is_foreign(value)}
    for name, value in foreign.items():
        _check(name, value)
    tensors = {name: _read(name, value) for name, value in foreign.items()}
    made = operator(**arguments | tensors)
    waiting = dict.fromkeys(takers := [taker_of(value) for value in foreign.values()])
    try:
        if isinstance(made, torch.Tensor):
            out = arguments.get("out")
            if out is not None:
                made = out
            elif takers[0] is not None:
                made = _keep(_hand("x", made, takers[0]), made, takers[0])
                waiting.pop(takers[0])
        for device in {t.device for t in tensors.values() if t.is_cuda}:
            for taker in filter(None, waiting):
                _hand("x", torch.empty(1, device=device), taker)  # so that the library's stream waits
    finally:
        _hold(list(tensors.values()))
    return made


def taker_of(value: Any) -> Callable[[Any], Any] | None:
    """`from_dlpack` of the library that an array is of: of its array namespace, or of a module around its class."""
    modules: list[Any] = []
    if hasattr(value, "__array_namespace__"):
        modules.append(value.__array_namespace__())
    parts = type(value).__module__.split(".")
    modules += [sys.modules.get(".".join(parts[: n + 1])) for n in range(len(parts))]
    return next(filter(None, (getattr(module, "from_dlpack", None) for module in modules)), None)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _check(name: str, value: Any) -> None:
    """Raise an error for an array that must not be written to, or that is handed over in a capture."""
    import torch

    if name in WRITTEN and type(value).__module__.partition(".")[0] in IMMUTABLE:
        raise ArgumentError(name, _kind(value), "is immutable and cannot be written to", f"leave {name} out")
    device, index = value.__dlpack_device__()
    if device == CUDA and torch.cuda.is_available() and capturing(torch.device("cuda", index)):
        raise CaptureError(
            f"{name} is a {_kind(value)}, and a CUDA graph is being captured, in which no other library's stream takes "
            "part; make a tensor of it before the capture, with torch.from_dlpack"
        )


def _read(name: str, value: Any) -> torch.Tensor:
    """The same memory as a tensor, ready for torch's current stream of its device."""
    import torch

    try:
        return torch.from_dlpack(value)
    except (RuntimeError, TypeError, ValueError, BufferError, AttributeError, AssertionError) as error:
        said = str(error).partition("\n")[0]
        constraint = f"cannot be read through DLPack ({said})"
        raise ArgumentError(name, _kind(value), constraint, "make a torch tensor of it") from error


def _hand(name: str, tensor: torch.Tensor, taker: Callable[[Any], Any]) -> Any:
    """The same memory as an array of the library whose `from_dlpack` is `taker`; its current stream waits for it."""
    try:
        return taker(_Handed(tensor))
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        library, said = taker.__module__.partition(".")[0], str(error).partition("\n")[0]
        constraint = f"{library} cannot take a result of {tensor.dtype} ({said})"
        raise ArgumentError(name, library, constraint, "pass torch tensors, or ask for another out_dtype") from error


class _Handed:
    """A tensor on its way to another library, which says on which stream it will use it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **form: Any) -> Any:
        """`stream`: None and 1 are the default stream, 2 is each thread's, -1 asks for no order."""
        import torch

        tensor, device = self.tensor, self.tensor.device
        form = {name: value for name, value in form.items() if value is not None}
        if not tensor.is_cuda:
            return tensor.__dlpack__(**form)
        with torch.cuda.device(device):  # torch hands over what lies on the current device alone
            if stream != -1:
                own = torch.cuda.current_stream(device)
                theirs = torch.cuda.default_stream(device)
                if stream not in (None, 0, 1):
                    theirs = torch.cuda.ExternalStream(stream, device=device)
                theirs.wait_stream(own)
            return tensor.__dlpack__(stream=-1, **form)


def _keep(array: Any, tensor: torch.Tensor, taker: Callable[[Any], Any]) -> Any:
    """`array`, of the tensor's memory: torch has that again after what the library does when it drops the array."""
    import torch

    if not tensor.is_cuda:
        return array
    token = _hand("x", torch.empty(1, device=tensor.device), taker)  # an array through which its stream can be asked
    try:
        weakref.finalize(array, _dropped, tensor, token, torch.cuda.current_stream(tensor.device)).atexit = False
    except TypeError:  # of a class without weak references, whose memory is in the hands of DLPack alone
        return array
    return array


def _dropped(tensor: torch.Tensor, token: Any, stream: torch.cuda.Stream) -> None:
    """Let the stream that the memory is of wait for the library's current one, before the memory is free."""
    import torch

    if capturing(tensor.device):  # a graph must not hold this order: the next call brings it
        with _held_lock:
            _late.append((tensor, token, stream))
        return
    with torch.cuda.stream(stream):
        torch.from_dlpack(token)


_late: list[tuple[torch.Tensor, Any, torch.cuda.Stream]] = []
_held: list[tuple[torch.cuda.Event, list[torch.Tensor]]] = []
_held_lock = threading.Lock()


def _hold(tensors: list[torch.Tensor]) -> None:
    """Keep tensors until the work that torch's current streams have now is done; drop earlier ones whose is."""
    import torch

    with _held_lock:
        late, _late[:] = list(_late), []
    for one in late:
        _dropped(*one)
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            devices.setdefault(tensor.device, []).append(tensor)
    with _held_lock:
        _held[:] = [one for one in _held if not one[0].query()]
        for device, own in devices.items():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            _held.append((event, own))
