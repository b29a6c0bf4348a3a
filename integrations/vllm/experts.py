"""Experts of mixtures: a method of vLLM's that loads 4-bit experts and multiplies them in two launches of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from terrazzo.integrations.engines import kernels, weights
from terrazzo.integrations.engines.experts import Form, moved
from terrazzo.integrations.engines.settings import Settings
from terrazzo.integrations.engines.weights import Wanted
from terrazzo.integrations.vllm.engine import VLLM
from terrazzo.nn import glue, products
from terrazzo.nn.experts import Experts
from terrazzo.ops.grouped import GroupedWeight
from vllm.model_executor.layers.fused_moe import moe_permute_unpermute as sorting
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_tanh"}
"""vLLM's name of a gated activation -> key of `nn.glue.ACTIVATIONS`."""


class TerrazzoExpertsMethod(FusedMoEMethodBase):
    """Experts without expert parallelism; shared experts, routing and the sum over ranks stay vLLM's."""

    def __init__(self, moe: FusedMoEConfig, form: Form, how: Settings) -> None:
        super().__init__(moe)
        self.form, self.how = form, how
        self.experts: Experts | None = None

    @staticmethod
    def wanted(moe: FusedMoEConfig, form: Form) -> tuple[Wanted, Wanted]:
        """(gate and up, down) of this rank."""
        sizes = (moe.hidden_dim, moe.intermediate_size_per_partition, moe.intermediate_size, moe.num_local_experts)
        return form.wanted(*sizes, str(moe.in_dtype).removeprefix("torch."))

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: object,
    ) -> None:
        """Parameters with the names and sides of the checkpoint, which vLLM's loader fills."""
        form, inner = self.form, intermediate_size_per_partition
        scale = FusedMoeWeightScaleSupported.CHANNEL if form.group_size == -1 else FusedMoeWeightScaleSupported.GROUP
        loads = dict(attributes, is_transposed=form.turned, quant_method=scale.value)

        def add(name: str, shape: tuple[int, ...], dtype: torch.dtype, marks: dict[str, object]) -> None:
            made = torch.nn.Parameter(torch.zeros(num_experts, *shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, made)
            set_weight_attrs(made, marks)

        for part, n, k in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            for name, shape, dtype in form.tensors(n, k, params_dtype):
                add(f"{part}_{name}", shape, dtype, loads)
            for name, shape in form.beside(k).items():
                add(f"{part}_{name}", shape, torch.int32, attributes)
            if self.moe.has_bias:
                add(f"{part}_bias", (n,), params_dtype, attributes)
        if (at := VLLM.target()) is not None:
            for each in self.wanted(self.moe, form):
                more = (not form.zero_points, self.moe.has_bias, VLLM.most_tokens(), at, self.moe.experts_per_token)
                VLLM.compiling(self.how).want(kernels.requests_of(each, *more))
            VLLM.compiling(self.how).want(self._gates(each.operator))

    def _gates(self, operator: str) -> kernels.Requests:
        moe, dtype = self.moe, str(self.moe.in_dtype).removeprefix("torch.")
        name = glue.OPERATOR_NAMES[ACTIVATIONS[moe.activation.value]]
        picks = VLLM.most_tokens() * moe.experts_per_token
        return kernels.gate_requests(moe.intermediate_size_per_partition, operator, name, dtype, picks, VLLM.target())

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        packed = []
        for part, wanted in zip(("w13", "w2"), self.wanted(self.moe, self.form)):
            stored = self.form.stored(lambda name, part=part: getattr(layer, f"{part}_{name}").data)
            grouped, reason = weights.pack_experts(stored, wanted, self.how.requantize)
            if reason:
                said = f"experts of {wanted.operator} run in w4a16, with the weights as they are: {reason}"
                VLLM.once(logging.WARNING, said)
            if (bias := getattr(layer, f"{part}_bias", None)) is not None:
                grouped = type(grouped)(replace(grouped.stacked, bias=bias.data))
            packed.append(grouped)
            self._free(layer, part)
        activation = ACTIVATIONS[self.moe.activation.value]
        layer.terrazzo = self.experts = Experts(*packed, activation)
        if packed[0].device.type == "cuda":
            self._prepare(packed)

    @staticmethod
    def _free(layer: RoutedExperts, part: str) -> None:
        """What is packed now; the names stay, of which vLLM asks for a layer's device."""
        for name, old in list(layer.named_parameters(recurse=False)):
            if name.startswith(f"{part}_"):
                layer.register_parameter(name, torch.nn.Parameter(old.data.new_empty(0), requires_grad=False))

    def _prepare(self, packed: list[GroupedWeight]) -> None:
        """Kernels of both products, compiled and launched."""
        moe, device = self.moe, packed[0].device

        def launch(m: int) -> None:
            x = torch.zeros(m, packed[0].k, dtype=moe.in_dtype, device=device)
            ids = torch.arange(m * moe.experts_per_token, device=device).view(m, -1) % len(packed[0])
            routed(self.experts, x, ids, torch.ones(ids.shape, device=device))

        facts = (str(moe.in_dtype).removeprefix("torch."), moe.has_bias, moe.experts_per_token)
        VLLM.hold_experts(packed, self.how, self._gates, launch, facts)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Of vLLM's modular kernels, which are not used."""

    def maybe_make_prepare_finalize(self, routing_tables: tuple | None = None) -> None:
        """Of vLLM's modular kernels, which are not used."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: torch.nn.Module | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return routed(self.experts, x, topk_ids, topk_weights)


@cache
def sorts() -> bool:
    """Whether this build of vLLM has kernels that sort rows by expert, and add them up again."""
    return bool(sorting.moe_permute_unpermute_supported())


def routed(experts: Experts, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """As `experts` does; on a GPU by vLLM's kernels around the products, a tenth of the launches of torch's operators.

    Every pick is of an expert that is here: there is no expert parallelism.
    """
    if not (x.is_cuda and sorts()):
        return experts(x, ids, gates)
    made = products.quantize(x, experts.gate_up_proj.packed)
    held = x if made is x else made.q.view(torch.float8_e4m3fn)  # bytes, which are copied alone
    rows, _, first, places, picks = sorting.moe_permute(held, None, ids, len(experts))
    if made is not x:
        rows = moved(made, rows, picks // ids.shape[1])
    y, out = experts.of_sorted(rows, first.int(), x.dtype), torch.empty_like(x)
    sorting.moe_unpermute(out, y, gates.float(), places, first)
    return out


def refusal(layer: RoutedExperts, form: Form, how: Settings) -> str | None:
    """Why experts are left to vLLM, None if they are taken."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    if not how.experts:
        return "additional_config.terrazzo.experts is false"
    if moe.is_lora_enabled:
        return "LoRA adapters are enabled, which change single experts"
    if parallel.use_ep or parallel.dp_size > 1:
        return "expert or data parallelism; tensor parallelism is taken"
    if moe.activation.value not in ACTIVATIONS:
        return f"activation {moe.activation.value}; there are {tuple(ACTIVATIONS)}"
    if moe.has_bias and parallel.tp_size > 1:
        return "biases and tensor parallelism"
    if layer.apply_router_weight_on_input:
        return "the router's weights are applied to the input"
    if any(getattr(moe, name, None) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")):
        return "an activation with limits"
    found = (VLLM.declined(wanted, how) for wanted in TerrazzoExpertsMethod.wanted(moe, form))
    return next((reason for reason in found if reason is not None), None)


def method_for(layer: torch.nn.Module, form: Form | None, prefix: str) -> TerrazzoExpertsMethod | None:
    """Ours for a layer of experts in a known form, None for all others."""
    if form is None or not isinstance(layer, RoutedExperts):
        return None
    how = VLLM.settings()
    reason = refusal(layer, form, how)
    if reason is not None:
        VLLM.once(logging.INFO, f"experts stay with vLLM's own kernels: {reason}")
        return None
    VLLM.once(logging.INFO, f"experts run on terrazzo ({form.convention}, activations {form.activations})")
    return TerrazzoExpertsMethod(layer.moe_config, form, how)


def form_of_awq(config: QuantizationConfig, layer: torch.nn.Module, prefix: str) -> Form | None:
    """What an AWQ config says of a layer of experts, None where it says nothing that we read."""
    if any(name in prefix for name in getattr(config, "modules_to_not_convert", None) or []):
        return None
    return Form("awq", config.group_size, config.zero_point) if config.weight_bits == 4 else None


def form_of_gptq(config: QuantizationConfig, layer: torch.nn.Module, prefix: str) -> Form | None:
    """What a GPTQ config says; other settings for single layers (`dynamic`) and act-order are vLLM's."""
    if config.dynamic or config.desc_act or getattr(config, "weight_bits", 0) != 4 or not config.is_sym:
        return None
    return Form("gptq", config.group_size)


def form_of_compressed_tensors(config: QuantizationConfig, layer: torch.nn.Module, prefix: str) -> Form | None:
    """What a compressed-tensors config says, the same of gate, up and down."""
    config._add_fused_moe_to_target_scheme_map()
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in ("gate_proj", "up_proj", "down_proj")]
    scheme = schemes[0]
    if scheme is None or any(other != scheme for other in schemes):
        return None
    stored, activations = scheme["weights"], scheme.get("input_activations")
    kind = {"pack-quantized": "packed", "int-quantized": "bytes"}.get(scheme.get("format") or config.quant_format)
    text = lambda value: getattr(value, "value", value)
    if kind is None or stored.num_bits != 4 or text(stored.type) != "int" or stored.dynamic:
        return None
    if text(stored.strategy) not in ("group", "channel") or stored.actorder not in (None, "static", "weight"):
        return None
    reads = "16"
    if activations is not None:
        if activations.num_bits != 8 or text(activations.strategy) != "token" or not activations.dynamic:
            return None
        reads = {"int": "int8", "float": "e4m3"}.get(text(activations.type), "unknown")
    return Form(kind, stored.group_size or -1, not stored.symmetric, reads)


FormOf = Callable[["QuantizationConfig", torch.nn.Module, str], Form | None]
FORMS: dict[str, FormOf] = {
    "awq": form_of_awq,
    "gptq": form_of_gptq,
    "compressed-tensors": form_of_compressed_tensors,
}
"""vLLM's name of a quantization method -> what its config says of experts."""


def register() -> None:
    """Let configs of FORMS ask for our experts first, under all names that vLLM has for them; for all other layers they
    answer as before."""
    originals = {get_quantization_config(name): form_of for name, form_of in FORMS.items()}
    taken = {
        each: _asking(each, form_of) for each, form_of in originals.items() if not hasattr(each, "terrazzo_form_of")
    }
    for name in list(QUANTIZATION_METHODS):
        if (asking := taken.get(get_quantization_config(name))) is not None:
            register_quantization_config(name)(asking)


def _asking(original: type, form_of: FormOf) -> type:
    def get_quant_method(self: QuantizationConfig, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        form = form_of(self, layer, prefix) if isinstance(layer, RoutedExperts) else None
        found = method_for(layer, form, prefix)
        return found if found is not None else original.get_quant_method(self, layer, prefix)

    def _is_fp8_w4a8(weight_quant: QuantizationArgs, input_quant: QuantizationArgs | None) -> bool:
        """On Hopper vLLM takes int8 activations for e4m3 ones here; ours are what the checkpoint states."""
        states_int = input_quant is not None and getattr(input_quant.type, "value", input_quant.type) == "int"
        return original._is_fp8_w4a8(weight_quant, input_quant) and not (states_int and VLLM.settings().linear)

    names = dict(get_quant_method=get_quant_method, terrazzo_form_of=staticmethod(form_of), __doc__=original.__doc__)
    if hasattr(original, "_is_fp8_w4a8"):
        names["_is_fp8_w4a8"] = staticmethod(_is_fp8_w4a8)
    return type(original.__name__, (original,), names | {"__module__": original.__module__})
