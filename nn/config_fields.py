"""Fields of a model's config: those that no decoder of ours obeys are refused, and how many positions there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ = {
    "qwen2": ("head_dim",),
    "qwen3_moe": ("head_dim", "num_local_experts"),
    "mixtral": ("num_experts",),
    "gemma3_text": ("sliding_window_pattern",),
}
"""Fields that transformers' config does not declare and its model reads all the same, by architecture."""
HARMLESS = re.compile(
    r"_.*|.*_token_(id|ids|index)|(bos|eos|pad|unk|cls|sep|mask)_token|.*(dropout|dropout_prob|pdrop|jitter_noise)"
    r"|.*_loss(_\w+)?|initializer_\w+|init_\w+|.*_version|version|unsloth_\w+|transformers\.js_config"
    r"|(tokenizer|processor|training)_\w+|torch_dtype|torchscript|auto_map|model_type|architectures|name_or_path"
    r"|(use_|enable_)?(flash_?att(n|ention)\w*|sdpa|memory_efficient_attention|fused_\w+|gradient_checkpointing\w*)"
    r"|attn_implementation|output_(attentions|hidden_states|past|scores|logits|router_logits)|return_dict\w*|use_cache"
    r"|use_bfloat16|base_model\w*|model_name|license|author|description|summary_\w+|classifier_\w+|problem_type"
    r"|num_labels|id2label|label2id|finetuning_task|task_specific_params|prefix|pruned_heads|tie_encoder_decoder"
    r"|is_decoder|cross_attention_hidden_size|tf_legacy_loss|is_llama_config|pretraining_tp|max_window_layers"
    r"|(model_)?max_(seq|sequence)?_?(len|length)|seq_len(gth)?|initial_context_length|original_max_position_embeddings"
    r"|num_nextn_predict_layers|mtp_\w+|ignore_keys_at_rope_validation|(compression|sparsity)_config"
)
"""Names of fields that a model computes the same with: of training, of tokenizers, of how tensors are stored, of layers
that only guess further tokens. Windows of the layers from `max_window_layers` on are in `layer_types`."""
SCALES = re.compile(r".*(multiplier|_scale|_factor|rotary_pct|scale_\w+|scaling)")
"""Names of fields that are numbers to multiply by, which change nothing at 1."""
ORDERED = {"use_rope": True, "is_causal": True, "use_bidirectional_attention": False}
"""What a flag must say where its absence does not mean False."""
SAME_AS = {
    "hidden_act": "hidden_activation", "hidden_activation": "hidden_act", "experts_per_token": "num_experts_per_tok"
}  # fmt: skip
"""Second names of fields, which must say the same."""
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_fields(config: PretrainedConfig) -> None:
    """Refuse a config with a field that its architecture does not have, unless it is known to change nothing.

    Such a field is read by other code than transformers' model of this architecture, and weights may count on that.

    Args:
        config: of transformers, of a text model.

    Raises:
        ArgumentError: names the field.
    """
    kind, own = config.model_type, _declared(type(config))
    read, generation = READ.get(kind, ()), _generation()
    for name, value in vars(config).items():
        if name in own or name in read or name in generation or HARMLESS.fullmatch(name):
            continue
        if not _changes_nothing(name, value, config):
            constraint = f"is no field of a {kind}: code that reads it makes another model of these weights"
            remedy = (
                "take the code that it was published with; or remove the field from config.json if it changes nothing"
            )
            raise ArgumentError(name, value, constraint, remedy)
    for name in LAYER_TYPES:
        rotary = getattr(config, "rope_parameters", None) or {}
        rotary = rotary.get(name, rotary) if isinstance(rotary, Mapping) else {}
        part = rotary.get("partial_rotary_factor", 1)
        if part not in (None, 1):
            remedy = "take the code that the model was published with"
            constraint = f"is no field of a {kind}: all dimensions of its heads are turned"
            raise ArgumentError("partial_rotary_factor", part, constraint, remedy)


