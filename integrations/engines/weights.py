"""From an engine's tensors of a layer to packed weights, and from those to calls.

The loaders of engines end in few forms. All become one first: codes [N, K], scales [N, G], zero points [N, G].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.products.table import PRODUCTS

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.grouped import GroupedWeight
    from terrazzo.ops.weight.base import AnyPacked as Packed

Facts = tuple[str | int | bool, ...]
GROUPS = (32, 64, 128)
ACTIVATIONS = {
    "16" if one.wide else one.x.quant: one.record for one in PRODUCTS if one.conventions.get("compressed_tensors") == 4
}
"""What a product reads besides 4-bit codes -> the operator, by its name in `ops.model_layers.Linear`."""

_E4M3 = ACTIVATIONS["e4m3"]


@dataclass(frozen=True)
class Wanted:
    """What an engine asks of one layer, or of each of its experts.

    Attributes:
        n, k: of this rank's shard. full_k: of the whole layer.
        group_size: input channels for each scale; k where one scale holds all.
        zero_points: whether there are some. act_order: whether channels of a group are scattered.
        dtype: of activations outside, "float16" or "bfloat16". activations: key of ACTIVATIONS.
        weight: name of the stored type, as vLLM has it, "uint4b8", "uint4", "int4".
        experts: how many stand in one launch, 0 for a layer of its own.
    """

    n: int
    k: int
    full_k: int
    group_size: int
    zero_points: bool
    act_order: bool
    dtype: str
    activations: str
    weight: str
    experts: int = 0

    def refusal(self, target: Target | None) -> str | None:
        """Why our kernels cannot take the layer, None if they can; `target` None is a CPU."""
        if self.weight not in ("uint4b8", "uint4", "int4"):
            return f"weights are stored as {self.weight}; 4-bit integers are read (uint4b8, uint4, int4)"
        if self.weight == "uint4" and not self.zero_points:
            return "weights are stored as uint4 without zero points"
        if self.dtype not in ("float16", "bfloat16"):
            return f"activations are {self.dtype}; kernels read float16 and bfloat16"
        if self.activations not in ACTIVATIONS:
            return f"activations are quantized to {self.activations}; there are int8 and e4m3"
        if self.act_order:
            return "channels are in another order than their groups (act-order), which vLLM itself gave up"
        if self.group_size not in GROUPS and self.group_size != self.k:
            many = self.group_size % GROUPS[0] or self.k % self.group_size
            if self.group_size < GROUPS[0] or many:
                return f"groups of {self.group_size} channels; kernels have {GROUPS}, multiples of 32, and one group"
        if self.experts and self.n % 64:
            return f"experts have {self.n} output features on this rank; kernels want multiples of 64"
        if self.activations == "e4m3" and self.zero_points:
            return "zero points beside e4m3 activations, where codes are signed operands"
        if target is None:
            return None
        dtype = {"16": "f16", "int8": "s8", "e4m3": "e4m3"}[self.activations]
        needed = [f"mma.{dtype}", f"wgmma.{dtype}"]
        if not any(target.supports(it) for it in needed):
            return f"{target.name} ({target.arch}) has no {' or '.join(needed)}"
        return None

    @property
    def operator(self) -> str:
        """Record of the product that serves it."""
        return ACTIVATIONS[self.activations]

    @property
    def kernel_group(self) -> int:
        """The group size that the packed weight will have."""
        if self.activations != "16" and self.group_size == self.k and self.k not in GROUPS:
            return GROUPS[-1]  # one scale for a row is kept as groups of 128 with the same factor
        if self.group_size in GROUPS or self.group_size == self.k:
            return self.group_size
        return next(g for g in reversed(GROUPS) if self.group_size % g == 0)


@dataclass(frozen=True)
class Stored:
    """A layer's tensors in one form.

    Attributes:
        codes: int32 [N, K/8], 8 codes in natural order in a word, or int8 [N, K], -8..7.
        scales: float [N, G]. zeros: int32 [ceil(N/8), G] as codes, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


def pack(stored: Stored, wanted: Wanted, requantize: bool = False, target: str | None = None) -> tuple[Packed, str]:
    """(packed weight, why it is not of the family that was asked for or ""), on the tensors' device.

    Scales that W4A8's two levels cannot hold are fitted with `requantize`; otherwise the layer becomes W4A16, which has
    the checkpoint's own weights and activations that are not rounded.

    Raises:
        ArgumentError: tensors that are damaged, or of other shapes than the layer's.
    """
    from terrazzo.ops import w4a8, w4a16

    facts = dict(group_size=-1 if wanted.group_size == wanted.k else wanted.group_size, target=target)
    tensors, why = (stored.codes, stored.scales, stored.zeros, (wanted.n, wanted.k)), ""
    try:
        if wanted.activations == "e4m3":
            return w4a8.fp8.from_compressed_tensors(*tensors, **facts), ""
        if wanted.activations == "int8":
            return w4a8.from_compressed_tensors(*tensors, **facts, requantize=requantize), ""
    except ArgumentError as error:
        why = str(error)
    return w4a16.from_compressed_tensors(*_packed(tensors), **facts), why


