"""`prepare`: what a model will launch is compiled ahead, on all cores, before its first call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import CompileError

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target


def prepare(
    model: torch.nn.Module,
    tokens: int | Iterable[int] | None,
    *,
    dtype: torch.dtype | None = None,
    kv: tuple[str, str] | None = None,
    page: int = 128,
    target: str | Target | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> list[KernelRequest]:
    """Compile the kernels of a model's layers in parallel, and show how far it is; what is there is not made again.

        model = terrazzo.load("model/")
        terrazzo.prepare(model, [1, 512])

    Args:
        model: of `terrazzo.load`, or any module that holds modules of `terrazzo.nn`.
        tokens: numbers of tokens of a step; None for every number, which is some hundred kernels.
        dtype, kv, page, target: see `terrazzo.nn.preparing.kernel_requests`.
        workers: processes, by default one for each CPU. quiet: print nothing.

    Returns:
        The kernels, all of which are in an installed wheel, a loaded bundle or the cache now.

    Raises:
        ArgumentError, TargetError: see there. CompileError: a kernel that cannot be compiled; the others are there.
        ToolchainError: something has to be compiled and a compiler is missing.
    """
    from terrazzo.building import compile_with_progress
    from terrazzo.nn.preparing import kernel_requests

    requests = kernel_requests(model, tokens, dtype=dtype, kv=kv, page=page, target=target)
    outcomes = compile_with_progress(requests, workers, quiet)
    failed = [outcome for outcome in outcomes if isinstance(outcome, CompileError)]
    if failed:
        raise CompileError(f"{len(failed)} of {len(requests)} kernels cannot be compiled, the first: {failed[0]}")
    return requests
