"""Which kernels layers will launch, compiled before an engine captures CUDA graphs.

Compiling starts when a layer is made, in other processes, and goes on while the engine reads weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from terrazzo.integrations.engines.settings import Settings
from terrazzo.integrations.engines.weights import Wanted
from terrazzo.lowering import cache
from terrazzo.lowering.compilers import compiler
from terrazzo.lowering.errors import BundleError, CompileError, TerrazzoError
from terrazzo.lowering.kernels import is_ready
from terrazzo.lowering.parallel import CompilePool
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import INSTALL_COMPILER
from terrazzo.ops import activation
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_layers import Linear
from terrazzo.ops.model_requests import layer_requests
from terrazzo.ops.products.table import BY_RECORD
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from terrazzo.ops.weight.base import AnyPacked as Packed

Requests = list[KernelRequest]
LOG = logging.getLogger("terrazzo")


def requests_of(wanted: Wanted, symmetric: bool, bias: bool, most: int, target: Target, top_k: int = 1) -> Requests:
    """The kernels of a layer for 1 to `most` tokens of a step.

    Args:
        symmetric: W4A16: whether it has no plane of zero points. top_k: experts of a token.
    """
    own = (wanted.n, wanted.k, wanted.kernel_group, symmetric, wanted.dtype, bias, wanted.experts)
    return _requests(Linear(wanted.operator, "", *own), wanted.dtype, most, target, top_k)


def requests_of_packed(
    packed: Packed, dtype: str, bias: bool, most: int, target: Target, experts: int = 0, top_k: int = 1
) -> Requests:
    """The same of a packed weight; `dtype` of activations."""
    own = (packed.group_size, getattr(packed, "symmetric", True), getattr(packed, "scale_dtype", dtype), bias, experts)
    return _requests(Linear(packed._product.record, "", packed.n, packed.k, *own), dtype, most, target, top_k)


def _requests(kind: Linear, dtype: str, most: int, target: Target, top_k: int) -> Requests:
    serving = Serving(target, dtype, max_tokens=most, norms=(False,), smooth=False)
    return list(dict.fromkeys(layer_requests(kind, serving, top_k)))


def gate_requests(inner: int, operator: str, name: str, dtype: str, most: int, target: Target) -> Requests:
    """What stands between the two products of experts: the gate, and bytes of its result where `operator` reads them.

    Args:
        inner: features of the down projection. name: of `ops.activation`. most: rows of a step, one for each pick.
    """
    if inner % rows.VECTOR or inner > rows.MAX_COLUMNS:
        return []
    m = Serving(target, dtype, max_tokens=most).tokens(rows.tokens(target))
    quant = BY_RECORD[operator].x.quant
    return activation.kernel_requests(inner, m=m, dtype=dtype, target=target, activation=name, quant=quant)


def lacking(requests: Iterable[KernelRequest]) -> str | None:
    """Why kernels cannot be had: they are in no cache or bundle and nothing here compiles, or no cache can be used.

    None if they can.
    """
    try:
        missing = ", ".join(compiler().missing)
        absent = [request for request in requests if not is_ready(request)]
        if absent and not missing:
            cache.room()
    except TerrazzoError as error:
        return str(error)
    if not absent or not missing:
        return None
    return f"{len(absent)} kernels are not compiled yet, and {missing} is missing to do it; {INSTALL_COMPILER}"


class Compiling:
    """Kernels that are compiled while the engine starts, of one process.

    Args:
        settings: bundle, strict, workers. log: the engine's.
    """

    def __init__(self, settings: Settings, target: Target | None = None, log: logging.Logger = LOG) -> None:
        self.settings, self.log = settings, log
        self.pool: CompilePool | None = None
        self.pending: dict[KernelRequest, None] = {}
        self.failed: dict[KernelRequest, CompileError] = {}
        self.changed = threading.Condition()
        self.started = 0.0
        if settings.bundle is not None:
            from terrazzo.lowering.bundle import load_bundle

            found = load_bundle(settings.bundle, target=target, strict=settings.strict)
            self.log.info("terrazzo: %d kernels in bundle %s", len(found.requests), settings.bundle)

    def want(self, requests: Iterable[KernelRequest]) -> None:
        """Start compiling those that are neither in the cache, nor in the bundle, nor under way.

        Raises:
            BundleError: with `strict`, one that the bundle lacks. ToolchainError: a compiler is missing.
        """
        with self.changed:
            new = [r for r in dict.fromkeys(requests) if r not in self.pending and r not in self.failed]
        new = [request for request in new if not is_ready(request)]
        if not new:
            return
        if self.settings.strict:
            raise BundleError(
                f"{len(new)} kernels are not in bundle {self.settings.bundle}, {new[0]} first; make it again with "
                "`terrazzo compile MODEL --max-tokens N`, or leave out strict"
            )
        compiler().require(f"{len(new)} kernels")
        with self.changed:
            if self.pool is None:
                self.pool = CompilePool(self._done, self.settings.workers)
            if not self.pending:
                self.started = time.monotonic()
            self.pending |= dict.fromkeys(new)
        counts = ", ".join(f"{n} {name}" for name, n in sorted(Counter(r.name for r in new).items()))
        self.log.info("terrazzo: compiling %d kernels (%s) in up to %d processes", len(new), counts, self.pool.most)
        for request in new:
            self.pool.submit(request)

    def _done(self, request: KernelRequest, outcome: object) -> None:
        with self.changed:
            if isinstance(outcome, CompileError):
                self.failed[request] = outcome
            self.pending.pop(request, None)
            if not self.pending:
                self.log.info("terrazzo: all kernels are compiled, %.0f s", time.monotonic() - self.started)
            self.changed.notify_all()

    def wait(self, requests: Iterable[KernelRequest]) -> None:
        """Return when these are compiled.

        Raises:
            CompileError: one of them cannot be.
        """
        needed = list(requests)
        with self.changed:
            self.changed.wait_for(lambda: not any(request in self.pending for request in needed))
            for request in needed:
                if request in self.failed:
                    raise self.failed[request]
            if self.pool is not None and not self.pending:
                self.pool.close()
                self.pool = None
