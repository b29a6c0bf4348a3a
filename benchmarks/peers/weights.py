"""Other packages' products of 16-bit activations: timed where they are installed, after their output was checked.

Each peer states its name, what it lacks here, how the canonical weight becomes its own form, and its call. Their Python
interfaces move between versions; whatever one raises is recorded in its place and costs the run nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

EVERY_M = 1 << 30
"""humming's word for an interval of tokens without an end."""
FLOATS = ("mxfp4", "nvfp4", "fp8")
"""Names of weights of small floats."""
UTILS = "vllm.model_executor.layers.quantization.utils"


def missing_module(*names: str) -> str:
    """Why a package cannot be used: the first of its modules that does not import, or ""."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # packages of kernels fail to import in many ways
            package = name.split(".")[0]
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"{package} is not installed"
            return f"{name} does not import: {type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return ""


def pack_rows(codes: Any, bits: int = 4) -> Any:
    """GPTQ's words: codes [N, K] -> int32 [K * bits / 32, N]; of 4 bits, nibble j of row r is input channel 8r + j."""
    import torch

    each = 32 // bits
    parts = codes.T.reshape(-1, each, len(codes)).int()
    shifts = bits * torch.arange(each, device=codes.device, dtype=torch.int32)
    return (parts << shifts[:, None]).sum(1, dtype=torch.int32)


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those keyword arguments that this version of a function has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def vllm_parts() -> SimpleNamespace:
    """vLLM's operators, what Marlin's weights are made with, its types, and no tensor."""
    import torch
    from vllm.scalar_type import scalar_types

    return SimpleNamespace(
        ops=importlib.import_module("vllm._custom_ops"),
        utils=importlib.import_module(Marlin.modules[-1]),
        types=scalar_types,
        empty=torch.empty(0, dtype=torch.int32, device="cuda"),
    )


class _Vllm:
    """vLLM's operators on integer codes: with zero points, or less half of their range."""

    package = "vllm"
    modules = ("vllm._custom_ops", "vllm.scalar_type")

    def missing(self) -> str:
        return missing_module(*self.modules)

    def parts(self, weight: Any) -> SimpleNamespace:
        part, zeros, bits = vllm_parts(), weight.zeros, getattr(weight, "bits", 4)
        name = f"uint{bits}" if zeros is not None else f"uint{bits}b{1 << bits - 1}"
        part.type, part.bits, part.words = getattr(part.types, name), bits, pack_rows(weight.codes, bits)
        part.scales = weight.scales.T.contiguous()
        part.zeros = None if zeros is None else zeros.T.contiguous().int()
        return part