def _packed(tensors: tuple) -> tuple:
    """int8 codes as words, which the reader of W4A16 takes."""
    import torch

    codes = tensors[0]
    if codes.dtype != torch.int8:
        return tensors
    whole = torch.nn.functional.pad((codes + 8).to(torch.uint8), (0, -codes.shape[1] % 8))
    return (_words(whole), *tensors[1:])


def tensors_of(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors that a layer keeps: words, and params or channel scales."""
    return packed.words, packed.params if packed._product.wide else packed.channel_scales


def facts_of(packed: Packed) -> Facts:
    """What `product` must know besides the tensors: plain values, which a traced graph holds as constants."""
    p = packed
    own = (p.scale_dtype, p.symmetric) if p._product.wide else ()
    return (p._product.record, p.n, p.k, p.group_size, *own, p.layout, p.target or "")


def register_operators() -> None:
    """torch.library's side of the operators that `product` calls."""
    from importlib import import_module

    for family in ("weight_only", "w4a8"):
        import_module(f"terrazzo.ops.{family}.torch_op")


def product(
    x: torch.Tensor, words: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None, facts: Facts
) -> torch.Tensor:
    """y [..., N] of x [..., K]: one node of a traced graph in W4A16, two in W4A8; see `tensors_of` and `facts_of`.

    `register_operators` comes first.
    """
    import torch

    ops, family = torch.ops.terrazzo, facts[0]
    if len(facts) > 6:
        multiply = getattr(ops, f"{family}_gemm")
        return multiply(x, words, second, None, bias, *facts[1:], "auto")
    _, n, k, group, layout, target = facts
    if family == _E4M3:
        q, scales = ops.w4a8_fp8_quantize(x, None, None, 0.0, target)
        y = ops.w4a8_fp8_gemm(q, scales, words, second, bias, n, k, group, layout, target, x.dtype, "auto")
    else:
        q, scales, sums = ops.w4a8_quantize(x, None, None, 0.0, target)
        y = ops.w4a8_gemm(q, scales, sums, words, second, bias, n, k, group, layout, target, x.dtype, "auto", "auto")
    return y.view(*x.shape[:-1], n)


def pack_experts(
    stored: Stored, wanted: Wanted, requantize: bool = False, target: str | None = None
) -> tuple[GroupedWeight, str]:
    """(GroupedWeight, reason as of `pack`) of experts whose rows lie below each other, [E N, ...] in all tensors."""
    import dataclasses

    from terrazzo.ops.grouped import PER_EXPERT, GroupedWeight

    experts, n = wanted.experts, wanted.n
    tall, reason = pack(stored, dataclasses.replace(wanted, n=experts * n, experts=0), requantize, target)
    fields: dict[str, int | torch.Tensor] = {"n": n}
    for name in PER_EXPERT:
        tensor = getattr(tall, name, None)
        if tensor is None:
            continue
        if tensor.ndim == 1:
            fields[name] = tensor.view(experts, -1).contiguous()
        else:  # blocks of k before blocks of rows
            blocks = tensor.view(tensor.shape[0], experts, -1, tensor.shape[-1])
            fields[name] = blocks.transpose(0, 1).contiguous()
    return GroupedWeight(dataclasses.replace(tall, **fields)), reason


def from_awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor | None) -> Stored:
    """Experts as AWQ stores them: qweight int32 [E, K, N/8], scales [E, G, N], qzeros int32 [E, G, N/8]."""
    codes = _awq_nibbles(qweight).transpose(1, 2)  # [E, N, K]
    zeros = None if qzeros is None else _words(_awq_nibbles(qzeros).transpose(1, 2).flatten(0, 1).T).T
    return Stored(_words(codes.flatten(0, 1)), scales.transpose(1, 2).flatten(0, 1).contiguous(), zeros)


def from_gptq(qweight: torch.Tensor, scales: torch.Tensor) -> Stored:
    """Symmetric experts as GPTQ stores them: qweight int32 [E, K/8, N], scales [E, G, N]."""
    turned = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (qweight, scales)]
    return Stored(*turned)


def nibbles_of(halves: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of two codes in a byte, the first one in its low half."""
    import torch

    return torch.stack([halves & 15, halves >> 4], dim=-1).flatten(-2)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8 C] of int32 [..., C], in the order of columns."""
    from terrazzo.ops.checkpoints.conventions.awq import AWQ_ORDER
    from terrazzo.ops.checkpoints.words import nibbles

    flat = nibbles(words.flatten(0, -2).contiguous())
    return flat.view(*words.shape, 8)[..., list(AWQ_ORDER)].flatten(-2)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """int32 [R, C / 8] of codes [R, C], 8 in natural order in a word."""
    import torch

    even, odd = codes[:, 0::2], codes[:, 1::2]
    return (even | (odd << 4)).to(torch.uint8).contiguous().view(torch.int32)
