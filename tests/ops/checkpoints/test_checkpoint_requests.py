"""What `terrazzo compile FOLDER` compiles covers every layer that a family loads from the folder."""

from __future__ import annotations

import pytest
import torch
from checkpoint_folders import KINDS, LAYER, stored, write
from terrazzo.lowering.targets import Target
from terrazzo.ops import model_requests, nf4, w4a8, w4a16
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_requests import Weights
from terrazzo.ops.w4a8 import fp8
from test_checkpoint_families import qserve

SM_90A = Target.parse("sm_90a")


def covered(folder, family, dtype: str, operator: str | None = None) -> None:
    """The kernels of a loaded layer, with its own bias and without activations quantized before, are all named."""
    model = model_requests.of_folder(folder, Weights(dtype=dtype, operator=operator))
    found = set(model_requests.plan(model, Serving(SM_90A, dtype, max_tokens=300)).requests)
    w = family.load_layer(folder, LAYER)
    m, facts = (1, 2, 7, 16, 33, 128, 300), dict(group_size=w.group_size, bias=w.bias is not None, dtype=dtype)
    if family is w4a16:
        wanted = w4a16.kernel_requests(
            w.n, w.k, m=m, **facts, symmetric=w.symmetric, scale_dtype=w.scale_dtype, target="sm_90a"
        )
    elif family is nf4:
        wanted = nf4.kernel_requests(w.n, w.k, m=m, **facts, target="sm_90a")
    else:
        form = "e4m3" if family is fp8 else "auto"
        wanted = w4a8.kernel_requests(w.n, w.k, m=m, **facts, dequantization=form, target="sm_90a")
    assert set(wanted) <= found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_convention(tmp_path, kind, dtype):
    convention, config, family = KINDS[kind]
    held, _ = stored(convention)
    n = family.load_layer(write(tmp_path / "a", prefixed(held), config), LAYER).n
    covered(tmp_path / "a", family, dtype)  # the config says which operator reads them
    folder = write(tmp_path / "b", prefixed(held | {"bias": torch.zeros(n, dtype=torch.float16)}), config)
    covered(folder, family, dtype, {w4a16: "w4a16", w4a8: "w4a8", fp8: "w4a8_fp8", nf4: "nf4"}[family])


@pytest.mark.parametrize("name", ["qserve_g128", "qserve_g64", "qserve_channel"])
def test_layers_of_qserve(tmp_path, name):
    held, _ = qserve(name)
    folder = write(tmp_path / "m", prefixed(held), {"quant_method": "qserve", "w_bit": 4})
    covered(folder, w4a8, "float16")


def prefixed(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{LAYER}.{leaf}": t.clone() for leaf, t in held.items()}
