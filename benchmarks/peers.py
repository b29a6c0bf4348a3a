"""Other packages' W4A16 kernels: timed where they are installed, and only after their output was checked.

Each peer states its name, what it lacks here, how the canonical weight becomes its own form, and its call. Their Python
interfaces move between versions; whatever one raises is recorded in its place and costs the run nothing else.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


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


class _Vllm:
    """vLLM's operators; uint4 with zero points, uint4b8 without."""

    modules = ("vllm._custom_ops", "vllm.scalar_type")

    def missing(self) -> str:
        return missing_module(*self.modules)

    def parts(self, weight: Any) -> SimpleNamespace:
        import torch
        from vllm.scalar_type import scalar_types

        zeros = weight.zeros
        return SimpleNamespace(
            ops=importlib.import_module("vllm._custom_ops"),
            type=scalar_types.uint4b8 if zeros is None else scalar_types.uint4,
            words=pack_rows(weight.codes),
            scales=weight.scales.T.contiguous(),
            zeros=None if zeros is None else zeros.T.contiguous().int(),
            empty=torch.empty(0, dtype=torch.int32, device=weight.codes.device),
        )


class Marlin(_Vllm):
    name = "vllm_marlin"
    modules = (*_Vllm.modules, "vllm.model_executor.layers.quantization.utils.marlin_utils")

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        utils = importlib.import_module(self.modules[-1])
        part, n, k = self.parts(weight), weight.n, weight.k
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

    def missing(self) -> str:
        return missing_module("humming.layer", "humming.dtypes")

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        from humming import dtypes
        from humming.layer import HummingLayer

        dtype = getattr(dtypes, str(dense.dtype).removeprefix("torch."))
        arguments = {
            "shape_n": weight.n,
            "shape_k": weight.k,
            "a_dtype": dtype,
            "b_dtype": dtypes.uint4,
            "c_dtype": dtype,
            "bs_dtype": dtype,
            "weight_scale_group_size": weight.group_size,
            "has_dynamic_zp": weight.zeros is not None,
        }
        layer = HummingLayer(**accepted(HummingLayer.__init__, arguments)).to(dense.device)
        zeros = {} if weight.zeros is None else {"zero_point": weight.zeros.int()}
        layer.load_weight(weight=weight.codes.int(), weight_scale=weight.scales, **zeros)
        layer.finish_load()
        return [copy.deepcopy(layer) for _ in range(copies(weight.n * weight.k // 2))]

    def call(self, x: Any, loaded: Any) -> Any:
        return loaded(inputs=x)


class Gemlite:
    name = "gemlite_a16w4"

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
