"""Layers that we write as compressed-tensors: what the reader makes of them is the weight that was written."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.formats import Format
from terrazzo.ops import stored_layers
from terrazzo.ops.checkpoints import Checkpoint
from terrazzo.ops.checkpoints.conventions.compressed_tensors import in_blocks, scheme_of
from terrazzo.ops.checkpoints.conventions.table import CONVENTIONS, WRITERS
from terrazzo.ops.products.table import PRODUCTS

from tests.ops.checkpoints.checkpoint_folders import write

LAYER = "model.layers.0.mlp.down_proj"
FORMATS = (
    "w4a16-g64", "w4a16-g128-sym", "w4a16-gK", "w4a8-e4m3-g64", "w8a16-g32", "w8a16-gK-sym", "w8a8", "w8a8-e4m3",
    "w8a8-e4m3-g128", "fp8", "fp8-g128", "mxfp4", "nvfp4",
)  # fmt: skip


def made(form: Format, n: int = 200, k: int = 256):
    """A canonical weight of a format with a bias."""
    rng = torch.Generator().manual_seed(3)
    weight = torch.randn(n, k, generator=rng)
    return form.quantize(weight, torch.randn(n, generator=rng)).unpack()


def folder_of(path, form: Format, weight):
    """A folder of compressed-tensors with this one layer."""
    convention = WRITERS[form.product.record]
    group = scheme_of(form.product, form.group_size, form.symmetric, convention.published)
    config = {"quant_method": "compressed-tensors", "format": convention.published, "config_groups": {"group_0": group}}
    tensors = convention.write(weight, in_blocks(form.product, form.group_size)) | {"bias": weight.bias}
    return write(path, {f"{LAYER}.{leaf}": t for leaf, t in tensors.items()}, config)


@pytest.mark.parametrize("text", ["fp8-g128", "w8a8-e4m3-g128"])
def test_a_short_row_has_blocks_too(text):
    """Other readers want a scale for each block, also where one block has all columns."""
    form = Format.parse(text)
    tensors = WRITERS[form.product.record].write(made(form, n=200, k=128), True)
    assert list(tensors["weight_scale"].shape) == [2, 1]


@pytest.mark.parametrize("text", FORMATS)
def test_what_is_written_is_read_as_the_same_weight(tmp_path, text):
    form = Format.parse(text)
    weight = made(form)
    checkpoint = Checkpoint(folder_of(tmp_path, form, weight))
    config, convention = checkpoint.layer(LAYER), checkpoint.layers()[LAYER]
    assert not config.skip and convention == WRITERS[form.product.record].name
    operator = stored_layers.operator_of(convention, config)
    assert operator == (form.product.root if form.product.direct else form.product.record)
    again = stored_layers.FAMILIES[operator].read(checkpoint, LAYER, torch.device("cpu"))
    assert type(again) is type(weight) and again.group_size == weight.group_size
    for name in (field.name for field in dataclasses.fields(weight)):
        mine, read = getattr(weight, name), getattr(again, name)
        if not torch.is_tensor(mine):
            assert read == mine, name
        elif name in ("scales", "channel_scales") and hasattr(weight, "channel_scales"):  # split anew, exactly
            assert torch.equal(again.dequantize(), weight.dequantize())
        elif name == "factors":  # its reciprocal is what the file has
            assert torch.allclose(read, mine, rtol=2.0**-23, atol=0)
        else:
            assert read.dtype == mine.dtype and torch.equal(read.float(), mine.float()), name


def test_products_without_a_published_form_have_no_writer():
    """Their weights have more than such a layer holds; all others are tried above."""
    tried = {Format.parse(text).product.record for text in FORMATS}
    assert set(WRITERS) == tried
    assert {one.record for one in PRODUCTS} >= tried and "w4a8" not in tried and "w4ax" not in tried
    assert all(one.published and one.write for one in CONVENTIONS.values() if one.writes)


def test_weights_that_others_could_not_read_are_refused(tmp_path):
    form = Format.parse("w4a16-g128")
    with pytest.raises(ArgumentError, match="group_size = 128: K = 192 is no multiple"):
        WRITERS["w4a16"].write(made(form, k=192), False)
    order = dataclasses.replace(made(form), perm=torch.arange(256).flip(0).int())
    with pytest.raises(ArgumentError, match="perm"):
        WRITERS["w4a16"].write(order, False)
    rows = dataclasses.replace(made(Format.parse("nvfp4")), factors=torch.rand(200))
    with pytest.raises(ArgumentError, match="factors"):
        WRITERS["nvfp4"].write(rows, False)
    blocks = made(Format.parse("fp8-g128"))
    blocks.scales[3] *= 2
    with pytest.raises(ArgumentError, match="blocks of 128 rows"):
        WRITERS["fp8"].write(blocks, True)
