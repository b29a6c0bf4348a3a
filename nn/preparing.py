"""The kernels that the layers of a model will launch, named before their first call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.nn import between
from terrazzo.nn.attention import Attention
from terrazzo.nn.experts import GroupedLinear
from terrazzo.nn.linear import Linear
from terrazzo.nn.mlp import SparseMLP
from terrazzo.nn.module import PackedModule
from terrazzo.ops import attention, launching, model_requests, w4ax, w8a8
from terrazzo.ops.grouped import all_tokens
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_layers import Linear as Kind
from terrazzo.ops.w4a8.w8a8 import op as w8a8_op
from torch import nn

__all__ = ["kernel_requests"]

DTYPES = ("float16", "bfloat16")


def __dir__() -> list[str]:
    return sorted(__all__)


def kernel_requests(
    model: nn.Module,
    tokens: int | Iterable[int] | None,
    *,
    dtype: torch.dtype | None = None,
    kv: tuple[str, str] | None = None,
    page: int = 128,
    target: str | Target | None = None,
) -> list[KernelRequest]:
    """The kernels of all Terrazzo modules inside a module, each once: layers, experts, quantizers, attention, and what
    stands between the products of a decoder.

    Args:
        model: of `terrazzo.load`, or any module that holds modules of `terrazzo.nn`.
        tokens: numbers of tokens of a step, [1, 512]; None for every number.
        dtype: of activations, float16 or bfloat16; None takes the dtype of the module's floating parameters or, if it
            has none, of its W4A16 scales, else float16.
        kv: formats of keys and values; None takes those that `terrazzo.load` was called with. page: tokens of a page.
        target: GPU; None takes the module's, or the current one.

    Raises:
        ArgumentError: no numbers of tokens, a module without Terrazzo layers, another dtype.
        TargetError: there is no GPU, and no target.
    """
    if not isinstance(model, nn.Module):
        remedy = "pass a model of terrazzo.load, or modules of terrazzo.nn"
        raise ArgumentError("model", type(model).__name__, "must be a torch.nn.Module", remedy)
    many = tuple(tokens) if isinstance(tokens, Iterable) and not isinstance(tokens, str) else tokens
    launching.tokens_of(many)
    m = (many,) if isinstance(many, int) else many
    if m == ():
        raise ArgumentError("tokens", tokens, "must be one number of tokens or more", "pass [1, 512], or None for all")
    if kv is not None and (not isinstance(kv, tuple | list) or [type(it) for it in kv] != [str, str]):
        raise ArgumentError("kv", kv, "must be two formats, of keys and of values", "pass ('int4', 'int4')")
    layers = [module for module in model.modules() if isinstance(module, PackedModule)]
    if not layers and not any(isinstance(module, Attention) for module in model.modules()):
        remedy = "pass a model of terrazzo.load, or modules of terrazzo.nn"
        raise ArgumentError("model", type(model).__name__, "must hold layers of terrazzo.nn", remedy)
    at = Target.detect(_device_of(model)) if target is None else Target.parse(target)
    form = str(dtype or _dtype_of(model, layers)).removeprefix("torch.")
    if form not in DTYPES:
        raise ArgumentError("dtype", form, f"must be one of {DTYPES}", "pass torch.float16")
    made: dict[KernelRequest, None] = {}
    serving = Serving(at, form, m=m)
    for kind, top_k in dict.fromkeys(_kinds(model)):
        made |= dict.fromkeys(model_requests.layer_requests(kind, serving, top_k))
    of_bytes = {f"{it._facts} {top_k}": (it, top_k) for it, top_k in _products(model) if it.kind.direct}
    for module, top_k in of_bytes.values():
        made |= dict.fromkeys(_of_bytes(module, m, top_k, form, at))
    of_blocks = {f"{it._facts} {top_k}": (it, top_k) for it, top_k in _products(model) if it.kind.planned}
    for module, top_k in of_blocks.values():
        made |= dict.fromkeys(_of_blocks(module, m, top_k, form, at))
    formats = kv or next((it.formats for it in model.modules() if hasattr(it, "formats")), None)
    for facts in dict.fromkeys(_heads(model)) if formats else ():
        options = dict(facts, dtype=form, page=page, target=at, prefill=m is None or max(m) > 1)
        made |= dict.fromkeys(attention.kernel_requests(*formats, **options))
    for layer in (it for it in model.modules() if isinstance(it, Attention)) if formats else ():
        made |= dict.fromkeys(between.turning(layer, formats, form, page, at))
    return list(made | dict.fromkeys(between.requests(model, m, form, at)))


def _products(model: nn.Module) -> Iterator[tuple[Linear | GroupedLinear, int]]:
    """Each layer with a weight, and how many experts a token takes."""
    top_k = {id(it.experts): it.top_k for it in model.modules() if isinstance(it, SparseMLP)}
    taken = {id(part): top_k.get(id(it), 1) for it in model.modules() for part in it.children()}
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            yield module, taken.get(id(module), 1)


def _kinds(model: nn.Module) -> Iterator[tuple[Kind, int]]:
    """Each layer but those of W8A8 and W4Ax as `model_requests` knows it, and how many experts a token takes."""
    for module, top_k in _products(model):
        facts = module._facts
        if module.kind.direct or module.kind.planned:
            continue
        own = (facts.get("group_size", 128), facts.get("symmetric", False), facts.get("scale_dtype", "float32"))
        more = (module.bias is not None, facts.get("experts", 0))
        yield Kind(module.kind.record, "", facts["n"], facts["k"], *own, *more), top_k


def _of_bytes(
    module: Linear | GroupedLinear, m: tuple[int, ...] | None, top_k: int, dtype: str, target: Target
) -> list[KernelRequest]:
    """The kernels of a W8A8 layer, which depend on how its activations are quantized."""
    own = module._facts
    form = {name: own[name] for name in ("codes", "block")} | dict(zeros=own["asymmetric"] or own["input_zero"] != 0)
    before = dict(static=own["input_scale"] is not None, smooth="smooth" in own["tensors"])
    before["ue8m0"] = own["ue8m0"]
    n, k, facts = own["n"], own["k"], dict(target=target, bias=module.bias is not None)
    experts = own.get("experts")
    if not experts:
        return w8a8.kernel_requests(n, k, **form, **before, **facts, m=m, dtype=dtype)
    routed = None if m is None else tuple(top_k * it for it in m)
    found = w8a8.grouped_requests(n, k, experts, **form, **facts, m=routed, out_dtype=dtype)
    # gate and up quantize tokens ahead of their routing, down behind it
    rows = all_tokens(experts) if m is None else launching.tokens_of((*m, *routed))
    return found + w8a8_op.quantizers(k, **form, **before, m=rows, dtype=dtype, target=target)


def _of_blocks(
    module: Linear | GroupedLinear, m: tuple[int, ...] | None, top_k: int, dtype: str, target: Target
) -> list[KernelRequest]:
    """The kernels of a W4Ax layer, its quantizer with and without RMSNorm among them."""
    own, scales = module._facts, between.scales_of(module)
    facts = dict(blocks8=own["blocks8"], bias=module.bias is not None, target=target)
    n, k, experts = own["n"], own["k"], own.get("experts")
    if not experts:
        found = w4ax.kernel_requests(n, k, **facts, m=m, dtype=None, out_dtype=dtype, granularity=scales)
        rows = m
    else:
        routed = None if m is None else tuple(top_k * it for it in m)
        found = w4ax.grouped_requests(n, k, experts, **facts, m=routed, out_dtype=dtype)
        # gate and up quantize tokens ahead of their routing, down behind it
        rows = all_tokens(experts) if m is None else (*m, *routed)
    before = (between.quantizers(module, rows, dtype, target, norm=norm) for norm in (False, True))
    return [*found, *(it for made in before for it in made)]


def _heads(model: nn.Module) -> Iterator[tuple[tuple[str, int | bool], ...]]:
    """Facts of each attention layer that its kernels depend on."""
    for it in model.modules():
        if isinstance(it, Attention):
            softcap, sinks = bool(it.softcap), it.sinks is not None
            facts = dict(heads=it.heads, kv_heads=it.kv_heads, head_dim=it.head_dim, softcap=softcap, sinks=sinks)
            yield tuple(facts.items())


def _device_of(model: nn.Module) -> int | None:
    """Index of the GPU that holds the first of a model's tensors there, None where none does: the current one."""
    held = (tensor.device for of in (model.buffers(), model.parameters()) for tensor in of)
    return next((device.index for device in held if device.type == "cuda"), None)


def _dtype_of(model: nn.Module, layers: list[PackedModule]) -> str:
    floats = [t.dtype for t in model.parameters() if t.dtype in (torch.float16, torch.bfloat16)]
    scales = [it._facts["scale_dtype"] for it in layers if it._facts.get("scale_dtype") in DTYPES]
    return str(floats[0]) if floats else scales[0] if scales else "float16"
