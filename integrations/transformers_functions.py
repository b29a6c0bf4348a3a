"""Attention and experts as functions of transformers, for models outside of `terrazzo.load`'s architectures.

    from terrazzo.integrations.transformers import new_cache, pack

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float16", device_map="cuda")
    pack(model, "w4a16-g128")  # linear layers and experts, in place
    model.set_attn_implementation("terrazzo")
    model.generate(ids, past_key_values=new_cache(model, len(ids), 4096, kv="int8"), max_new_tokens=64)

Layers of the cache hand new keys and values on as they are; the attention function stores them and reads the packed
ones. Padding takes no room in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import attention as calls
from terrazzo.nn import products
from terrazzo.nn.experts import GroupedLinear
from terrazzo.nn.formats import Format
from terrazzo.nn.linear import Linear
from terrazzo.nn.reading import kv_formats, needs_scales, weights_name
from terrazzo.nn.transformers_cache import PAGE, PagedCache, PagedLayer
from terrazzo.ops import moe
from terrazzo.ops.attention.kv_cache import Batch, KVCache
from terrazzo.ops.grouped import GroupedWeight
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

if TYPE_CHECKING:
    from terrazzo.nn.joined import Option
    from transformers import PreTrainedModel

NAME = "terrazzo"
SKIPPED = ("lm_head", "gate", "router", "embed_out")
"""Ends of names of linear layers that `pack` leaves as they are: heads and routers."""
_LAYER = "terrazzo_layer"
"""Attribute of keys that a layer of our cache has seen: the layer."""


# -- attention ---------------------------------------------------------------------------------------------------------
class FunctionLayer(PagedLayer):
    """A layer of a `FunctionCache`: tells the attention function where keys and values go."""

    def __init__(self, owner: FunctionCache, index: int) -> None:
        super().__init__(owner)
        self.index = index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values alone."""
        key_states = key_states.view(key_states.shape)  # an object of its own
        setattr(key_states, _LAYER, self)
        return key_states, value_states


class FunctionCache(PagedCache):
    """Packed keys and values of a batch of sequences; see `new_cache`.

    Args:
        kv: the cache. batch: number of sequences that are made in it.
        whole: whether nobody else uses `kv`, which then may grow.
    """

    def __init__(self, kv: KVCache, batch: int, whole: bool = False) -> None:
        self.changed()
        super().__init__(kv, [FunctionLayer(self, index) for index in range(len(kv.pages))], batch, whole)

    def changed(self) -> None:
        self.batch: Batch | None = None
        self.seen: set[int] = set()
        self.width, self.mask = 0, None

    def of(self, layer: int, width: int, mask: torch.Tensor | None) -> Batch:
        """The batch of this forward of the model: made by the first layer, the same for the others.

        Args:
            width: columns that the forward adds. mask: bool [B, columns so far], False for padding, or None.
        """
        if self.batch is None or layer in self.seen or width != self.width:
            newest = None if mask is None else mask[:, -width:].bool()
            self.mask = None if newest is None or bool(newest.all()) else newest
            new = [width] * len(self.sequences) if self.mask is None else self.mask.sum(1).tolist()
            self.batch = self.kv.extend(dict(zip(self.sequences, new)))
            self.note(width, self.mask)
            self.width, self.seen = width, set()
        self.seen.add(layer)
        return self.batch


def new_cache(
    model: PreTrainedModel, batch: int, tokens: int, kv: str | tuple[str, str] | None = None
) -> FunctionCache:
    """A cache for a transformers model whose attention implementation is "terrazzo".

    Args:
        model: of transformers, on the device of its caches. batch: sequences. tokens: most of one sequence.
        kv: format of keys and values, one name or a pair; None keeps the model's 16 bits.

    Raises:
        ArgumentError: a format or a head_dim that no kernel reads, chunked attention, a cache in a layer's own form.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ArgumentError("model", type(model).__name__, "must be a transformers model", "pass one that is loaded")
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        constraint = "are layers that the attention function does not serve"
        raise ArgumentError("layer_types", sorted(unknown), constraint, "use another attention implementation")
    heads, formats = config.num_attention_heads, kv_formats(weights_name(model.dtype) if kv is None else kv)
    if static := needs_scales(formats):
        raise ArgumentError("kv", static[0], "needs calibrated scales", "use int8 or int4, or make a KVCache")
    cache = KVCache(
        *formats, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        pages=batch * -(-tokens // PAGE), page_size=PAGE, sequences=batch, max_tokens=tokens,
        layers=config.num_hidden_layers, device=model.device,
    )  # fmt: skip
    return FunctionCache(cache, batch, whole=True)


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention [B, T, H, D] of new tokens [B, H, T, D] over the cache that has seen their keys.

    Args:
        attention_mask: of `mask_function`: bool [B, columns so far], or None. s_aux: a sink for each head.
    """
    layer = getattr(key, _LAYER, None)
    if layer is None:
        remedy = "pass past_key_values=new_cache(model, batch, tokens)"
        raise ArgumentError("past_key_values", None, f'attention "{NAME}" needs a cache of its own', remedy)
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
    if not causal or dropout or key.shape[2] != query.shape[2]:
        remedy = "use another attention implementation for this layer"
        raise ArgumentError("is_causal", type(module).__name__, "must be causal self-attention in eval mode", remedy)
    if getattr(module, "layer_idx", layer.index) != layer.index:
        constraint = f"reads keys of layer {layer.index}: layers that share a cache are not served"
        raise ArgumentError("layer_idx", module.layer_idx, constraint, "use another attention implementation")
    rows, heads, width, dim = query.shape
    if attention_mask is not None and attention_mask.dim() != 2:
        constraint = "must be the padding mask [batch, columns]"
        raise ArgumentError("attention_mask", list(attention_mask.shape), constraint, "pass the tokenizer's")
    batch = layer.owner.of(layer.index, width, attention_mask)
    sinks = None if s_aux is None else s_aux.detach().float()
    options = dict(scale=scaling, softcap=float(softcap or 0.0), window=int(sliding_window or 0), sinks=sinks)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if width == 1 and layer.owner.mask is None:
        calls.append(batch, k.contiguous(), v.contiguous(), layer.index)
        return calls.decode(batch, q.contiguous(), layer.index, **options), None
    mask = layer.owner.mask
    if not sum(batch.new):  # padding alone
        return query.new_zeros(rows, width, heads, dim), None
    q, k, v = (x.flatten(0, 1).contiguous() if mask is None else x[mask] for x in (q, k, v))
    y = calls.prefill(batch, q, k, v, layer.index, **options)
    calls.store(batch, k, v, layer.index)
    if mask is None:
        return y.view(rows, width, heads, dim), None
    return y.new_zeros(rows, width, heads, dim).masked_scatter_(mask[..., None, None], y), None