class Marlin(_Vllm):
    """vLLM's Marlin: integers through its operator, small floats through what vLLM itself prepares and calls."""

    name = "vllm_marlin"
    modules = (*_Vllm.modules, f"{UTILS}.marlin_utils")

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        if getattr(weight, "weight", "") in FLOATS:
            return self._floats(weight, dense, copies)
        part, n, k = self.parts(weight), weight.n, weight.k
        words = part.ops.gptq_marlin_repack(part.words, part.empty, k, n, part.bits)
        scales = part.utils.marlin_permute_scales(part.scales, k, n, min(weight.group_size, k))
        groups, of_zeros = part.scales.shape[0], part.utils.marlin_zero_points
        zeros = part.empty if part.zeros is None else of_zeros(part.zeros, groups, n, part.bits)
        run = getattr(part.ops, "marlin_gemm", None) or part.ops.gptq_marlin_gemm
        fixed = {
            "c": None, "b_bias": None, "a_scales": None, "global_scale": None, "b_zeros": zeros, "g_idx": part.empty,
            "perm": part.empty, "workspace": part.utils.marlin_make_workspace_new(words.device), "b_q_type": part.type,
            "size_n": n, "size_k": k, "is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True,
            "is_zp_float": False,
        }  # fmt: skip
        fixed = accepted(run, fixed)
        number = copies(words.numel() * 4 + scales.numel() * scales.element_size())

        def one() -> Callable[[Any], Any]:
            own = fixed | {"b_q_weight": words.clone(), "b_scales": scales.clone()}
            return lambda x: run(a=x, size_m=x.shape[0], **own)

        return [one() for _ in range(number)]

    @staticmethod
    def _floats(weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        import torch

        kind, (n, k) = weight.weight, dense.shape
        layer = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = n, k
        layer.params_dtype = layer.orig_dtype = dense.dtype
        if kind == "fp8":
            made = importlib.import_module(f"{UTILS}.marlin_utils_fp8")
            layer.weight = torch.nn.Parameter(weight.codes.view(torch.float8_e4m3fn), requires_grad=False)
            layer.weight_block_size = [1, weight.group_size] if weight.group_size < k else None
            layer.weight_scale = torch.nn.Parameter(weight.scales.float(), requires_grad=False)
            made.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
            run, extra = made.apply_fp8_marlin_linear, {}
        else:
            made = importlib.import_module(f"{UTILS}.marlin_utils_fp4")
            layer.weight = weight.codes[:, ::2] | weight.codes[:, 1::2] << 4
            layer.weight_scale = weight.scales
            if kind == "nvfp4":
                layer.weight_scale = weight.scales.view(torch.float8_e4m3fn)
                layer.weight_global_scale = torch.ones(1, device=dense.device)
            made.prepare_fp4_layer_for_marlin(layer)
            run = made.apply_fp4_marlin_linear
            extra = {"weight_global_scale": getattr(layer, "weight_global_scale", None)}
        facts = dict(workspace=layer.workspace, size_n=n, size_k=k, bias=None) | extra

        def one() -> Callable[[Any], Any]:
            own = dict(weight=layer.weight.clone(), weight_scale=layer.weight_scale.clone()) | facts
            return lambda x: run(x, **own)

        return [one() for _ in range(copies(layer.weight.nbytes + layer.weight_scale.nbytes))]

    def call(self, x: Any, loaded: Any) -> Any:
        return loaded(x)


class Machete(_Vllm):
    name = "vllm_machete"

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        part = self.parts(weight)
        words = part.words.t().contiguous().t()  # column-major, as machete_prepack_B asks
        arguments = {
            "b_type": part.type,
            "b_group_scales": part.scales,
            "b_group_zeros": None if part.zeros is None else -(part.scales * part.zeros.to(part.scales.dtype)),
            "b_group_size": weight.group_size,
        }
        words = part.ops.machete_prepack_B(words, dense.dtype, part.type, part.scales.dtype)
        number = copies(words.numel() * words.element_size() + part.scales.numel() * 2)
        return [(part.ops.machete_mm, {**arguments, "b_q": words.clone()}) for _ in range(number)]

    def call(self, x: Any, loaded: Any) -> Any:
        run, arguments = loaded
        return run(a=x, **arguments)


class Humming:
    """humming on the very codes and scales."""

    name = "humming_w4a16"
    package = "humming-kernels"

    def missing(self) -> str:
        return missing_module("humming.layer", "humming.schema")

    @staticmethod
    def layer(words: Any, scales: Any, zeros: Any, config: dict[str, Any], dtype: Any, x: dict[str, Any]) -> Any:
        """A layer of words int32 [N, K * bits / 32], of codes in their order, less zeros [N, K / group].

        Args:
            config: of the weight: dtype, and more. x: of the activations.
        """
        from humming.layer import HummingLayer

        bits = int("".join(filter(str.isdigit, config["dtype"]))[:1])
        facts = {"has_zero_point": zeros is not None, **config}
        n, k = words.shape[0], words.shape[1] * 32 // bits
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=facts, input_config=dict(x), torch_dtype=dtype)
        tensors = {"weight": words, "weight_scale": scales}
        if zeros is not None:
            tensors["zero_point"] = pack_rows(zeros.T.contiguous())
        layer = layer.to(words.device)
        layer.load_from_tensors(tensors)
        layer.transform()
        return layer

    @staticmethod
    def run(layer: Any, x: Any, **more: Any) -> Any:
        """A layer's product with the tile that humming chooses for this many tokens.

        Asked by itself it compiles those of all numbers of tokens, a hundred, before its first product.
        """
        return layer(inputs=x, tuning_config=Humming.tile(layer.humming_config, x.shape[0]), **more)

    @staticmethod
    @functools.cache
    def tile(config: Any, m: int) -> str:
        """humming's own choice for m tokens, as it takes one: intervals of tokens, each with its tile."""
        from humming.tune import get_heuristics_config

        return json.dumps([[0, EVERY_M, get_heuristics_config(config, shape_m=m)]])

    @staticmethod
    def ahead(layer: Any, shapes: Iterable[tuple[int, int]], ms: Iterable[int]) -> list[tuple[str, str]]:
        """What `compile` takes, for weights [N, K] of other sizes than a small layer's."""
        configs = [dataclasses.replace(layer.humming_config, shape_n=n, shape_k=k) for n, k in shapes]
        return [(config.to_str(), Humming.tile(config, m)) for config in configs for m in ms]

    @staticmethod
    def compile(wanted: tuple[str, str]) -> str:
        """Compile one kernel into humming's cache; why it failed, or ""."""
        from humming.kernel.humming import HummingKernel

        try:
            HummingKernel.prepare_kernels(wanted[0], None, wanted[1])
        except Exception as error:  # the run that wants it says so again
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        return ""

    def small(self, weight: Any, dense: Any) -> Any:
        """What `layers` takes."""
        return weight

    def layers(self, weight: Any, dtype: Any) -> Callable[[], Any]:
        """Makes a layer of a canonical weight."""
        import torch

        kind = getattr(weight, "weight", "")
        group = {"group_size": weight.group_size if weight.group_size < weight.codes.shape[1] else 0}
        if kind in FLOATS:
            bits, zeros, scales = 8 if kind == "fp8" else 4, None, weight.scales
            config = {"dtype": "float8e4m3" if kind == "fp8" else "float4e2m1", **group}
            if kind == "fp8":
                scales = scales.to(dtype)
            else:
                made = torch.float8_e8m0fnu if kind == "mxfp4" else torch.float8_e4m3fn
                config["scale_dtype"], scales = {"mxfp4": "float8e8m0", "nvfp4": "float8e4m3"}[kind], scales.view(made)
        else:
            bits, scales, zeros = getattr(weight, "bits", 4), weight.scales, weight.zeros
            config = {"dtype": f"uint{bits}", **group}
        words = pack_rows(weight.codes.view(torch.uint8), bits).T.contiguous()
        return lambda: self.layer(words, scales, zeros, config, dtype, {})

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        one = self.layers(weight, dense.dtype)
        first = one()
        return [first, *(one() for _ in range(copies(first.weight.nbytes + first.weight_scale.nbytes) - 1))]

    def call(self, x: Any, loaded: Any) -> Any:
        return self.run(loaded, x)
