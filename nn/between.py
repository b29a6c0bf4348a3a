"""The kernels that stand between the products of a decoder's layers, named from its modules: norms, gates, rotary
positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.nn import glue, products
from terrazzo.nn.attention import Attention
from terrazzo.nn.decoder import Decoder, DecoderLayer
from terrazzo.nn.mlp import SparseMLP
from terrazzo.nn.norm import RMSNorm
from terrazzo.ops import activation, launching, norm, rope
from terrazzo.ops.attention.cache.cache import residual_of
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import rope_writing, writing
from terrazzo.ops.w4ax import activations as w4ax_activations
from terrazzo.ops.w4ax import format as w4ax_format
from terrazzo.schedules import rows
from torch import nn


def requests(model: nn.Module, m: Sequence[int] | None, dtype: str, target: Target) -> list[KernelRequest]:
    """Those of all decoders inside a module, for steps of `m` tokens, None for every number."""
    made: dict[KernelRequest, None] = {}
    for decoder in (it for it in model.modules() if isinstance(it, Decoder)):
        for hidden, facts in dict.fromkeys(_norms(decoder)):
            made |= dict.fromkeys(norm.kernel_requests(hidden, m=m, dtype=dtype, target=target, **dict(facts)))
        for width, times, facts in dict.fromkeys(map(_gate, decoder.layers)):
            tokens = None if m is None else [times * each for each in m]
            if width % rows.VECTOR == 0 < width <= rows.MAX_COLUMNS and dict(facts)["activation"] is not None:
                found = activation.kernel_requests(width, m=tokens, dtype=dtype, target=target, **dict(facts))
                made |= dict.fromkeys(found)
        for layer, front, times in _fronts(decoder):
            tokens = None if m is None else tuple(times * each for each in m)
            norm_in_front = front == "residual"
            made |= dict.fromkeys(quantizers(layer, tokens, dtype, target, front=front, norm=norm_in_front))
        for head_dim, style in dict.fromkeys((it.self_attn.head_dim, _style(it.self_attn)) for it in decoder.layers):
            made |= dict.fromkeys(rope.kernel_requests(head_dim, dtype=dtype, norm=style, target=target))
    return list(made)


def quantizers(
    layer: nn.Module, m: Sequence[int] | None, dtype: str, target: Target, *, norm: bool, front: str = "none"
) -> list[KernelRequest]:
    """What makes of 16 bits, or of what stands in front of them, what a W4Ax layer multiplies; `front` as of its
    operator's `kernel_requests`."""
    own, tokens = layer._facts, launching.tokens_of(m)
    facts = dict(dtype=dtype, permuted=bool(own["order"]), norm=norm, granularity=scales_of(layer), front=front)
    facts |= dict(wide=not w4ax_format.native(target), target=target)
    return list(dict.fromkeys(w4ax_activations.plan(each, own["k"], own["blocks8"], **facts) for each in tokens))


def scales_of(layer: nn.Module) -> str:
    """Form of a W4Ax layer's scales."""
    return "two_level" if "channel_scales" in layer._facts["tensors"] else "block"


def _fronts(decoder: Decoder) -> Iterator[tuple[Any, str, int]]:
    """W4Ax layers of a decoder whose quantizer takes in the residual sum or the gate in front, and rows for a token."""
    delta, post = False, None
    for layer in decoder.layers:
        normed = (layer.self_attn.qkv_proj, post), (getattr(layer.mlp, "gate_up_proj", None), layer.post_attention)
        for it, before in normed:
            if delta and before is None and products.mixed(it) is not None and it.in_features % rows.VECTOR == 0:
                yield it, "residual", 1
            delta = True
        post = layer.post_mlp
        mlp, times = (layer.mlp.experts, layer.mlp.top_k) if isinstance(layer.mlp, SparseMLP) else (layer.mlp, 1)
        gate = products.OPERATOR_GATES.get(mlp.activation)
        if gate and products.mixed(mlp.down_proj) is not None and mlp.down_proj.in_features % rows.VECTOR == 0:
            yield mlp.down_proj, gate, times


def turning(
    layer: Attention, formats: tuple[str, str], dtype: str, page: int, target: Target
) -> list[KernelRequest]:  # fmt: skip
    """The kernel that turns new tokens of an attention layer and stores them, where its caches have one."""
    layout = CacheLayout(*formats, layer.head_dim)
    residual = residual_of(layout, None)
    if writing.slides(layout, residual):
        return []
    kind = dict(rotary_dim=layer.head_dim, rope="neox", norm=_style(layer), numerics="fused", target=target)
    return [rope_writing.request(layout, dtype, page, residual, **kind)]


def _style(layer: Attention) -> str:
    """Of the norms of an attention layer's queries and keys."""
    return "none" if layer.norms is None else "llama"


def _form(layer: nn.Module) -> dict[str, Any] | None:
    """How kernels on rows make what a layer multiplies, as their `kernel_requests` want it; None: they do not."""
    form = products.rows_form(layer)
    if form is None:
        return None
    known = {name: form[name] for name in ("quant", "column_scales") if name in form}
    return known | dict(smooth=form.get("smooth") is not None)


def _norms(decoder: Decoder) -> Iterator[tuple[int, tuple[tuple[str, Any], ...]]]:
    """Hidden size and facts of each norm, in the order of a step."""
    delta, post = False, None

    def of(
        it: RMSNorm, before: nn.Module | None, post: RMSNorm | None
    ) -> Iterator[tuple[int, tuple[tuple[str, Any], ...]]]:
        form, hidden = {} if before is None else _form(before), it.weight.numel()
        alike = post is None or post.weight.dtype == it.weight.dtype
        if form is not None and alike and hidden % rows.VECTOR == 0 < hidden <= rows.MAX_COLUMNS:
            facts = dict(residual=delta, post=post is not None, weight_dtype=str(it.weight.dtype)[6:], **form)
            yield hidden, tuple(sorted(facts.items(), key=str))

    for layer in decoder.layers:
        yield from of(layer.input_norm, layer.self_attn.qkv_proj, post)
        delta = True
        before = None if isinstance(layer.mlp, SparseMLP) else layer.mlp.gate_up_proj
        yield from of(layer.mlp_norm, before, layer.post_attention)
        post = layer.post_mlp
    yield from of(decoder.norm, None, post)


def _gate(layer: DecoderLayer) -> tuple[int, int, tuple[tuple[str, Any], ...]]:
    """Width of a layer's gate, rows for each token, and facts."""
    mlp, times = layer.mlp, 1
    if isinstance(mlp, SparseMLP):
        mlp, times = mlp.experts, mlp.top_k
    name = glue.OPERATOR_NAMES.get(mlp.activation)
    if products.mixed(mlp.down_proj) is not None and mlp.activation in products.OPERATOR_GATES:
        name = None  # the quantizer takes it in
    facts = dict(activation=name, **(_form(mlp.down_proj) or {}))
    return mlp.down_proj.in_features, times, tuple(sorted(facts.items(), key=str))
