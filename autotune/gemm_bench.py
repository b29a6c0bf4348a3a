"""Linear layers compared with cuBLAS f16 (and peers that a caller brings) over shapes and numbers of tokens. Outputs
are checked first.

`bench` measures rows of a `Shape`: `linear_bench` has those of every product.
"""

from __future__ import annotations

import dataclasses
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from terrazzo.autotune import measure
from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import CompileError, TerrazzoError, ToolchainError
from terrazzo.schedules.problem import TOKENS_PER_TILE
from terrazzo.schedules.roofline import bounds

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.weight.base import AnyPacked as Packed
    from terrazzo.schedules.problem import Gemm

CHECKED_ROWS = 512
"""Rows of y that are compared with the reference; with more tokens, the first, the last and a random choice between.
All of y is checked for NaN that was there before."""
DEVICE = "cuda"
OURS = "terrazzo"
QUANTIZED, SAME_QUANTIZED = " with its quantizer", 0.05
"""What names a peer's call that quantizes x itself; and how far, root mean square, its output may be from the other."""
_PROBLEM = {
    "n",
    "k",
    "whole",
    "bias",
    "dtype",
    "out_dtype",
    "scale_dtype",
    "symmetric",
    "group",
    "group_size",
    "weight",
}
SUSTAINED_M = 4096
"""From so many tokens on, rows also have the times at the power limit: `sustained`, ours and cuBLAS's in turn."""


class PoisonedError(RuntimeError):
    """A peer left the GPU in an error that lasts to the end of the process."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer, self.why = peer, why


class Peer(Protocol):
    """Another implementation of the same product.

    A peer may also have `prepare(x, loaded)`, what its calls get instead of x (activations quantized outside of the
    clock), `quantize(x, loaded)`, the same by the kernel that a model pays for, and `wrong(y, x, loaded)`, what is
    wrong with its output in words, where it computes another product. `package` names the distribution that it is of,
    whose version the result states.
    """

    name: str

    def missing(self) -> str:
        """Why it cannot run here, or ""."""

    def load(self, weight: Packed, dense: torch.Tensor, copies: Callable[[int], int]) -> list[object]:
        """Copies of the weight in the peer's own form; `copies(nbytes)` says how many exceed the L2 cache.

        Args:
            weight: the canonical weight. dense: the same, dequantized in the activation dtype [N, K].
        """

    def call(self, x: torch.Tensor, loaded: object) -> torch.Tensor:
        """y [M, N]."""


class Cublas:
    """torch.mm with the dequantized weight: what every speed-up is a ratio to."""

    name = "cublas_f16"

    def missing(self) -> str:
        return ""

    def load(self, weight: Packed, dense: torch.Tensor, copies: Callable[[int], int]) -> list[object]:
        return [dense.clone() for _ in range(copies(dense.numel() * dense.element_size()))]

    def call(self, x: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
        return x @ loaded.T


@dataclass(frozen=True)
class Settings:
    """What all rows of a run share.

    Attributes:
        dtype: activations, output and scales, "float16" or "bfloat16".
        group: input channels for each scale.
        symmetric: without zero points.
        seed: of weights and activations.
        budget_ms: GPU time for each measurement.
        peers: measured besides cuBLAS where their package is installed.
        checked: so many output features, the last ones, are held against the bound; 0: all. `errors` is of all.
    """

    dtype: str = "float16"
    group: int = 128
    symmetric: bool = False
    seed: int = 0
    budget_ms: float = measure.BUDGET_MS
    peers: Sequence[Peer] = field(default_factory=tuple)
    checked: int = 0

    def size(self, k: int) -> int:
        """k of a scale."""
        return self.group


def bench(
    kind: type[Shape],
    problems: Mapping[tuple[int, int], Sequence[str]],
    ms: Sequence[int],
    settings: Settings,
    compile_all: Callable[[Sequence[KernelRequest]], Sequence[Path | CompileError]] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_shape: Callable[[dict[str, Any]], None] | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measure every (N, K) at every M; needs a GPU.

    Args:
        kind: how rows of an operator are measured.
        problems: (N, K) -> names of the layers that have this shape.
        ms: numbers of tokens.
        compile_all: compiles the kernels first; None takes `compile_many`.
        on_row: called with each row as it is done.
        on_shape: called with the result so far after each shape, so that a run that is stopped leaves something.
        commit: of the sources; None asks git.

    Returns:
        The object that docs/internals.md, "Measured results" describes. A row whose output is wrong, or whose kernel
        does not compile, has "failure" and no time. `bytes` counts the packed weight and its parameters.

    Raises:
        ToolchainError: no CUDA GPU. TargetError: one that is not supported.
    """
    from terrazzo.lowering.parallel import compile_many
    from terrazzo.lowering.targets import Target
    from terrazzo.lowering.toolchain import package_version

    require_gpu()
    target = Target.detect()
    requests = [request for n, k in problems for request in kind.requests(n, k, list(ms), settings, target)]
    outcomes = (compile_all or compile_many)(requests)
    failed = {request: str(out) for request, out in zip(requests, outcomes) if isinstance(out, CompileError)}
    result = header(target, commit)
    result["copy_gb_s"] = round(measure.copy_bandwidth(), 1)
    peers = [peer for peer in (Cublas(), *settings.peers) if not peer.missing()]
    result["peers_missing"] = {peer.name: peer.missing() for peer in settings.peers if peer.missing()}
    packages = {name for peer in peers if (name := getattr(peer, "package", None))}
    result["peers_versions"] = {name: package_version(name) for name in sorted(packages)}
    result["rows"] = rows = []
    for (n, k), layers in problems.items():
        shape = kind(n, k, settings, target, peers, result["copy_gb_s"])
        for m in ms:
            row = shape.row(m, failed) | {"model": ", ".join(layers)}
            rows.append(row)
            if on_row is not None:
                on_row(row)
        if "call_overhead_us" not in result:
            result["call_overhead_us"] = shape.overhead()
        shape.drop()
        result.setdefault("clocks_after_each_shape", []).append(clocks())
        if on_shape is not None:
            on_shape(result)
    return result


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError("measuring needs a CUDA GPU, and torch sees none; `terrazzo info` says what is missing")


