"""Names of weight formats ("w4a16-g128"), and what a module must know of the weight class behind each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.lowering.spelling import did_you_mean
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch

VECTORS = ("bias",)
"""Tensors of a weight that a module casts with itself; all others keep their dtype."""
STATE_BYTES = 512
"""Of the tensor that names a state's format; one size for all, so that shapes do not depend on what it says."""


@dataclass(frozen=True)
class Family:
    """A class of packed weights.

    Attributes:
        name: what formats begin with. module, operator: where its PackedWeight and its `gemm` are defined.
        tensors: of every weight. optional: of some. groups: group sizes besides one group, and the default first.
        one_group: whether one group over all of K can be asked for. choices: whether "-sym" can be.
        weight_format: of terrazzo.ops.formats, where several share a PackedWeight class.
        usual: the group that a format without one has, "K", if not the first of `groups`.
        quantizes_activations: whether products multiply x in fewer bits.
        codes: of the weight, where several share a PackedWeight class.
    """

    name: str
    module: str
    operator: str
    tensors: tuple[str, ...]
    optional: tuple[str, ...]
    groups: tuple[int, ...]
    one_group: bool = False
    choices: bool = False
    weight_format: str = ""
    usual: str = ""
    quantizes_activations: bool = True
    codes: str = ""

    @property
    def weight(self) -> type:
        """Its PackedWeight class."""
        return import_module(self.module).PackedWeight

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that a weight may have."""
        return (*self.tensors, *self.optional)

    def layout(self, facts: dict[str, Any], two_level: bool = False) -> str:
        """Identity of the layout that this version's kernels read."""
        if self.name == "w4ax":
            from terrazzo.lowering.targets import Target
            from terrazzo.ops.w4ax import format as w4ax

            return w4ax.identity(w4ax.native(Target.parse(facts["target"])), two_level)
        if self.weight_format:
            return import_module("terrazzo.ops.weight_only.packed").layout_identity(self.weight_format)
        if self.name in ("w4a8-e4m3", "mxfp4-e4m3"):
            return import_module(self.module).layout_identity(facts["group_size"])
        if self.codes:
            return import_module(self.module).layout_identity(self.codes)
        if self.name == "w4a8":
            return import_module(self.module).unit_layout(facts["group_size"]).identity
        return import_module(self.module).layout_identity(None)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "w4a16", "terrazzo.ops.weight_only.integers", "terrazzo.ops.w4a16", ("words", "params"), ("perm", "bias"),
            (128, 64, 32), True, True, weight_format="u4", quantizes_activations=False,
        ),
        Family(
            "w8a16", "terrazzo.ops.weight_only.byte_integers", "terrazzo.ops.w8a16", ("words", "params"),
            ("perm", "bias"), (128, 64, 32), True, True, weight_format="u8", usual="K", quantizes_activations=False,
        ),
        Family(
            "mxfp4", "terrazzo.ops.weight_only.format", "terrazzo.ops.mxfp4", ("words", "params"), ("bias",), (32,),
            weight_format="mxfp4", quantizes_activations=False,
        ),
        Family(
            "nvfp4", "terrazzo.ops.weight_only.format", "terrazzo.ops.nvfp4", ("words", "params"), ("bias",), (16,),
            weight_format="nvfp4", quantizes_activations=False,
        ),
        Family(
            "fp8", "terrazzo.ops.weight_only.format", "terrazzo.ops.fp8", ("words", "params"), ("bias",), (128,), True,
            weight_format="fp8", usual="K", quantizes_activations=False,
        ),
        Family(
            "mxfp4-e4m3", "terrazzo.ops.w4a8.mxfp4_format", "terrazzo.ops.mxfp4_fp8", ("words", "channel_scales"),
            ("smooth", "bias"), (32,),
        ),
        Family(
            "w4a8-e4m3", "terrazzo.ops.w4a8.fp8_format", "terrazzo.ops.w4a8", ("words", "channel_scales"),
            ("smooth", "bias"), (128, 64, 32), True,
        ),
        Family(
            "w4a8", "terrazzo.ops.w4a8.format", "terrazzo.ops.w4a8", ("words", "channel_scales"), ("smooth", "bias"),
            (64, 128, 32),
        ),
        Family(
            "w8a8-e4m3", "terrazzo.ops.w4a8.w8a8.format", "terrazzo.ops.w8a8", ("words", "scales"),
            ("smooth", "bias"), (128,), True, usual="K", codes="e4m3",
        ),
        Family(
            "w8a8", "terrazzo.ops.w4a8.w8a8.format", "terrazzo.ops.w8a8", ("words", "scales"),
            ("smooth", "bias"), (), True, usual="K", codes="int8",
        ),
        Family(
            "w4ax", "terrazzo.ops.w4ax.format", "terrazzo.ops.w4ax", ("words",),
            ("channel_scales", "permutation", "bias"), (128,),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """How a weight is stored and multiplied; `Format.parse("w4a16-g128")`.

    Attributes:
        family: key of `FAMILIES`. group_size: input channels for each scale, None for one group over all of K.
        symmetric: W4A16 only: zero point 8 everywhere.
    """

    family: str
    group_size: int | None
    symmetric: bool = False

    @staticmethod
    def parse(text: str | Format, argument: str = "format") -> Format:
        """Of "w4a16", "w4a16-g64", "w4a16-gK-sym", "w4a8-g128", "w4a8-e4m3", "w4ax", "w8a16", "w8a8", "w8a8-e4m3",
        "mxfp4", "mxfp4-e4m3", "nvfp4", "fp8", and of blocks "w8a8-e4m3-g128" and "fp8-g128"; the group's default is the
        first of its family's, of w8a16, w8a8 and fp8 a scale for each row.

        Raises:
            ArgumentError: names `argument`: no such format.
        """
        if isinstance(text, Format):
            return text
        pattern = f"({'|'.join(FAMILIES)})(?:-g([0-9]+|K))?(-sym)?"
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        family = FAMILIES[found[1]] if found else None
        group = (found[2] or family.usual or str(family.groups[0])) if found else ""
        known = found and (family.one_group if group == "K" else int(group) in family.groups)
        if not known or (found[3] and not family.choices):
            groups = lambda f: "|".join([*map(str, f.groups), *["K"] * f.one_group])
            wanted = ", ".join(f"{name}-g{groups(f)}{'[-sym]' * f.choices}" for name, f in FAMILIES.items())
            constraint = f"must be one of {wanted} (gK: one group for all of K)"
            remedy = f"{did_you_mean(text, _names())}write a format as w4a16-g128"
            raise ArgumentError(argument, text, constraint, remedy)
        return Format(family.name, None if group == "K" else int(group), bool(found[3]))

    def __str__(self) -> str:
        end = "-sym" if self.symmetric else ""
        return f"{self.family}-g{'K' if self.group_size is None else self.group_size}{end}"

    def plan(self, magnitudes: torch.Tensor) -> Any:
        """W4Ax's order and blocks for magnitudes [K] of input channels, a quarter of the blocks INT8."""
        return import_module(FAMILIES[self.family].operator).plan_blocks(magnitudes, ratio=0.25)

    def quantize_experts(
        self, experts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] | None = None, **options: Any
    ) -> list[Any]:
        """`quantize` of each expert's float weight [N, K]. Those of "w4ax" share a plan, as one product reads them."""
        import torch

        if self.family == "w4ax" and options.get("plan") is None:
            for w in experts:
                weights.check_matrix(w)
            largest = torch.stack([w.detach().float().abs().amax(0) for w in experts]).amax(0)
            options["plan"] = self.plan(largest)
        biases = [None] * len(experts) if biases is None else biases
        return [self.quantize(w.detach(), bias, **options) for w, bias in zip(experts, biases)]

    def quantize(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> Any:
        """The packed weight of a float one [N, K], on its device; options are those of the family's `quantize`.

        Without a `plan`, "w4ax" takes magnitudes of the weight's columns in the place of calibrated activations.
        """
        module = import_module(FAMILIES[self.family].operator)
        size = weight.shape[-1] if self.group_size is None else self.group_size
        if self.family == "w4ax":
            weights.check_matrix(weight)
            plan = options.pop("plan", None) or self.plan(weight.detach().float().abs().amax(0))
            return module.quantize(weight, plan, bias=bias, **options)
        if FAMILIES[self.family].codes:
            options.setdefault("granularity", "channel" if self.group_size is None else "block")
            return module.quantize(weight, codes=FAMILIES[self.family].codes, bias=bias, **options)
        if self.family in ("mxfp4", "mxfp4-e4m3", "nvfp4"):
            return module.quantize(weight, bias=bias, **options)
        if self.family == "fp8":
            options.setdefault("granularity", "channel" if self.group_size is None else "block")
            return module.quantize(weight, bias=bias, **options)
        if self.family in ("w4a16", "w8a16"):
            options.setdefault("symmetric", self.symmetric)
        make = module.fp8.quantize if self.family == "w4a8-e4m3" else module.quantize
        return make(weight, group_size=size, bias=bias, **options)


def _names() -> list[str]:
    """All words that name a format."""
    found = []
    for name, family in FAMILIES.items():
        sizes = ["", *(f"-g{size}" for size in family.groups), *["-gK"] * family.one_group]
        found += [f"{name}{size}{end}" for size in sizes for end in ["", *["-sym"] * family.choices]]
    return found


def family_of(weight: Any, argument: str = "weight") -> Family:
    """Of a packed weight; ArgumentError for something else."""
    for family in FAMILIES.values():
        if weights.kind(weight).endswith("PackedWeight") and isinstance(weight, family.weight):
            own = getattr(weight, "weight", ""), getattr(weight, "codes", "")
            if family.weight_format in ("", own[0]) and family.codes in ("", own[1]):
                return family
    constraint = f"must be a PackedWeight of {', '.join(FAMILIES)}"
    raise ArgumentError(argument, weights.kind(weight), constraint, "pack it, or use from_float")


@cache
def plain_fields(family: Family) -> tuple[str, ...]:
    """Fields of its weights that hold no tensor."""
    return tuple(field.name for field in fields(family.weight) if field.name not in family.names)


def facts_of(weight: Any) -> dict[str, Any]:
    """What is known of a packed weight besides its tensors, as JSON has it; `experts` is None for one weight."""
    family = family_of(weight)
    facts = {name: getattr(weight, name) for name in plain_fields(family)}
    has = [name for name in family.names if getattr(weight, name) is not None]
    return {"family": family.name, **facts, "tensors": has}


def format_of(facts: dict[str, Any]) -> Format:
    """The format of a weight with these facts."""
    k = facts["k"]
    size = facts.get("group_size", 128 if facts.get("block", True) else k)
    one = FAMILIES[facts["family"]].one_group and size == k
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
    facts: Any = None
    if tensor.numel() <= STATE_BYTES:
        with suppress(ValueError, TypeError, RecursionError):
            facts = json.loads(bytes(tensor.detach().cpu().tolist()))
    if isinstance(facts, dict) and isinstance(facts.get("family"), str) and facts["family"] in FAMILIES:
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
