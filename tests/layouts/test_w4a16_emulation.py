"""The numpy tensor core: W4A16 from packed words and parameters, against the plain product."""

import numpy as np
import pytest
from terrazzo.layouts import derive_rows, get_instance
from terrazzo.layouts.converters import arith
from terrazzo.layouts.emulate import NUMERICS, emulate_w4a16, round_to
from terrazzo.lowering.errors import LayoutError

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def layer(n, k, group, scale_dtype, symmetric, seed=0):
    """A random quantized layer: codes, scales, zeros (float64 [n, G]) and its packed words and params."""
    rng, layout = np.random.default_rng(seed), get_instance("w4a16")
    rows = derive_rows(layout.fragment, layout.block_rows)
    padded_n, padded_k = -(-n // 64) * 64, -(-k // 128) * 128
    size = padded_k if group >= k else group
    groups, padded_groups = -(-k // size), padded_k // size
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.uniform(1e-3, 2e-2, (n, groups))
    zeros = np.full((n, groups), 8, np.uint8) if symmetric else rng.integers(0, 17, (n, groups)).astype(np.uint8)
    if scale_dtype == "float32":
        stored = scales.astype(np.float32)
        scales = stored.astype(np.float64)
    else:
        stored = (arith.to_f16 if scale_dtype == "float16" else arith.to_bf16)(scales)
        scales = round_to(scales, scale_dtype)
    whole = np.zeros((padded_n, padded_k), np.uint8)
    whole[:n, :k] = codes
    fill = lambda values: np.pad(values, ((0, 0), (0, padded_groups - groups)))
    params = rows.pack(fill(stored)).view(np.uint8)
    if not symmetric:
        params = np.concatenate([params, rows.pack(fill(zeros))], axis=2)
    weight = (codes - zeros[:, np.arange(k) // size].astype(np.float64)) * scales[:, np.arange(k) // size]
    return layout.pack(whole), params.transpose(1, 0, 2), weight


CASES = [
    (256, 512, 16, 128, False, "float16", "float16"),
    (64, 128, 1, 32, True, "float16", "float16"),
    (100, 200, 3, 64, False, "float32", "bfloat16"),
    (70, 130, 5, 1 << 30, True, "bfloat16", "bfloat16"),
    (33, 96, 2, 32, False, "bfloat16", "float16"),
    (1, 1, 4, 128, False, "float16", "bfloat16"),
]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("n,k,m,group,symmetric,scale_dtype,operand", CASES)
def test_agrees_with_the_plain_product(n, k, m, group, symmetric, scale_dtype, operand, numerics):
    words, params, weight = layer(n, k, group, scale_dtype, symmetric)
    x = round_to(np.random.default_rng(1).normal(size=(m, k)), operand)
    kwargs = {"n": n, "k": k, "group_size": group, "symmetric": symmetric, "scale_dtype": scale_dtype}
    y = emulate_w4a16(x, words, params, operand=operand, numerics=numerics, **kwargs)
    assert y.shape == (m, n) and y.dtype == np.float32
    # roundings of the weight: s to the operand type and one product (exact); also m = -z*s, of magnitude 16 s (fused)
    largest = np.abs(weight).max(axis=1) + 16 * np.abs(weight).max()
    rounding = {"exact": 2.1 * np.abs(weight), "fused": 4 * largest[:, None] + 0 * weight, "post": 0 * weight}[numerics]
    bound = np.abs(x) @ (rounding * UNIT[operand] + 2.0**-22 * (np.abs(weight) + np.abs(weight).max() * 20)).T + 1e-9
    assert (np.abs(y - x @ weight.T) <= bound).all()


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("operand", ["float16", "bfloat16"])
def test_identity_activations_read_the_weights_back(numerics, operand):
    n, k, group = 64, 128, 32
    words, params, weight = layer(n, k, group, operand, False, seed=5)
    y = emulate_w4a16(
        np.eye(k), words, params, n=n, k=k, group_size=group, symmetric=False, scale_dtype=operand, operand=operand,
        numerics=numerics,
    )  # fmt: skip
    if numerics == "exact":
        assert (y.T == round_to(weight, operand)).all()
    elif numerics == "post":
        assert np.allclose(y.T, weight, rtol=2e-6, atol=1e-7)


def test_a_displaced_word_is_noticed():
    words, params, _ = layer(64, 128, 128, "float16", True)
    wrong = words.copy()
    wrong[0, 0, [0, 1]] = wrong[0, 0, [1, 0]]
    kwargs = {"n": 64, "k": 128, "group_size": 128, "symmetric": True}
    assert (
        emulate_w4a16(np.eye(128), wrong, params, **kwargs) != emulate_w4a16(np.eye(128), words, params, **kwargs)
    ).any()


@pytest.mark.parametrize(
    "change,name",
    [
        ({"numerics": "best"}, "numerics"),
        ({"operand": "float32"}, "operand"),
        ({"scale_dtype": "int8"}, "scale_dtype"),
        ({"symmetric": False}, "params"),
        ({"n": 65}, "words"),
        ({"k": 129}, "words"),
    ],
)
def test_bad_arguments_are_named(change, name):
    words, params, _ = layer(64, 128, 128, "float16", True)
    kwargs = {"n": 64, "k": 128, "group_size": 128, "symmetric": True} | change
    with pytest.raises(LayoutError) as error:
        emulate_w4a16(np.zeros((1, kwargs["k"])), words, params, **kwargs)
    assert error.value.argument == name
