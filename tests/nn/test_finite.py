"""What is no number in a packed or published folder is refused by name at load: greedy would emit token 0 for ever."""

from __future__ import annotations

import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mutation  # noqa: E402
import terrazzo  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from terrazzo import nn  # noqa: E402
from terrazzo.lowering.errors import ArgumentError, TerrazzoError  # noqa: E402
from terrazzo.nn import formats  # noqa: E402
from terrazzo.nn.experts import GroupedLinear  # noqa: E402
from terrazzo.nn.module import stored_weight  # noqa: E402
from terrazzo.nn.quantizing import quantize_folder  # noqa: E402
from terrazzo.ops import fp8, mxfp4, w4a8, w4a16, w4ax, w8a8  # noqa: E402
from terrazzo.ops.grouped import GroupedWeight  # noqa: E402
from terrazzo.ops.products.table import BY_WORD  # noqa: E402
from tiny_text import write_folder  # noqa: E402

N, K = 128, 256
OF_ONE = {"w4a8-e4m3": torch.float16, "mxfp4-e4m3": torch.float16, "mxfp4-mxfp8": torch.float16, "w4ax": torch.bfloat16}
"""Formats whose words end in scales of groups, and their dtype."""


def weight_of(name, seed=0):
    """A packed weight of each format, with a bias and what vectors it may have."""
    torch.manual_seed(seed)
    values, options = torch.randn(N, K) / 16, {"target": "sm_90a"} if name in ("w4ax", *OF_ONE) else {}
    return formats.Format.parse(name).quantize(values, torch.randn(N), **options)


NAMES = [*BY_WORD, "w4a16-gK-sym", "fp8-g128", "w8a8-e4m3-g128"]


@pytest.fixture(scope="module")
def packed():
    return {name: weight_of(name) for name in NAMES}


def damage(packed, name, value):
    """(tensor, a state where one of its numbers is `value`) of each tensor of floats that a packed weight has."""
    state = nn.Linear(packed[name]).state_dict()
    for leaf in formats.tensors_of(formats.product_of(packed[name])):
        held = state.get(leaf)
        if held is None or (leaf in ("words", "perm", "permutation")):
            continue
        changed = held.clone()
        if leaf == "params":  # of records: the last floats are a row's factors, and the first scales
            scales = packed[name].scale_dtype
            if name.startswith(("w4a16", "w8a16")):
                changed.view(-1)[:64].view(getattr(torch, scales))[3] = value
            else:
                changed.view(-1)[-64:].view(torch.float32)[3] = value
        else:
            changed.view(-1)[3] = value
        yield leaf, state | {leaf: changed}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_is_refused_in_every_packed_format(packed, name, value):
    seen = []
    for leaf, state in damage(packed, name, value):
        with pytest.raises(ArgumentError, match=f"^{leaf} = "):
            nn.Linear.from_state(state)
        with pytest.raises(ArgumentError, match=f"^model.{leaf} = "):
            stored_weight({f"model.{key}": t for key, t in state.items()}, "model.")
        seen.append(leaf)
    assert "bias" in seen and (len(seen) > 1 or name == "w4ax")
    nn.Linear.from_state(nn.Linear(packed[name]).state_dict())  # as it was


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8", "fp8-g128", "w8a8", "w8a8-e4m3"])
def test_scales_that_cannot_be_negative_are_not(packed, name):
    found = dict(damage(packed, name, -1.0))
    with pytest.raises(ArgumentError, match="must be at least 0"):
        nn.Linear.from_state(found["params" if "params" in found else "scales"])


@pytest.mark.parametrize("name", OF_ONE)
def test_scales_inside_of_words_are_looked_at(packed, name):
    state = nn.Linear(packed[name]).state_dict()
    words = state["words"].clone()
    words.view(-1)[-1:].view(OF_ONE[name])[1] = float("nan")
    with pytest.raises(ArgumentError, match="^words = "):
        nn.Linear.from_state(state | {"words": words})


