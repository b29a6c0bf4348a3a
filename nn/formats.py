"""Names of weight formats ("w4a16-g128"), and what a module must know of a packed weight besides its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.lowering.spelling import did_you_mean
from terrazzo.ops import weights
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import BY_WORD
from terrazzo.ops.weight.base import Packed

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from terrazzo.nn.joined import Option
    from terrazzo.ops.w4ax.fmpq import BlockPlan

VECTORS = ("bias",)
"""Tensors of a weight that a module casts with itself; all others keep their dtype."""
STATE_BYTES = 512
"""Of the tensor that names a state's format; one size for all, so that shapes do not depend on what it says."""


@dataclass(frozen=True)
class Format:
    """How a weight is stored and multiplied; `Format.parse("w4a16-g128")`.

    Attributes:
        family: word of a product. group_size: input channels for each scale, None for one group over all of K.
        symmetric: W4A16 and W8A16 only: no zero points.
    """

    family: str
    group_size: int | None
    symmetric: bool = False

    @property
    def product(self) -> Product:
        """The kind of linear layer."""
        return BY_WORD[self.family]

    @staticmethod
    def parse(text: str | Format, argument: str = "format") -> Format:
        """Of "w4a16", "w4a16-g64", "w4a16-gK-sym", "w4a8-g128", "w4a8-e4m3", "w4ax", "w8a16", "w8a8", "w8a8-e4m3",
        "mxfp4", "mxfp4-e4m3", "mxfp4-mxfp8", "nvfp4", "nf4", "fp8", and of blocks "w8a8-e4m3-g128" and "fp8-g128"; the
        group's default is the first of its family's, of w8a16, w8a8 and fp8 a scale for each row.

        Raises:
            ArgumentError: names `argument`: no such format.
        """
        if isinstance(text, Format):
            return text
        pattern = f"({'|'.join(BY_WORD)})(?:-g([0-9]+|K))?(-sym)?"
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        codes = BY_WORD[found[1]].codes if found else None
        group = (found[2] or str(codes.usual or "K")) if found else ""
        known = found and (codes.one_group if group == "K" else int(group) in codes.groups)
        if not known or (found[3] and not codes.symmetric):
            groups = lambda it: "|".join([*map(str, reversed(it.groups)), *["K"] * it.one_group])
            wanted = ", ".join(
                f"{word}-g{groups(it.codes)}{'[-sym]' * it.codes.symmetric}" for word, it in BY_WORD.items()
            )
            constraint = f"must be one of {wanted} (gK: one group for all of K)"
            remedy = f"{did_you_mean(text, _names())}write a format as w4a16-g128"
            raise ArgumentError(argument, text, constraint, remedy)
        return Format(found[1], None if group == "K" else int(group), bool(found[3]))

    def __str__(self) -> str:
        end = "-sym" if self.symmetric else ""
        return f"{self.family}-g{'K' if self.group_size is None else self.group_size}{end}"

    def plan(self, magnitudes: torch.Tensor) -> BlockPlan:
        """W4Ax's order and blocks for magnitudes [K] of input channels, a quarter of the blocks INT8."""
        return module_of(self.product).plan_blocks(magnitudes, ratio=0.25)

    def quantize_experts(
        self, experts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] | None = None, **options: Option
    ) -> list[Any]:
        """`quantize` of each expert's float weight [N, K]. Those of "w4ax" share a plan, as one product reads them."""
        import torch

        if self.product.planned and options.get("plan") is None:
            for w in experts:
                weights.check_matrix(w)
            largest = torch.stack([w.detach().float().abs().amax(0) for w in experts]).amax(0)
            options["plan"] = self.plan(largest)
        biases = [None] * len(experts) if biases is None else biases
        return [self.quantize(w.detach(), bias, **options) for w, bias in zip(experts, biases)]

    def quantize(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Option) -> Packed:
        """The packed weight of a float one [N, K], on its device; options are as in the family's `quantize`.

        Without a `plan`, "w4ax" takes magnitudes of the weight's columns in the place of calibrated activations.
        """
        codes = self.product.codes
        if self.product.planned:
            weights.check_matrix(weight)
            options["plan"] = options.get("plan") or self.plan(weight.detach().float().abs().amax(0))
        elif len(codes.groups) > 1:
            options["group_size"] = weight.shape[-1] if self.group_size is None else self.group_size
        elif codes.one_group:
            options.setdefault("granularity", "channel" if self.group_size is None else "block")
        if codes.symmetric:
            options.setdefault("symmetric", self.symmetric)
        if self.product.direct:
            options["codes"] = codes.name
        return module_of(self.product).quantize(weight, bias=bias, **options)