class Shape(ABC):
    """One weight on the GPU, in every implementation's form, and its rows. A family of operators subclasses it."""

    def __init__(
        self, n: int, k: int, settings: Settings, target: Target, peers: Sequence[Peer], copy_gb_s: float
    ) -> None:
        import torch

        self.n, self.k, self.settings, self.target, self.copy_gb_s = n, k, settings, target, copy_gb_s
        self.dtype = getattr(torch, settings.dtype)
        self.random = torch.Generator(DEVICE).manual_seed(settings.seed)
        self.weight, packed, tensors, dense = self.load()
        self.packed = [packed] + [
            dataclasses.replace(packed, **{name: getattr(packed, name).clone() for name in tensors})
            for _ in range(self.copies(packed.nbytes) - 1)
        ]
        self.peers: dict[str, tuple[Peer, list[Any]]] = {}
        self.broken: dict[str, str] = {}
        for peer in peers:
            try:
                self.peers[peer.name] = peer, peer.load(self.weight, dense, self.copies)
            except Exception as error:  # another package's error of any kind costs its column, not the run
                self.broken[peer.name] = one_line(error)

    @staticmethod
    @abstractmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: Settings, target: Target) -> list[KernelRequest]:
        """The kernels that rows of an [n, k] weight at these numbers of tokens launch."""

    @abstractmethod
    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        """(canonical weight, packed weight, its streamed tensors, the weight in the activation dtype)."""

    @property
    @abstractmethod
    def module(self) -> ModuleType:
        """The operator's public module."""

    @abstractmethod
    def described(self) -> tuple[str, str]:
        """The operator, and how its weight is stored, as rows name them."""

    @abstractmethod
    def gemm(self) -> Gemm:
        """What schedules know of the weight."""

    @abstractmethod
    def converter(self, params: Mapping[str, Any]) -> str:
        """What a kernel with these parameters decodes the weight with."""

    def facts(self, m: int, requests: Sequence[KernelRequest]) -> dict[str, Any]:
        """What a row says before anything is measured, in the order that result files have."""
        product = next(it for it in requests if "quantize" not in it.name)
        params = dict(product.params)
        alu = get_converter(self.converter(params)).alu_per_element
        tile = params.get("block_tokens") or params["token_tiles"] * TOKENS_PER_TILE
        roof = bounds(self.gemm(), self.target, m, alu, tile, self.copy_gb_s, self.packed[0].nbytes)
        op, stored = self.described()
        return {
            "op": op,
            "format": stored,
            "dtype": self.settings.dtype,
            "group": self.settings.size(self.k),
            "m": m,
            "n": self.n,
            "k": self.k,
            "us": None,
            "spread": None,
            "bytes": self.packed[0].nbytes,
            "peers": {},
            "schedule": schedule_text([product]),
            "bound": roof.bound,
            "predicted_us": round(roof.us, 2),
        }

    @abstractmethod
    def expected(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[torch.Tensor, ...]:
        """(index of what is compared, float64 reference, bound for us, bound for peers, which round each weight once in
        16 bits and may add partial sums in 16 bits)."""

    @abstractmethod
    def calls(self, x: torch.Tensor) -> dict[str, Callable[[Any, torch.Tensor | None], torch.Tensor]]:
        """Name -> call of a packed weight and an output; `OURS` is the row's time, others are its variants."""

    def copies(self, nbytes: int) -> int:
        return measure.copies_beyond_l2(nbytes, self.target.l2_bytes)

    def drop(self) -> None:
        """Give the memory back before the next shape."""
        import torch

        self.weight, self.packed, self.peers = None, [], {}
        torch.cuda.empty_cache()

    def tokens(self, m: int) -> torch.Tensor:
        import torch

        return torch.randn(m, self.k, generator=self.random, device=DEVICE, dtype=self.dtype)

    def quantized(self, x: torch.Tensor) -> object:
        """x as products of the weight take it, where the operator quantizes activations."""
        return self.module.quantize_activations(x)

    def row(self, m: int, failed: Mapping[KernelRequest, str]) -> dict[str, Any]:
        """The row of one M: check, then time, ours and every peer's."""
        import torch

        requests = self.requests(self.n, self.k, m, self.settings, self.target)
        row, x, problems = self.facts(m, requests), self.tokens(m), dict(self.broken)
        at, reference, bound, loose = self.expected(x, requests)
        errors = [failed[request] for request in requests if request in failed]
        calls, written, failure = {} if errors else self.calls(x), {}, ""
        if errors:
            failure = f"does not compile: {errors[0].splitlines()[0]}"
        for name, call in calls.items():
            written[name], problem = self.first_launch(m, call, at, reference, bound)
            if problem and name == OURS:
                failure = problem
            elif problem:
                problems[name] = problem
        candidates = {
            name: [bound_call(call, packed, written[name]) for packed in self.packed]
            for name, call in calls.items()
            if not failure and name not in problems
        }
        rivals, outputs = self.rivals(x, lambda y: wrong(y, at, reference, loose), problems)
        before = {name: y.clone() for name, y in written.items() if name in candidates}
        timings = measure.time_in_turn(candidates | rivals, self.settings.budget_ms)
        for name, timing in timings.items():
            ours = name in calls
            if isinstance(timing, Exception):
                if ours and not isinstance(timing, TerrazzoError):
                    raise timing
                problem = one_line(timing)
            else:
                same = name not in before or torch.equal(written[name], before[name])
                problem = "" if same else "the output of the timed launches differs from that of the first one"
            if name == OURS and problem:
                failure = problem
            elif problem:
                problems[name] = problem
            else:
                self.note(row, name, timing, ours)
        if Cublas.name in outputs:
            row["errors"] = {
                name: float(f"{distance(y, outputs[Cublas.name]):.3g}")
                for name, y in ({OURS: written.get(OURS)} | outputs).items()
                if y is not None and name != Cublas.name and y.is_floating_point()
            }
        if m >= SUSTAINED_M and not failure:
            turns = {name: calls for name, calls in (candidates | rivals).items() if name in (OURS, Cublas.name)}
            slow = measure.time_in_turn(turns, self.settings.budget_ms, sustained=True)
            row["sustained"] = {name: round(it.us, 3) for name, it in slow.items() if not isinstance(it, Exception)}
        return row | ({"failure": failure} if failure else {}) | ({"peers_failed": problems} if problems else {})

    @staticmethod
    def note(row: dict[str, Any], name: str, timing: measure.Timing, ours: bool) -> None:
        """Keep a timing: of ours, of a variant, of a peer, or of a peer with the quantizer of its activations."""
        us, peer = round(timing.us, 3), name.removesuffix(QUANTIZED)
        row.setdefault("quartiles", {})[name] = [round(each, 3) for each in timing.quartiles]
        if name == OURS:
            row |= {"us": us, "spread": round(timing.spread, 4), "repeats": timing.replays}
        else:
            kind = "variants" if ours else "peers" if peer == name else "peers_with_quantizer"
            row.setdefault(kind, {})[peer] = us

    def rivals(
        self, x: torch.Tensor, judge: Callable[[torch.Tensor], str], problems: dict[str, str]
    ) -> tuple[dict[str, list[Callable[[], object]]], dict[str, torch.Tensor]]:
        """Calls and first outputs of peers that are right, by name; what is wrong with the others joins `problems`.

        Raises:
            PoisonedError: a peer left the GPU in an error.
        """
        candidates: dict[str, list[Callable[[], object]]] = {}
        outputs: dict[str, torch.Tensor] = {}
        for name, (peer, loaded) in self.peers.items():
            try:
                given = peer.prepare(x, loaded[0]) if hasattr(peer, "prepare") else x
                y = peer.call(given, loaded[0])
                problem = peer.wrong(y, x, loaded[0]) if hasattr(peer, "wrong") else judge(y)
                if not problem:
                    candidates[name], outputs[name] = [peer_call(peer, given, it) for it in loaded], y
                if not problem and hasattr(peer, "quantize"):
                    name, calls = name + QUANTIZED, [quantized_call(peer, x, copy) for copy in loaded]
                    problem = "" if distance(calls[0](), y) < SAME_QUANTIZED else "another product than without it"
                    candidates |= {} if problem else {name: calls}
            except Exception as error:  # as above
                problem = one_line(error)
                _check_gpu(peer.name, problem)
            if problem:
                problems[name] = problem
        return candidates, outputs

    def first_launch(
        self, m: int, call: Callable[[Any, torch.Tensor], torch.Tensor], *expected: torch.Tensor
    ) -> tuple[torch.Tensor, str]:
        """The output of one launch into poisoned memory, and what is wrong with it."""
        y = measure.poisoned((m, self.n), self.dtype, DEVICE)
        try:
            call(self.packed[0], y)
        except TerrazzoError as error:
            return y, one_line(error)
        return y, wrong(y, *expected)

    def checked_rows(self, m: int) -> torch.Tensor:
        """Rows of y that are compared: all, or the first, the last and a random choice between."""
        import torch

        rows = torch.arange(m, device=DEVICE)
        if m <= CHECKED_ROWS:
            return rows
        middle = 1 + torch.randperm(m - 2, generator=self.random, device=DEVICE)[: CHECKED_ROWS - 2]
        return torch.cat([rows[:1], middle.sort().values, rows[-1:]])

    def overhead(self) -> dict[str, float]:
        """CPU time of a call from Python, ours and torch.mm's, on one token."""
        x, y = self.tokens(1), measure.poisoned((1, self.n), self.dtype, DEVICE)
        peer, loaded = self.peers[Cublas.name]
        ours = self.calls(x)[OURS]
        calls = {"terrazzo": bound_call(ours, self.packed[0], y), "torch_mm": peer_call(peer, x, loaded[0])}
        calls["terrazzo_allocating"] = bound_call(ours, self.packed[0], None)
        found = {}
        for name, call in calls.items():
            try:
                found[name] = round(measure.call_overhead_us(call), 2)
            except TerrazzoError:  # the rows say why
                continue
        return found


def bound_call(call: Callable[..., object], packed: Packed, out: torch.Tensor | None) -> Callable[[], object]:
    return lambda: call(packed, out)


def peer_call(peer: Peer, x: torch.Tensor, loaded: object) -> Callable[[], object]:
    return lambda: peer.call(x, loaded)


def quantized_call(peer: Any, x: torch.Tensor, loaded: object) -> Callable[[], torch.Tensor]:
    return lambda: peer.call(peer.quantize(x, loaded), loaded)


def distance(y: torch.Tensor, base: torch.Tensor) -> float:
    """Root mean square of a difference over that of the base, of all elements."""
    return float((y.float() - base.float()).norm() / base.float().norm())


def _check_gpu(peer: str, why: str) -> None:
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise PoisonedError(peer, why) from error


def wrong(y: torch.Tensor, rows: Any, reference: torch.Tensor, bound: torch.Tensor) -> str:
    missing = int(y.isnan().sum())
    return f"{missing} elements of y are NaN" if missing else measure.check_outputs(y[rows], reference, bound)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def numerics_of(requests: Sequence[KernelRequest]) -> str:
    """The numerics that the kernels of one call compute."""
    return next(value for request in requests for key, value in request.params if key == "numerics")


def schedule_text(requests: Sequence[KernelRequest]) -> str:
    """The schedule of a call's kernels in words: names and the parameters that the problem does not fix."""
    return "; ".join(
        " ".join([request.name, *(f"{key}={value}" for key, value in request.params if key not in _PROBLEM)])
        for request in requests
    )


def header(target: Target, commit: str | None = None) -> dict[str, Any]:
    """Where and with what a result was measured."""
    import torch
    from terrazzo.lowering.toolchain import package_version

    return {
        "gpu": target.name,
        "sms": target.sms,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks": clocks("clocks.max.sm,clocks.max.mem,power.limit"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "tilelang": package_version("tilelang"),
        "terrazzo": package_version("terrazzo"),
        "commit": commit or _said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def clocks(fields: str = "clocks.sm,clocks.mem,power.draw,temperature.gpu") -> str | None:
    """Clocks in MHz, power in W and degrees of the GPU, now or at most, in nvidia-smi's words."""
    return _said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _said(*command: str) -> str | None:
    """First line that a command prints, or None."""
    from terrazzo.lowering.toolchain import find_program

    program = find_program(command[0])
    if program is None:
        return None
    try:
        said = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
        done = subprocess.run((program, *command[1:]), timeout=30, check=True, **said)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split("\n")), "").strip() or None