def test_codes_that_are_no_numbers_are_refused(packed):
    state = nn.Linear(packed["w8a8-e4m3"]).state_dict()
    for byte in (0x7F, 0xFF):
        words = state["words"].clone()
        words.view(torch.uint8).view(-1)[77] = byte
        with pytest.raises(ArgumentError, match="words = 'NaN'"):
            nn.Linear.from_state(state | {"words": words})


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "mxfp4", "w8a8"])
def test_experts_are_looked_at(name):
    experts = GroupedWeight.stack([weight_of(name, seed) for seed in range(3)])
    state = GroupedLinear(experts).state_dict()
    assert len(stored_weight(state)) == 3
    for leaf in {"bias", "params", "scales", "channel_scales"} & set(state):
        changed = state[leaf].clone()
        if leaf == "params":
            changed[2].view(-1)[-64:].view(torch.float32).fill_(float("nan"))
            changed[2].view(-1)[:64].view(torch.float16).fill_(float("nan"))
        else:
            changed[2].view(-1)[1] = float("nan")
        with pytest.raises(ArgumentError, match=leaf):
            stored_weight(state | {leaf: changed})


IMPORTERS = {
    "w4a16": lambda bias: w4a16.pack(torch.ones(N, K).int(), torch.ones(N, 2).half(), bias=bias),
    "w4a8": lambda bias: w4a8.quantize(torch.randn(N, K), bias=bias),
    "w4a8 e4m3": lambda bias: w4a8.fp8.quantize(torch.randn(N, K), bias=bias),
    "fp8": lambda bias: fp8.quantize(torch.randn(N, K), bias=bias),
    "mxfp4": lambda bias: mxfp4.quantize(torch.randn(N, K), bias=bias),
    "w8a8": lambda bias: w8a8.quantize(torch.randn(N, K), bias=bias),
    "w4ax": lambda bias: w4ax.quantize(torch.randn(N, K), w4ax.plan_blocks(torch.ones(K), ratio=0.5), bias=bias,
                                       target="sm_90a"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPORTERS)
def test_canonical_weights_have_finite_biases(name):
    bias = torch.zeros(N)
    IMPORTERS[name](bias)
    bias[5] = float("inf")
    with pytest.raises(ArgumentError, match="^bias = 'NaN or infinity'"):
        IMPORTERS[name](bias)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A float folder, and the packed one of it."""
    made = tmp_path_factory.mktemp("finite")
    write_folder(made / "float")
    text = torch.arange(64)[None] % 200
    quantize_folder(made / "float", made / "packed", "w4a16-g128", device="cpu", kv="fp8", calibration=text)
    return made


@pytest.mark.parametrize("kind", ["float", "packed"])
def test_every_tensor_of_a_folder_is_looked_at(folders, tmp_path, kind):
    folder = shutil.copytree(folders / kind, tmp_path / kind)
    seen = 0
    for file in sorted(folder.glob("*.safetensors")):
        held, good = load_file(file), file.read_bytes()
        for name, tensor in held.items():
            if not tensor.numel() or not (tensor.is_floating_point() or name.endswith("params")):
                continue
            for value in (float("nan"), float("inf")):
                changed = tensor.clone()
                flat = changed.view(-1)[:64].view(torch.float16) if name.endswith("params") else changed.view(-1)
                flat[1] = value
                save_file(held | {name: changed}, file, metadata={"format": "pt"})
                with pytest.raises(ArgumentError):
                    terrazzo.load(folder, device="cpu")
                seen += 1
        file.write_bytes(good)
    assert seen > 20
    terrazzo.load(folder, device="cpu")


def test_damaged_states_are_refused_or_read(packed, tries):
    """Facts, tensors and their values; what is accepted is finite."""
    refused = 0
    for random in tries(200):
        name = random.choice(NAMES)
        state = nn.Linear(packed[name]).state_dict()
        if random.random() < 0.5:
            facts = formats.decoded(state["weight_format"], "weight_format")
            text = mutation.text(mutation.value(facts, random), random)[:600]
            state["weight_format"] = torch.frombuffer(bytearray(text.ljust(1)), dtype=torch.uint8).clone()
        else:
            state = mutation.tensors(state, random)
        try:
            made = stored_weight(state)
        except TerrazzoError:
            refused += 1
            continue
        one = made.stacked if isinstance(made, GroupedWeight) else made
        assert bool(one.dequantize().isfinite().all()) and (one.bias is None or bool(one.bias.isfinite().all()))
    assert refused > 50
