"""A packed folder's model without its tensors: what `preparing.kernel_requests` needs to name its kernels."""

from __future__ import annotations

from pathlib import Path

import torch
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.nn import loading
from terrazzo.nn.decoder import Decoder
from terrazzo.nn.module import PackedModule
from terrazzo.nn.parallel import TensorParallel
from terrazzo.nn.preparing import kernel_requests
from terrazzo.nn.reading import FileTensors
from terrazzo.nn.sources import Stored
from terrazzo.ops.checkpoints import TensorFiles
from terrazzo.ops.shards import Cut
from torch import nn

NOTED = "weight_format"
"""The tensors that say what the others are; they alone are read."""
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
           "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}  # fmt: skip
"""Of safetensors, by torch's names; words of other dtypes are none of ours."""


class _Hollow(FileTensors):
    """Tensors of a folder's files by name, on meta."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name.endswith(NOTED):
            return self.files.tensor(name, "cpu")
        dtype, shape = self.files.describe(name)
        return torch.empty(shape, dtype=getattr(torch, _DTYPES.get(dtype, "uint8")), device="meta")

    def part(self, name: str, cut: Cut) -> torch.Tensor:
        return cut.of(self[name])


class _Noted(Stored):
    """Modules of such tensors: all on meta but what says their formats."""

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def requests(
    folder: str | Path,
    kv: list[tuple[str, str] | None],
    tokens: tuple[int, ...] | None,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    page: int = 128,
    ranks: int = 1,
) -> tuple[list[KernelRequest], dict[str, str]]:
    """Kernels of a folder that `save_pretrained` or `quantize_folder` wrote, and name -> identity of their layouts.

    Args:
        kv: formats of caches, None for those that the folder names. [] leaves attention out.
        tokens: numbers of tokens of a step; None for every number. dtype: None takes the folder's.
        page: tokens of a page. ranks: of tensor parallelism.

    Raises:
        ArgumentError: a folder that `terrazzo.load` would refuse for its config or layers.
    """
    if ranks == 1:
        decoder, head, stated = _built(folder, dtype)
    else:  # a share may be packed anew, which takes data
        held = loading.load(folder, device="cpu", dtype=dtype, tensor_parallel=TensorParallel(0, ranks))
        decoder, head, stated = held.decoder, held.lm_head, held.model.formats
    found = decoder.embed_tokens.weight.dtype
    model = nn.ModuleList([decoder, head])
    packed = [it for it in model.modules() if isinstance(it, PackedModule)]
    for layer in packed:  # its weight over tensors without data, which `packed` would refuse
        layer._kept = (tuple(layer._buffers.items()), layer._make())
    facts = dict(dtype=found, page=page, target=target)
    made: dict[KernelRequest, None] = {}
    for each in [it or stated for it in kv] or [None]:  # a model that states no formats has no attention without them
        made |= dict.fromkeys(kernel_requests(model, tokens, kv=each, **facts))
    layouts = {}
    for layer in packed:
        weight = layer._make()
        layouts[layer.kind.word] = getattr(weight, "stacked", weight).expected_layout()
    return list(made), layouts


def _built(folder: str | Path, dtype: torch.dtype | None) -> tuple[Decoder, nn.Module, tuple[str, str]]:
    """Decoder and head on meta, and the formats of keys and values that the folder names."""
    from terrazzo.nn.architectures import Builder

    meta = torch.device("meta")
    opened = loading.transformers_side().Opened(folder, meta, dtype=dtype)
    opened.build()
    builder = Builder(opened.shape, _Noted(_Hollow(TensorFiles(folder), meta), meta, opened.dtype), opened.rotaries)
    decoder = builder.decoder()
    return decoder, builder.head(decoder), opened.formats