def _changes_nothing(name: str, value: object, config: PretrainedConfig) -> bool:
    """Whether an unknown field says what is so anyway."""
    if name in ORDERED:
        return value in (None, ORDERED[name])
    if name == "layer_types":
        return value is None or tuple(value) == layer_types(config)
    if name in ("sliding_window", "attention_chunk_size"):
        return not value or value >= (getattr(config, "max_position_embeddings", None) or float("inf"))
    if name == "use_sliding_window":
        return bool(value) == bool(getattr(config, "sliding_window", None)) or not value
    if name in ("attention_bias", "qkv_bias"):  # Qwen2's q, k and v have one, and its o has none
        return not value or config.model_type == "qwen2"
    if name in SAME_AS:
        return value in (None, getattr(config, SAME_AS[name], None))
    if name == "num_key_value_groups":
        return value == config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)
    if SCALES.fullmatch(name):
        return value is None or value is False or value == 1
    return value is None or value is False or value in (0, "", [], {})


def _declared(kind: type) -> set[str]:
    """Fields of a class of configs."""
    return {field.name for field in fields(kind)} | set(getattr(kind, "attribute_map", ()))


def _generation() -> set[str]:
    """Settings of generation, which old configs hold, too."""
    from transformers import GenerationConfig

    return set(vars(GenerationConfig()))


def layer_types(config: PretrainedConfig) -> tuple[str, ...]:
    """Of each decoder layer: "full_attention" or "sliding_attention".

    Raises:
        ArgumentError: another kind of attention, or a window without its size.
    """
    count, own = config.num_hidden_layers, _declared(type(config))
    types, window = (getattr(config, name, None) if name in own else None for name in ("layer_types", "sliding_window"))
    found = tuple(types or ("sliding_attention" if window else "full_attention",) * count)
    if len(found) != count or not set(found) <= set(LAYER_TYPES):
        constraint = f"must be one of {LAYER_TYPES} for each of {count} layers"
        raise ArgumentError("layer_types", list(found), constraint, "take the checkpoint's own config.json")
    if "sliding_attention" in found and not (type(window) is int and window > 0):
        constraint = 'must be an integer above 0 where layer_types has "sliding_attention"'
        raise ArgumentError("sliding_window", window, constraint, "take the checkpoint's own config.json")
    return found


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens a sequence may have: `max_position_embeddings`, or what its rotary scaling stretches them to.

    Configs of llama3 and longrope state the stretched number. YaRN's state `original_max_position_embeddings`, and many
    keep that number as `max_position_embeddings`; linear scaling is added to a config in the same way.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if type(stated) is not int or stated < 1:
        return None
    rotary = getattr(config, "rope_parameters", None) or {}
    factor, kind = rotary.get("factor"), rotary.get("rope_type")  # Gemma 3 has several, and states the stretched number
    if not isinstance(factor, int | float) or factor <= 1 or kind not in ("yarn", "linear", "dynamic"):
        return stated
    base = rotary.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(stated, int((base or stated) * factor))


def check_length(longest: int, new: int, limit: int | None, argument: str = "prompts") -> None:
    """Refuse sequences that the model has no positions for.

    Args:
        longest: tokens of the longest sequence. new: tokens that are generated after it. limit: of `positions`; None
            for none. argument: whose sequences they are.

    Raises:
        ArgumentError: names `argument`, or `max_new_tokens` where the sequences alone would fit.
    """
    if limit is None or longest + new <= limit:
        return
    stretch = "a model that was trained on more says so in config.json (max_position_embeddings, rope_parameters)"
    if longest + min(new, 1) > limit:
        behind = f"with {new} new ones, " if new else ""
        constraint = f"{behind}must fit into the model's {limit} positions"
        raise ArgumentError(argument, f"{longest} tokens", constraint, f"pass shorter ones; {stretch}")
    constraint = f"behind a prompt of {longest} tokens must fit into the model's {limit} positions"
    raise ArgumentError("max_new_tokens", new, constraint, f"pass at most {limit - longest}; {stretch}")
