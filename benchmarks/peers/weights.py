"""Other packages' W4A16 kernels: timed where they are installed, and only after their output was checked.

Each peer states its name, what it lacks here, how the canonical weight becomes its own form, and its call. Their Python
interfaces move between versions; whatever one raises is recorded in its place and costs the run nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

EVERY_M = 1 << 30
"""humming's word for an interval of tokens without an end."""
_TILES: dict[str, list[Any]] = {}
"""humming's tiles, by its words for a layer: they take seconds to list."""


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


def pack_rows(codes: Any) -> Any:
    """GPTQ's words: codes [N, K] -> int32 [K/8, N], nibble j of row r is input channel 8r + j."""
    import torch

    n, k = codes.shape
    nibbles = codes.T.reshape(k // 8, 8, n).int()
    shifts = 4 * torch.arange(8, device=codes.device, dtype=torch.int32)
    return (nibbles << shifts[:, None]).sum(1, dtype=torch.int32)


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those keyword arguments that this version of a function has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def vllm_parts() -> SimpleNamespace:
    """vLLM's operators, what Marlin's weights are made with, the type of codes without zero points, and no tensor."""
    import torch
    from vllm.scalar_type import scalar_types

    return SimpleNamespace(
        ops=importlib.import_module("vllm._custom_ops"),
        utils=importlib.import_module(Marlin.modules[-1]),
        type=scalar_types.uint4b8,
        empty=torch.empty(0, dtype=torch.int32, device="cuda"),
    )


class _Vllm:
    """vLLM's operators; uint4 with zero points, uint4b8 without."""

    package = "vllm"
    modules = ("vllm._custom_ops", "vllm.scalar_type")

    def missing(self) -> str:
        return missing_module(*self.modules)

    def parts(self, weight: Any) -> SimpleNamespace:
        from vllm.scalar_type import scalar_types

        part, zeros = vllm_parts(), weight.zeros
        part.type = part.type if zeros is None else scalar_types.uint4
        part.words = pack_rows(weight.codes)
        part.scales = weight.scales.T.contiguous()
        part.zeros = None if zeros is None else zeros.T.contiguous().int()
        return part


class Marlin(_Vllm):
    name = "vllm_marlin"
    modules = (*_Vllm.modules, "vllm.model_executor.layers.quantization.utils.marlin_utils")

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        part, n, k = self.parts(weight), weight.n, weight.k
        utils = part.utils
        groups = part.scales.shape[0]
        words = part.ops.gptq_marlin_repack(part.words, part.empty, k, n, 4)
        scales = utils.marlin_permute_scales(part.scales, k, n, weight.group_size)
        zeros = part.empty if part.zeros is None else utils.marlin_zero_points(part.zeros, groups, n, 4)
        run = getattr(part.ops, "marlin_gemm", None) or part.ops.gptq_marlin_gemm
        fixed = {
            "c": None,
            "b_bias": None,
            "a_scales": None,
            "global_scale": None,
            "b_zeros": zeros,
            "g_idx": part.empty,
            "perm": part.empty,
            "workspace": utils.marlin_make_workspace_new(words.device),
            "b_q_type": part.type,
            "size_n": n,
            "size_k": k,
            "is_k_full": True,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
        }
        fixed = accepted(run, fixed)
        number = copies(words.numel() * 4 + scales.numel() * scales.element_size())
        return [(run, {**fixed, "b_q_weight": words.clone(), "b_scales": scales.clone()}) for _ in range(number)]

    def call(self, x: Any, loaded: Any) -> Any:
        run, arguments = loaded
        return run(a=x, size_m=x.shape[0], **arguments)


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
    name = "humming_w4a16"
    package = "humming-kernels"

    def missing(self) -> str:
        return missing_module("humming.layer", "humming.schema")

    @staticmethod
    def layer(codes: Any, scales: Any, zeros: Any, config: dict[str, int], dtype: Any, x: dict[str, Any]) -> Any:
        """A layer of codes [N, K] of 0..15 less 8, or less zeros [N, K / group].

        Args:
            config: more of the weight. x: of the activations.
        """
        from humming.layer import HummingLayer

        n, k = codes.shape
        facts = {"dtype": "uint4", "has_zero_point": zeros is not None, **config}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=facts, input_config=dict(x), torch_dtype=dtype)
        tensors = {"weight": pack_rows(codes).T.contiguous(), "weight_scale": scales}
        if zeros is not None:
            tensors["zero_point"] = pack_rows(zeros.T.contiguous())
        layer = layer.to(codes.device)
        layer.load_from_tensors(tensors)
        layer.transform()
        return layer

    @staticmethod
    def run(layer: Any, x: Any, **more: Any) -> Any:
        """A layer's product with the tile that humming chooses for this many tokens.

        Asked by itself it compiles those of all numbers of tokens, a hundred, before its first product.
        """
        return layer(inputs=x, tuning_config=Humming.tile(layer, x.shape[0]), **more)

    @staticmethod
    def tile(layer: Any, m: int) -> str:
        """humming's own choice for m tokens, as it takes one: intervals of tokens, each with its tile."""
        from humming.layer import HummingLayerMethod

        words = layer.humming_metas[""].to_str()
        if words not in _TILES:
            _TILES[words] = HummingLayerMethod.get_default_tuning_configs(layer)
        (found,) = [tile for least, most, tile in _TILES[words] if least < m <= most]
        return json.dumps([[0, EVERY_M, found]])

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        facts = (weight.codes, weight.scales, weight.zeros, {"group_size": weight.group_size}, dense.dtype, {})
        return [self.layer(*facts) for _ in range(copies(weight.n * weight.k // 2))]

    def call(self, x: Any, loaded: Any) -> Any:
        return self.run(loaded, x)


class Gemlite:
    name = "gemlite_a16w4"
    package = "gemlite"

    def missing(self) -> str:
        return missing_module("gemlite.core")

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        from gemlite.core import DType, GemLiteLinear

        dtype = {"torch.float16": DType.FP16, "torch.bfloat16": DType.BF16}[str(dense.dtype)]
        zeros = 8 if weight.zeros is None else weight.zeros.to(dense.dtype).reshape(-1, 1)
        loaded = []
        for _ in range(copies(weight.n * weight.k // 2)):
            layer = GemLiteLinear(
                W_nbits=4,
                group_size=weight.group_size,
                in_features=weight.k,
                out_features=weight.n,
                input_dtype=dtype,
                output_dtype=dtype,
            )
            layer.pack(weight.codes, weight.scales.reshape(-1, 1), zeros, None)
            loaded.append(layer)
        return loaded

    def call(self, x: Any, loaded: Any) -> Any:
        return loaded(x)


PEERS = (Marlin(), Machete(), Humming(), Gemlite())
