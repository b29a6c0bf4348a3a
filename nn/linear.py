"""`Linear`: a layer with a 4-bit weight in the place of torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.nn.formats import Format, facts_of, module_of, plain_fields
from terrazzo.nn.module import PackedModule, stored_weight
from terrazzo.ops import weights
from terrazzo.ops.products.planes import UNIT_K, Size
from terrazzo.ops.weight_only.entry import CALLS as WIDE
from torch import nn

if TYPE_CHECKING:
    from terrazzo.nn.joined import Option
    from terrazzo.ops.weight.base import AnyPacked as Packed


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

    def __init__(self, packed: Packed) -> None:
        facts_of(packed)  # refuses experts
        super().__init__(packed)

    @classmethod
    def from_packed(cls, packed: Packed) -> Linear:
        """The layer of a packed weight."""
        return cls(packed)

    @classmethod
    def from_float(
        cls,
        source: nn.Linear | torch.Tensor,
        format: str | Format = "w4a16-g128",
        *,
        bias: torch.Tensor | None = None,
        **options: Option,
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
        product, n, k = form.product, out_features, in_features
        codes, size = product.codes, in_features if form.group_size is None else form.group_size
        if product.planned and target is None:
            raise ArgumentError("target", None, "W4Ax is packed for a target", "pass 'sm_90a'")
        scale = str(scale_dtype).removeprefix("torch.") if codes.symmetric else codes.scales[0]
        if scale not in codes.scales:
            raise ArgumentError("scale_dtype", scale, f"must be one of {codes.scales}", "pass torch.float16")
        group = UNIT_K if product.converted and form.group_size is None else size
        held = min(group, k) if codes.one_group and codes.row_factors else group
        facts = {
            "n": n, "k": k, "target": target, "group_size": held,
            "weight": codes.name, "codes": codes.name, "block": size < k, "scale_dtype": scale,
            "symmetric": form.symmetric, "blocks8": blocks8, "order": order,
        }  # fmt: skip
        own = Size(n, k, group, scale, codes.symmetric and not form.symmetric, size < k)
        vectors = {
            "bias": (bias, n, dtype), "perm": (act_order, k, torch.int32), "smooth": (smooth, k, torch.float32),
            "permutation": (bool(order), own.units * UNIT_K, torch.int32),
            "channel_scales": (two_level, own.rows, torch.float32),
        }  # fmt: skip
        shapes, tensors = product.shapes(own), {}
        for plane in product.planes:
            if plane.name in shapes:
                has, shape, kind = True, shapes[plane.name], getattr(torch, plane.dtype)
            else:
                has, shape, kind = vectors[plane.name]
            tensors[plane.name] = torch.empty(shape, dtype=kind, device=device) if has else None
        plain = {name: facts[name] for name in plain_fields(product) if name in facts}
        made = module_of(product).PackedWeight(**tensors, **plain, layout="")
        return cls(replace(made, layout=made.expected_layout()))

    def forward(self, x: products.Activations, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """y [..., out_features]; `out_dtype` is that of y where x was quantized before, float16 unless given."""
        on_gpu = type(x) is torch.Tensor and x.is_cuda
        if not on_gpu or torch.is_autocast_enabled("cuda"):
            x = products.autocast(x)
            found = self.on_cpu(x, out_dtype)
            if found is not None:
                return found
        elif self.wide:
            return WIDE.gemm(x, self.packed, None, None, None, WIDE.usual)
        return products.gemm(x, self.packed, out_dtype)
