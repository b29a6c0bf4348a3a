"""Modules on a CPU: torch's products of weights that are dequantized once, beside the operators' oracle."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from small_model import SmallModel
from terrazzo import nn
from terrazzo.nn import cpu
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import reference_writing
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.table import BY_WORD

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
N, K = 72, 200


def layer(family: str, bias: bool = False) -> nn.Linear:
    options = {"target": "sm_90a"} if family == "w4ax" else {}
    b = torch.randn(N).half() if bias else None
    return nn.Linear.from_float(torch.randn(N, K) / K**0.5, family, bias=b, **options)


def check_near(y: torch.Tensor, exact: torch.Tensor) -> None:
    """One rounding to y's dtype, and what float32 sums of cancelling terms leave."""
    assert y.dtype == exact.dtype
    off = (y.double() - exact.double()).abs()
    assert bool((off <= 2 * UNIT[y.dtype] * exact.double().abs() + 2e-6).all()), float(off.max())


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("family", BY_WORD)
def test_every_format_is_multiplied_as_its_oracle_says(family, dtype):
    made = layer(family, bias=dtype == torch.float16)
    for rows in (1, 9):
        x = torch.randn(rows, K).to(dtype)
        with cpu.exactly():
            exact = made(x)
            assert torch.equal(made(x[0]), made(x[:1])[0])
        check_near(made(x), exact)
        assert torch.equal(made(x[0]), made(x[:1])[0]) and made(x[0]).shape == (N,)
        assert made(x[:0]).shape == (0, N) and made(x[None]).shape == (1, rows, N)


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w8a8", "w8a8-e4m3", "w4ax", "mxfp4-e4m3", "mxfp4-mxfp8"])
def test_experts_are_multiplied_as_their_oracle_says(family):
    options = {"target": "sm_90a"} if family == "w4ax" else {}
    floats = torch.randn(3, 2 * N, K) / K**0.5, torch.randn(3, K, N) / N**0.5
    made = nn.Experts.from_float(*floats, family, **options)
    x, ids, gates = torch.randn(6, K).half(), torch.tensor([[0, 2]] * 6), torch.rand(6, 2)
    with cpu.exactly():
        exact = made(x, ids, gates)
    y = made(x, ids, gates)
    assert (y - exact).abs().max() < 2**-7 * exact.abs().max()
    assert set(made.gate_up_proj._dense[2]) == {0, 2}, "an expert that no token takes is not dequantized"


def test_a_weight_is_dequantized_once_and_again_when_it_is_another():
    made, x = layer("w4a16-g64"), torch.randn(2, K).half()
    first = made(x)
    kept = made._dense[2][0]
    assert made(x) is not first and made._dense[2][0] is kept
    other = layer("w4a16-g64")
    made.load_state_dict(other.state_dict())
    assert torch.equal(made(x), other(x)) and made._dense[2][0] is not kept
    made.to("cpu")
    assert made._dense is None
    made(x)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert twin._dense is None and torch.equal(twin(x), made(x))
    assert set(made.state_dict()) == {"weight_format", "words", "params"}


def test_weights_take_as_few_bits_as_hold_them():
    x = torch.randn(2, K)
    held = {}
    for family in ("w4a16", "w4a8", "w8a8", "fp8", "w4ax"):
        made = layer(family)
        made(x.half())
        dense = made._dense[2][0]
        held[family] = dense.weight.dtype if isinstance(dense, cpu.Floats) else dense.codes.dtype
    assert held == {
        "w4a16": torch.float16, "w4a8": torch.int8, "w8a8": torch.int8, "fp8": torch.float32,
        "w4ax": torch.float32,
    }  # fmt: skip


def test_a_process_is_told_once(monkeypatch):
    monkeypatch.setattr(cpu, "_told", False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            layer("w4a16")(torch.randn(1, K).half())
    (told,) = (str(it.message) for it in seen if "a CPU multiplies packed layers" in str(it.message))
    assert told.endswith("a reference for results, not for speed") and "\n" not in told


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w8a8-e4m3"])
def test_autocast_asks_for_its_dtype_as_of_a_linear_layer(family):
    made, own = layer(family), torch.nn.Linear(K, N)
    for x in (torch.randn(3, K), torch.randn(3, K).half()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = made(x)
            assert y.dtype == own(x).dtype == torch.bfloat16
        assert torch.equal(y, made(x.bfloat16()))


FORMATS = [
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "int2"), ("int4_channel64", "int4"),
    ("int2_hadamard", "int4_hadamard"), ("int4_hadamard", "int8"),
]  # fmt: skip


@pytest.mark.parametrize("formats", FORMATS, ids=lambda it: it[0])
def test_words_of_a_cache_are_read_by_places_as_their_layout_reads_them(formats):
    for head_dim in (64, 128):
        layout = CacheLayout(*formats, head_dim)
        words = torch.randint(-(2**31), 2**31 - 1, (2, 3, layout.block_words)).int()
        for made, wanted in zip(reference_writing.unpacked(layout, words), layout.unpack(words)):
            for name in ("codes", "scale", "zero"):
                got, exact = getattr(made, name), getattr(wanted, name)
                assert (got is None) == (exact is None)
                if exact is not None:
                    assert torch.equal(got.view(torch.uint8), exact.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("formats", FORMATS, ids=lambda it: it[0])
@torch.no_grad()
def test_attention_over_a_cache_is_its_oracles(formats):
    """A prefill past the ring and steps behind it, of sequences of unequal length."""
    hidden = {}
    for way in ("oracle", "torch"):
        model = SmallModel(formats)
        cache = model.new_cache(2, 400)
        rows = [cache.new(), cache.new()]
        ids = torch.arange(170) % 90
        found = []
        with cpu.exactly() if way == "oracle" else warnings.catch_warnings():
            for new in ([150, 20], [1, 1], [1, 1], [18, 30], [1, 1]):
                batch = cache.extend(dict(zip(rows, new)))
                at = sum(new)
                found.append(model.decoder(ids[:at], nn.positions_of(batch), batch))
        hidden[way] = torch.cat(found).double()
    off = (hidden["oracle"] - hidden["torch"]).norm(dim=-1) / hidden["oracle"].norm(dim=-1)
    assert float(off.median()) < 2**-9 and float(off.max()) < 2**-4, off  # few codes of two bits are others


def test_stacked_weights_of_no_tokens_give_none():
    made = nn.GroupedLinear(GroupedWeight.stack([layer("w4a8").packed] * 2))
    assert made(torch.zeros(0, K).half(), torch.zeros(3, dtype=torch.int32)).shape == (0, N)
