"""What every kind of linear layer answers, for the tuner and for models, and how a model is served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terrazzo.ops.call import plans
from terrazzo.ops.grouped import all_tokens
from terrazzo.ops.quantized import QUANTS

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.launching import Plan
    from terrazzo.ops.model_layers import Linear
    from terrazzo.ops.products.product import Product
    from terrazzo.schedules.problem import Gemm

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    Attributes:
        target: what it runs on. dtype: of activations, "float16" or "bfloat16". linear: its linear layers too.
        kv: formats of keys and values, ("int4", "int4"); none: no attention.
        max_tokens: most tokens of a step, None for any number. m: only these numbers of tokens, in linear layers.
        ranks: of tensor parallelism. q_lens: new tokens of a decode step. page: tokens of a page, 0 for contiguous.
        dequantization: of W4A8 on int8 activations. numerics: of W4A16.
        norms: whether RMSNorm stands in front of W4A8's quantizer, one kernel each. smooth: whether its vector does.
        parts: whether layers that engines join, as q, k and v, are served by themselves, too.
    """

    target: Target
    dtype: str = "float16"
    linear: bool = True
    kv: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None
    m: tuple[int, ...] | None = None
    ranks: int = 1
    q_lens: tuple[int, ...] = (1,)
    page: int = 128
    dequantization: str = "auto"
    numerics: str = "auto"
    norms: tuple[bool, ...] = (False, True)
    smooth: bool = True
    parts: bool = True

    def tokens(self, known: Sequence[int], recorded: Sequence[int] = (), times: int = 1) -> list[int] | None:
        """One M of each bucket up to the one that holds the most tokens, of `known` and of tuned records; None: all.

        Args:
            times: rows of a step for each token.
        """
        if self.m is not None or self.max_tokens is None:
            return None if self.m is None else [times * m for m in self.m]
        most, known = self.max_tokens * times, sorted({*known, *recorded})
        return sorted({*(m for m in known if m < most), next((m for m in known if m >= most), most), most})

    def routed(self, experts: int, top_k: int) -> tuple[int, ...] | None:
        """Rows of all experts together: a step's tokens count once for each expert that they take; None: all."""
        m = self.tokens(all_tokens(experts), times=max(1, top_k))
        return m and tuple(m)

    def rows(self, experts: int, top_k: int) -> list[int]:
        """Rows that experts quantize: a step's tokens ahead of their routing (gate and up), or after it (down)."""
        every = all_tokens(experts)
        routed, step = self.routed(experts, top_k), self.tokens(every)
        return list(every) if routed is None or step is None else sorted({*step, *routed})

    @property
    def smooths(self) -> tuple[bool, ...]:
        """With and without a smooth vector."""
        return (False, True) if self.smooth else (False,)


class Kind(ABC):
    """How the weights of a product are planned, multiplied and served.

    Attributes:
        product: its values.
    """

    def __init__(self, product: Product) -> None:
        self.product = product

    @abstractmethod
    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        """The facts under which records are kept. experts: 0 for a weight alone. group: None takes the usual one.

        Raises:
            ArgumentError: a format that the product does not have.
        """

    @abstractmethod
    def planned(self, facts: Facts) -> plans.Facts:
        """What plans are made of, without a bias."""

    def gemm(self, facts: Facts) -> Gemm:
        """What schedules know of it."""
        return self.planned(facts).gemm()

    def plan(self, m: int, facts: Facts, target: Target) -> Plan:
        """The kernel and its launch, not a kept plan."""
        return plans.plan.__wrapped__(m, self.planned(facts), target)

    @abstractmethod
    def converter(self, facts: Facts) -> str:
        """What decodes the codes."""

    @abstractmethod
    def requests(self, layer: Linear, serving: Serving) -> list[KernelRequest]:
        """The kernels of a layer of a model, its quantizers of activations among them."""

    @abstractmethod
    def experts_requests(self, layer: Linear, serving: Serving, top_k: int) -> list[KernelRequest]:
        """The same of all experts in one launch. top_k: experts that each token of a step takes."""

    def weight_bytes(self, facts: Facts) -> int:
        """Of a packed weight."""
        return self.gemm(facts).weight_bytes

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        """Kernels that a measurement needs besides the product's."""
        return []

    def quant(self, layer: Linear) -> dict[str, Any]:
        """What norms and gates are asked for in front of a layer: 16 bits where it quantizes them itself."""
        quant = self.product.x.quant
        return dict(quant=quant if quant in QUANTS else None)

    def skipped(self, layer: Linear, target: Target) -> str:
        """Why no kernels are named for a layer, or ""."""
        return ""