class Family:
    """What modules of 0.2 held of their format: their pickles name this class, and what it held is read anew."""


def _names() -> list[str]:
    """All words that name a format."""
    found = []
    for word, codes in ((word, it.codes) for word, it in BY_WORD.items()):
        sizes = ["", *(f"-g{size}" for size in codes.groups), *["-gK"] * codes.one_group]
        found += [f"{word}{size}{end}" for size in sizes for end in ["", *["-sym"] * codes.symmetric]]
    return found


def module_of(product: Product) -> ModuleType:
    """Its public module: `quantize`, `PackedWeight`, `gemm`."""
    return import_module(f"terrazzo.ops.{product.module}")


def product_of(weight: object, argument: str = "weight") -> Product:
    """Of a packed weight; ArgumentError for something else."""
    if isinstance(weight, Packed):
        return weight._product
    constraint = f"must be a PackedWeight of {', '.join(BY_WORD)}"
    raise ArgumentError(argument, weights.kind(weight), constraint, "pack it, or use from_float")


def tensors_of(product: Product) -> tuple[str, ...]:
    """All tensors that a packed weight may have."""
    return tuple(plane.name for plane in product.planes)


def plain_fields(product: Product) -> tuple[str, ...]:
    """Fields of its packed weights that hold no tensor."""
    return ("n", "k", *product.facts, "layout", "target")


def facts_of(weight: Packed) -> dict[str, Any]:
    """What is known of a packed weight besides its tensors, as JSON has it; `experts` is None for one weight."""
    product = product_of(weight)
    facts = {name: getattr(weight, name) for name in plain_fields(product)}
    has = [name for name in tensors_of(product) if getattr(weight, name) is not None]
    return {"family": product.word, **facts, "tensors": has}


def format_of(facts: dict[str, Any]) -> Format:
    """The format of a weight with these facts."""
    k = facts["k"]
    size = facts.get("group_size", 128 if facts.get("block", True) else k)
    one = BY_WORD[facts["family"]].codes.one_group and size == k
    return Format(facts["family"], None if one else size, facts.get("symmetric", False))


def encoded(facts: dict[str, Any]) -> torch.Tensor:
    """uint8 [STATE_BYTES]: the facts as JSON, padded with spaces."""
    import torch

    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > STATE_BYTES:
        raise ArgumentError("weight", len(text), f"its facts must fit {STATE_BYTES} bytes", "shorten the target's name")
    return torch.frombuffer(bytearray(text.ljust(STATE_BYTES)), dtype=torch.uint8).clone()


def decoded(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    """The facts in a tensor that `encoded` made; ArgumentError for another one."""
    facts: object = None
    if tensor.numel() <= STATE_BYTES:
        with suppress(ValueError, TypeError, RecursionError):
            facts = json.loads(bytes(tensor.detach().cpu().tolist()))
    if isinstance(facts, dict) and isinstance(facts.get("family"), str) and facts["family"] in BY_WORD:
        held = facts.get("tensors")
        if isinstance(held, list) and all(isinstance(one, str) for one in held):
            return facts
    raise ArgumentError(name, "other bytes", "must name the format of its weight", "save the module's state again")


def check_same(own: dict[str, Any], stored: dict[str, Any], name: str) -> None:
    """Raise an error unless a stored weight is what a module holds: the same family, sizes, layout and tensors. The
    target may differ: layouts say what bytes mean."""
    for key in dict.fromkeys((*own, *stored)):
        if key != "target" and own.get(key) != stored.get(key):
            make = LayoutMismatchError if key == "layout" else ArgumentError
            constraint = f"its {key} must be {own.get(key)!r}, as the module's, {format_of(own)}"
            remedy = "make the module for this state: Linear.from_state"
            raise make(name, f"{key} {stored.get(key)!r}", constraint, remedy)
