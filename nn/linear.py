"""`Linear`: a layer with a 4-bit weight in the place of torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.nn.formats import FAMILIES, Format, facts_of
from terrazzo.nn.module import PackedModule, stored_weight
from terrazzo.ops import weights
from terrazzo.ops.products.codes import get_codes
from torch import nn


class Linear(PackedModule):
    """y = x w^T + bias, x float16 or bfloat16 [..., in_features], w in 4-bit codes.

    On a GPU forward is the operator's `gemm`, one opaque node for torch.compile and torch.export. On a CPU torch
    multiplies the dequantized weight (`nn.cpu`). Under `torch.autocast` x is cast as for `torch.nn.functional.linear`.
    There is no gradient.

    Args:
        packed: a PackedWeight of w4a16, w4a8, w4a8.fp8 or w4ax; its tensors become the module's buffers.

    Raises:
        ArgumentError: something else.
    """

    def __init__(self, packed: Any) -> None:
        facts_of(packed)  # refuses experts
        super().__init__(packed)

    @classmethod
    def from_packed(cls, packed: Any) -> Linear:
        """The layer of a packed weight."""
        return cls(packed)

    @classmethod
    def from_float(
        cls, source: nn.Linear | torch.Tensor, format: str | Format = "w4a16-g128", *, bias: Any = None, **options: Any
    ) -> Linear:
        """Quantize a float layer, or a weight [N, K], on its device.

        Args:
            format: see `Format.parse`. bias: float [N]; None takes the layer's own.
            options: of the family's `quantize`, as `smooth` (W4A8), `plan` (W4Ax), `scale_dtype` (W4A16), `target`.

        Raises:
            ArgumentError: no layer or weight, an unknown format, values that cannot be quantized.
        """
        if isinstance(source, nn.Linear):
            bias = source.bias if bias is None else bias
            source = source.weight
        if not isinstance(source, torch.Tensor):
            remedy = "pass nn.Linear or its weight"
            raise ArgumentError("source", type(source).__name__, "must be a float layer or weight", remedy)
        bias = None if bias is None else bias.detach()
        return cls(Format.parse(format).quantize(source.detach(), bias=bias, **options))

    @classmethod
    def from_state(cls, state: Mapping[str, torch.Tensor], prefix: str = "") -> Linear:
        """The layer whose `state_dict` this is, under `prefix` ("model.layers.0.mlp.down_proj."); over its tensors.

        Raises:
            ArgumentError, LayoutMismatchError: no such state, or one of another layout.
        """
        made = cls(stored_weight(state, prefix))
        _ = made.packed if not made.words.is_meta else None  # checked now
        return made

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        format: str | Format = "w4a16-g128",
        *,
        bias: bool = False,
        act_order: bool = False,
        smooth: bool = False,
        scale_dtype: torch.dtype = torch.float16,
        blocks8: int = 0,
        order: str = "",
        two_level: bool = True,
        dtype: torch.dtype = torch.float16,
        target: str | None = None,
        device: str | torch.device = "meta",
    ) -> Linear:
        """A layer without values, for a state to be loaded: on meta by `load_state_dict(state, assign=True)`.

        Args:
            bias: whether it has one, of `dtype`. act_order, scale_dtype: W4A16 and W8A16. smooth: W4A8.
            blocks8, order, two_level: W4Ax, see its PackedWeight; a permutation is expected where order is named.
            target: architecture; W4Ax needs one.
        """
        for name, features in (("in_features", in_features), ("out_features", out_features)):
            weights.check_count(name, features, "pass a number of features")
        form = Format.parse(format)
        family, n, k = FAMILIES[form.family], out_features, in_features
        size = k if form.group_size is None else form.group_size
        make = lambda shape, kind: torch.empty(shape, dtype=kind, device=device)
        optional = {"bias": make(n, dtype) if bias else None}
        facts: dict[str, Any] = {"n": n, "k": k, "group_size": size, "target": target}
        if family.weight_format:
            from terrazzo.ops.weight_only.packed import packed_shapes

            if family.choices:  # integers
                facts |= {"scale_dtype": str(scale_dtype).removeprefix("torch."), "symmetric": form.symmetric}
                optional["perm"] = make(k, torch.int32) if act_order else None
            else:
                facts |= {"weight": family.weight_format, "group_size": size if not family.one_group else min(size, k)}
                facts["scale_dtype"] = get_codes(family.weight_format).scales[0]
            known = dict(scale_dtype=facts["scale_dtype"], symmetric=facts.get("symmetric", True))
            both = packed_shapes(n, k, group_size=size, weight=family.weight_format, **known)
            shapes, kinds = dict(zip(("words", "params"), both)), {"words": torch.int32, "params": torch.uint8}
        elif form.family == "w4ax":
            from terrazzo.ops.w4ax.format import ROWS, UNIT_WORDS

            del facts["group_size"]
            if target is None:
                raise ArgumentError("target", None, "W4Ax is packed for a target", "pass 'sm_90a'")
            facts |= {"blocks8": blocks8, "order": order}
            blocks, rows = -(-k // 128), -(-n // ROWS)
            shapes, kinds = {"words": (blocks, rows, UNIT_WORDS)}, {"words": torch.int32}
            optional["permutation"] = make(blocks * 128, torch.int32) if order else None
            optional["channel_scales"] = make(rows * ROWS, torch.float32) if two_level else None
        elif family.codes:
            from terrazzo.ops.w4a8.w8a8.format import packed_shapes as shapes_of

            facts = {"n": n, "k": k, "target": target, "codes": family.codes}
            facts["block"] = form.group_size is not None and k > form.group_size  # as QuantizedWeight reads them
            both = shapes_of(n, k, family.codes, facts["block"])
            shapes = dict(zip(("words", "scales"), both))
            kinds = {"words": torch.int32, "scales": torch.float32}
            optional["smooth"] = make(k, torch.float32) if smooth else None
        else:
            size = facts["group_size"] = 128 if form.group_size is None else size
            unit = _unit(form.family, size)
            shapes = {"words": unit.shape(n, k), "channel_scales": unit.padded(n, k)[:1]}
            kinds = {"words": torch.int32, "channel_scales": torch.float32}
            optional["smooth"] = make(k, torch.float32) if smooth else None
        tensors = {name: make(shape, kinds[name]) for name, shape in shapes.items()}
        layout = family.layout(facts, two_level)
        return cls(family.weight(**tensors, **optional, **facts, layout=layout))

    def forward(self, x: products.Activations, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """y [..., out_features]; `out_dtype` is that of y where x was quantized before, float16 unless given."""
        x = products.autocast(x)
        found = self.on_cpu(x, out_dtype)
        return products.gemm(x, self.packed, out_dtype) if found is None else found


def _unit(family: str, group_size: int) -> Any:
    if family == "w4a8":
        from terrazzo.ops.w4a8.format import unit_layout
    else:
        from terrazzo.ops.w4a8.fp8_format import unit_layout
    return unit_layout(group_size)
