"""What a config claims, held against plain bounds and against the tensors that are there, before anything is built.

One number of a config.json must not cost minutes or all of the memory: transformers makes a list of `num_hidden_layers`
and names of `num_labels` as soon as it reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.data_files import MOST
from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    from terrazzo.nn.architectures import Shape
    from transformers import GenerationConfig

LAYERS, PARTS = 1000, 1 << 16
"""Most decoder layers (the largest published models have some 130), and most heads, experts or labels."""
_BOUNDS = (
    (re.compile(r"\w*(layers?|depth|depths)"), LAYERS),
    (re.compile(r"(num|n)_\w*(heads|experts|labels|groups|blocks|stages|classes)|\w*experts\w*|num_labels"), PARTS),
    (re.compile(r"\w+_(size|dim|heads|window)"), MOST),
)  # fmt: skip
"""Names of fields -> the largest number there."""
REMEDY = "take the checkpoint's own config.json"


def check_plain(config: Mapping[str, Any]) -> None:
    """Refuse numbers of a config.json that no model has, in all of its objects.

    Raises:
        ArgumentError: names the field.
    """
    inside: list[tuple[str, Any]] = [("", config)]
    while inside:
        own, part = inside.pop()
        for name, value in part.items() if isinstance(part, Mapping) else [(own, it) for it in part]:
            if isinstance(value, Mapping | list):
                inside.append((name, value))
            elif type(value) in (int, float) and (type(value) is int or value.is_integer()):
                most = next((most for names, most in _BOUNDS if names.fullmatch(name)), (1 << 63) - 1)
                if abs(value) > most:
                    raise ArgumentError(name, value, f"must be at most {most}", REMEDY)


def check_shape(shape: Shape) -> None:
    """Refuse a `Shape` whose numbers are none that a model can have.

    Raises:
        ArgumentError: names the attribute.
    """
    none = ("experts", "top_k", "offset", "eps")
    for field in fields(shape):
        value, kind = getattr(shape, field.name), str(field.type)
        if kind == "int" and not (type(value) is int and (value > 0 or (value == 0 and field.name in none))):
            raise ArgumentError(field.name, value, "must be a positive integer", REMEDY)
        if kind.startswith("float") and not (kind.endswith("None") and value is None):
            good = type(value) in (int, float) and math.isfinite(value) and (value > 0 or field.name in none)
            if not good or value < 0:
                raise ArgumentError(field.name, value, "must be a positive, finite number", REMEDY)
    if shape.heads % shape.kv_heads:
        constraint = f"is no multiple of {shape.kv_heads} heads of keys and values"
        raise ArgumentError("num_attention_heads", shape.heads, constraint, REMEDY)
    if any(shape.sparse) and not 0 < shape.top_k <= shape.experts:
        constraint = f"must be at least 1, and at most the {shape.experts} experts"
        raise ArgumentError("num_experts_per_tok", shape.top_k, constraint, REMEDY)


def check_tensors(
    shape: Shape, names: Iterable[str], size_of: Callable[[str], Sequence[int]], packed: Container[str] = ()
) -> None:
    """Refuse a `Shape` of more layers, other embeddings or another number of experts than there are tensors of.

    Args:
        names: of all tensors. size_of: one's shape, unread. packed: names of quantized layers, whose tensors have
            shapes of their own.

    Raises:
        ArgumentError: names the config's field.
    """
    names = list(names)
    first = re.compile(r"(|.*\.)layers\.0\.input_(layer)?norm\.weight")
    root = next((found[1] for found in map(first.fullmatch, names) if found), "model.")
    layer = re.compile(rf"{re.escape(root)}layers\.(\d{{1,9}})\.(.*)", re.DOTALL)
    count, routers, embedding = 0, set(), None
    names = [name for name in names if name.removesuffix(".weight") not in packed]
    for name in names:
        if found := layer.fullmatch(name):
            count = max(count, int(found[1]) + 1)
            if re.fullmatch(r"(mlp|block_sparse_moe)\.((gate|router)\.weight|router)", found[2]):
                routers.add(name)
        elif name == f"{root}embed_tokens.weight":
            embedding = name
    if shape.layers > count:
        constraint = f"the checkpoint has tensors of {count} decoder layers"
        raise ArgumentError("num_hidden_layers", shape.layers, constraint, f"{REMEDY}, or get the missing files")
    if embedding is not None and list(seen := size_of(embedding)) != [shape.vocabulary, shape.hidden]:
        constraint = f"must be {[shape.vocabulary, shape.hidden]} by the config"
        raise ArgumentError(embedding, list(seen), constraint, REMEDY)
    for name in sorted(routers)[:1]:
        if list(seen := size_of(name)) != [shape.experts, shape.hidden]:
            constraint = f"must be {[shape.experts, shape.hidden]} by the config"
            raise ArgumentError(name, list(seen), constraint, REMEDY)


def check_ends(stated: GenerationConfig | None, where: str) -> None:
    """Refuse end tokens of a generation config that are no numbers of tokens.

    Raises:
        ArgumentError: names the field.
    """
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(stated, name, None)
        each = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int and -1 <= one <= MOST for one in each):
            constraint = f"must be numbers of tokens, 0..{MOST}, in {where}"
            raise ArgumentError(name, value, constraint, "correct it, or get the file again")