def mask_function(*args: object, attention_mask: torch.Tensor | None = None, **kwargs: object) -> torch.Tensor | None:
    """The padding mask as it is: causality and windows are the attention function's own."""
    if kwargs.get("allow_is_causal_skip") is False:
        constraint = "is more than causal attention with padding (packed sequences, or a model's own mask)"
        raise ArgumentError("attention_mask", NAME, constraint, "use another attention implementation")
    return attention_mask


# -- experts -----------------------------------------------------------------------------------------------------------
class PackedExperts(nn.Module):
    """Both packed products of a transformers module of experts.

    Args:
        up: of gate and up projections as the module orders them, or of up alone. down: of down projections.
    """

    def __init__(self, up: GroupedWeight, down: GroupedWeight) -> None:
        super().__init__()
        self.up_proj, self.down_proj = GroupedLinear(up), GroupedLinear(down)


def experts_function(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[T, hidden] of x [T, hidden]: experts top_k_index [T, top_k], weighted by top_k_weights, one launch a product."""
    packed = getattr(module, NAME, None)
    if packed is None:
        constraint = "has float experts, which no operator multiplies"
        raise ArgumentError("experts_implementation", type(module).__name__, constraint, 'pack(model, "w4a16-g128")')
    x, up, down = hidden_states, packed.up_proj, packed.down_proj
    routing = moe.sort_by_expert(top_k_index, up._facts["experts"])
    h = up(moe.gather(products.quantize(x, up.packed), routing), routing.offsets, x.dtype)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = down(products.quantize(h, down.packed), routing.offsets, x.dtype)
    return moe.combine(y, routing, top_k_weights).to(x.dtype)


def pack(model: nn.Module, format: str | Format, *, skip: tuple[str, ...] = SKIPPED, **options: Option) -> int:
    """Quantize the linear layers and experts of a transformers model in place; how many modules.

    Experts of models that take `experts_implementation` become "terrazzo"; float weights are freed one after another.

    Args:
        format: as "w4a16-g128". skip: ends of names that stay as they are.
        options: of the format's quantizer.

    Raises:
        ArgumentError: no such format; experts of a form that no operator has.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "must be a torch.nn.Module", "pass a transformers model")
    form, count, sparse = Format.parse(format), 0, False
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith(tuple(skip)):
            model.set_submodule(name, Linear.from_float(module, form, **options))
        elif hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            _pack_experts(name, module, form, options)
            sparse = True
        else:
            continue
        count += 1
    if sparse:
        try:
            model.set_experts_implementation(NAME)
        except ValueError:  # releases that know a list of names: their modules ask the config, not the list
            model.config._experts_implementation = NAME
    return count


def _pack_experts(name: str, module: nn.Module, form: Format, options: dict[str, Option]) -> None:
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        constraint = "has a norm behind each expert, or experts on other ranks"
        raise ArgumentError(name, type(module).__name__, constraint, "leave it out: skip=")
    made = []
    for leaf in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weights, biases = getattr(module, leaf).detach(), getattr(module, f"{leaf}_bias", None)
        rows = [weight.T.contiguous() if module.is_transposed else weight for weight in weights]
        each = None if biases is None else [bias.detach() for bias in biases]
        made.append(GroupedWeight.stack(form.quantize_experts(rows, each, **options)))
        delattr(module, leaf)
        if biases is not None:
            delattr(module, f"{leaf}_bias")
    setattr(module, NAME, PackedExperts(*made))


def register() -> None:
    """Make all three known to transformers under "terrazzo"; doing it again changes nothing."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function)
