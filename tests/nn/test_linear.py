"""nn.Linear on the CPU: what forward reads is what the state holds, whatever is done to the module."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from layers import BIAS, PACKED, SMOOTH, K, N, act_order, layer, weight, x
from safetensors.torch import load, save
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.nn import Format, Linear, formats
from terrazzo.ops import fp8, mxfp4, mxfp4_mxfp8, w4a8, w4a16, w4ax

pytestmark = pytest.mark.usefixtures("oracle")

every = pytest.mark.parametrize("name", PACKED)


def definition(x: torch.Tensor, w) -> torch.Tensor:
    """y of the operator's oracles, rounded once."""
    from terrazzo.ops.w4a8 import fp8_reference, mxfp8
    from terrazzo.ops.w4a8 import reference as int8_reference
    from terrazzo.ops.w4a16 import reference as w4a16_reference
    from terrazzo.ops.w4ax import reference as w4ax_reference
    from terrazzo.ops.weight_only import reference as weight_only_reference

    if isinstance(w, w4a16.PackedWeight):
        numerics = "exact" if f"torch.{w.scale_dtype}" == str(x.dtype) else "post"
        bias = None if w.bias is None else w.bias.to(x.dtype)
        return w4a16_reference.gemm(x, w, numerics, bias).to(x.dtype)
    if isinstance(w, mxfp4.PackedWeight):
        return weight_only_reference.forward(x, w, None if w.bias is None else w.bias.to(x.dtype))
    if isinstance(w, w4ax.PackedWeight):
        granularity = "two_level" if w.two_level else "block"
        facts = dict(blocks8=w.blocks8, permutation=w.permutation, granularity=granularity, wide=True)
        return w4ax_reference.gemm(*w4ax_reference.quantize_activations(x, **facts), w).to(x.dtype)
    if isinstance(w, w4a8.PackedWeight):
        q, scales, _ = int8_reference.quantize_activations(x, w.smooth)
        return int8_reference.gemm(q, scales, w).to(x.dtype)
    if isinstance(w, mxfp4_mxfp8.PackedWeight):
        made = mxfp8.reference(x)
        return fp8_reference.gemm(made.q[:, : w.k], made.token_scales(), w).to(x.dtype)
    return fp8_reference.gemm(*fp8_reference.quantize_activations(x, w.smooth), w).to(x.dtype)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward_on_a_cpu_is_the_operators_definition(name, dtype):
    made = layer(name)
    given = x(dtype=dtype)
    y = made(given)
    assert y.dtype == dtype and torch.equal(y, definition(given, made.packed))
    deep = made(given.view(1, 5, 1, K))
    assert deep.shape == (1, 5, 1, N) and torch.equal(deep.view(5, N), y)
    assert made(given[:0]).shape == (0, N)


@every
def test_a_layer_keeps_its_weight_through_casts_copies_and_pickles(name):
    made = layer(name)
    y = made(x())
    for change in (
        lambda m: m.half(), lambda m: m.to(torch.bfloat16).to(torch.float16), lambda m: m.double(), lambda m: m.cpu(),
        lambda m: m.type(torch.float32), copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_save,
    ):  # fmt: skip
        changed = change(copy.deepcopy(made))
        for buffer in (b for b in made._buffers if b != "bias"):
            before, after = made._buffers[buffer], changed._buffers[buffer]
            assert (before is None and after is None) or (before.dtype == after.dtype and torch.equal(before, after))
        close = dict(rtol=2**-7, atol=2**-7)  # a bias that was cast to bfloat16 and back
        torch.testing.assert_close(changed(x()), y, **(close if made.bias is not None else dict(rtol=0, atol=0)))
    assert made.half().bias is None or made.bias.dtype == torch.float16


def through_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_is_what_forward_reads(name, assign):
    state = load(save(layer(name).state_dict()))  # through safetensors
    other = layer(name)
    for buffer in ("words", "params", "channel_scales"):
        if buffer in other._buffers and other._buffers[buffer] is not None:
            other._buffers[buffer].zero_()
    other(x())  # it keeps what it read
    assert not other.load_state_dict(state, assign=assign).missing_keys
    assert torch.equal(other(x()), layer(name)(x()))
    assert torch.equal(other.packed.words, state["words"])


@every
def test_a_layer_on_meta_is_filled_by_assignment(name):
    state = layer(name).state_dict()
    for empty in (layer(name).to("meta"), Linear.from_state({k: t.to("meta") if k != "weight_format" else t
                                                             for k, t in state.items()})):  # fmt: skip
        assert empty.words.is_meta
        if empty is not None:
            with pytest.raises(ArgumentError, match="holds no data"):
                empty(x())
        empty.load_state_dict(state, assign=True)
        assert empty.packed.words.device.type == "cpu" and torch.equal(empty(x()), layer(name)(x()))


@every
def test_from_state_makes_the_layer_of_a_state(name):
    made = layer(name)
    state = {f"a.b.{key}": tensor for key, tensor in made.state_dict().items()}
    assert torch.equal(Linear.from_state(state, "a.b.")(x()), made(x()))
    assert repr(Linear.from_state(state, "a.b.")) == repr(made)
    with pytest.raises(ArgumentError, match="must be in the state"):
        Linear.from_state(state, "b.")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("w4a16-g32", dict(bias=True)), ("w4a16-g64-sym", {}), ("w4a16-g128", dict(scale_dtype=torch.bfloat16)),
        ("w4a16-gK", dict(scale_dtype=torch.float32)), ("mxfp4", dict(bias=True)), ("nvfp4", dict(bias=True)),
        ("w8a16-gK-sym", dict(bias=True)), ("w8a16-g64", {}), ("fp8", {}), ("fp8-g128", {}),
        ("w4a8-g64", dict(bias=True, smooth=True)), ("w4a8-g32", {}),
        ("w4a8-e4m3-g128", dict(bias=True, smooth=True)),
    ],
)  # fmt: skip
def test_empty_has_the_shapes_of_a_packed_weight(name, options):
    made, empty = layer(name), Linear.empty(K, N, name, **options)
    shapes = lambda m: {key: (tuple(t.shape), t.dtype if key != "bias" else 0) for key, t in m.state_dict().items()}
    assert shapes(empty) == shapes(made) and empty.words.is_meta
    empty.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(empty(x()), made(x()))


def test_empty_makes_act_order_and_mixed_layers():
    made = Linear(act_order())
    empty = Linear.empty(K, N, "w4a16-g32", act_order=True, bias=True)
    empty.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(empty(x()), made(x()))
    made = layer("w4ax-g128")
    packed = made.packed
    facts = dict(blocks8=packed.blocks8, order=packed.order, bias=True, target="sm_90a")
    empty = Linear.empty(K, N, "w4ax", **facts)
    empty.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(empty(x()), made(x()))
    with pytest.raises(ArgumentError, match="packed for a target"):
        Linear.empty(K, N, "w4ax")


@pytest.mark.parametrize(
    ("own", "other", "says"),
    [
        ("w4a16-g32", "w4a16-g64-sym", "group_size"), ("w4a16-g128", "w4a16-gK", "group_size"),
        ("w4a8-g64", "w4a8-g32", "group_size|layout"), ("w4a8-g64", "w4a8-e4m3-g128", "family"),
        ("w4ax-g128", "w4ax block scales", "layout|tensors"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_of_another_format_is_refused(own, other, says, assign):
    made = layer(own)
    before = made(x())
    with pytest.raises(ArgumentError, match=says):
        made.load_state_dict(layer(other).state_dict(), assign=assign, strict=False)
    assert torch.equal(made(x()), before)


def test_a_state_that_names_no_format_or_has_other_dtypes_is_refused():
    made = layer("w4a8-g64")
    state = made.state_dict()
    with pytest.raises(ArgumentError, match="must name the format"):
        made.load_state_dict({k: t for k, t in state.items() if k != "weight_format"}, strict=False)
    for change in (dict(channel_scales=state["channel_scales"].half()), dict(words=state["words"].long())):
        with pytest.raises(ArgumentError, match="no other dtype"):
            made.load_state_dict(state | change)
    with pytest.raises(ArgumentError, match="must name the format of its weight"):
        made.load_state_dict(state | {"weight_format": torch.zeros(512, dtype=torch.uint8)})


def test_a_layout_of_another_version_is_refused_by_name():
    made = layer("w4a16-g32")
    facts = made._facts | {"layout": "w4a16.older"}
    from terrazzo.nn import formats

    with pytest.raises(LayoutMismatchError, match=r"w4a16.older"):
        made.load_state_dict(made.state_dict() | {"weight_format": formats.encoded(facts)})
    with pytest.raises(LayoutMismatchError, match=r"w4a16.older"):
        Linear.from_state(made.state_dict() | {"weight_format": formats.encoded(facts)})


def test_tensors_put_in_place_by_other_code_are_read_and_checked():
    """As accelerate's set_module_tensor_to_device does: buffers are replaced one by one."""
    made, other = Linear(w4a16.quantize(weight(seed=5))), layer("w4a16-g64-sym")
    twin = Linear(w4a16.quantize(weight(seed=6)))
    before = made(x())
    for name in ("words", "params", "weight_format"):
        made._buffers[name] = twin._buffers[name].clone()
    assert torch.equal(made(x()), twin(x())) and not torch.equal(made(x()), before)
    made._buffers["weight_format"] = other.weight_format
    with pytest.raises(ArgumentError, match="group_size"):
        made(x())
    made._buffers["weight_format"], made._buffers["words"] = twin.weight_format, other.words.float()
    with pytest.raises(ArgumentError, match="int32"):
        made(x())


def test_accelerate_sets_tensors_of_a_layer():
    set_tensor = pytest.importorskip("accelerate.utils").set_module_tensor_to_device
    made, twin = layer("w4a8-g64").to("meta"), layer("w4a8-g64")
    for name, tensor in twin.state_dict().items():
        set_tensor(made, name, "cpu", value=tensor)
    assert torch.equal(made(x()), twin(x()))


def test_writes_in_place_are_seen():
    made, twin = Linear(w4a16.quantize(weight(seed=5))), Linear(w4a16.quantize(weight(seed=6)))
    made(x())
    made.words.copy_(twin.words)
    made.params.copy_(twin.params)
    assert torch.equal(made(x()), twin(x()))


@every
def test_export_has_the_weight_once_and_in_the_state(name):
    made = layer(name)
    with torch.no_grad():
        program = torch.export.export(made, (x(),))
    assert not program.constants
    assert set(program.state_dict) == set(made.state_dict())
    assert torch.equal(program.module()(x()), made(x()))


@every
def test_a_layer_compiles_to_one_graph(name):
    made = layer(name)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x()), made(x()))
        made.load_state_dict({k: t.clone() for k, t in made.state_dict().items()}, assign=True)
        made.words.zero_()
        assert torch.equal(compiled(x()), made(x()))


@pytest.mark.parametrize(("form", "granularity"), [("fp8-g128", "block"), ("fp8", "channel")])
def test_groups_of_fp8_are_blocks(form, granularity):
    w = weight(256, 256) * torch.linspace(0.1, 9, 256)
    assert torch.equal(
        Linear.from_float(w, form).packed.dequantize(), fp8.quantize(w, granularity=granularity).dequantize()
    )


@pytest.mark.parametrize(
    "form",
    [
        "w4a16-g128",
        "w4a16-g32-sym",
        "w4a16-gK",
        "mxfp4",
        "nvfp4",
        "w8a16",
        "fp8",
        "w4a8",
        "w4a8-g128",
        "w4a8-e4m3",
        "w4ax",
    ],
)
def test_from_float_quantizes_a_layer(form):
    linear = torch.nn.Linear(256, 96)
    options = {"target": "sm_90a"} if form == "w4ax" else {}
    made = Linear.from_float(linear, form, **options)
    assert str(made.format).startswith(form) and (made.in_features, made.out_features) == (256, 96)
    assert str(made.format) in repr(made) and "bias" in repr(made)
    given = x(7, 256)
    wanted = linear(given.float())
    assert (made(given).float() - wanted).norm() < 0.2 * wanted.norm()
    assert Linear.from_float(linear.weight, form, **options).bias is None


@pytest.mark.parametrize("text", ["w4a16-g100", "w4a8-gK", "w4a8-g64-sym", "w8a8-g128", "", None, "w4a16-g128 "])
def test_a_format_that_does_not_exist_is_refused(text):
    with pytest.raises(ArgumentError, match="format.* w8a16-g128.64.32.K.-sym., .*gK: one group") as caught:
        Format.parse(text)
    listed = [form.partition("-g") for form in caught.value.constraint.split(" (")[0].split("one of ")[1].split(", ")]
    for family, _, groups in listed:  # what is listed exists
        for group in groups.removesuffix("[-sym]").split("|"):
            assert str(Format.parse(f"{family}-g{group}")) == f"{family}-g{group}"


def test_bad_arguments_are_refused():
    made = layer("w4a16-g32")
    with pytest.raises(ArgumentError, match="float16 or bfloat16"):
        made(x().float())
    with pytest.raises(ArgumentError, match="last dimension"):
        made(x(5, K + 8))
    with pytest.raises(ArgumentError, match="no gradient"):
        made(x().requires_grad_())
    with pytest.raises(ArgumentError, match="must be a PackedWeight"):
        Linear(made.packed.unpack())
    with pytest.raises(ArgumentError, match="float layer or weight"):
        Linear.from_float([1.0])
    with pytest.raises(ArgumentError, match="must be a PackedWeight"):
        Linear(w4a16.GroupedWeight.stack([made.packed, made.packed]))


@pytest.mark.parametrize("form", ["w4a16", "w8a16", "mxfp4", "nvfp4", "fp8", "w4a8", "w4a8-e4m3", "w8a8", "w4ax"])
@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (256,), (2, 4, 256)])
def test_what_is_no_matrix_is_refused_as_a_weight(form, shape):
    with pytest.raises(ArgumentError, match=r"^weight = .* must be \[N, K\]"):
        Linear.from_float(torch.zeros(shape), form)
    if len(shape) == 3:
        return
    with pytest.raises(ArgumentError, match=r"^weight = .* must be \[N, K\]"):
        Format.parse(form).quantize_experts([torch.zeros(shape)] * 2)


def test_a_state_with_a_smooth_vector_keeps_it_in_float32():
    made = Linear(w4a8.quantize(weight(), smooth=SMOOTH, bias=BIAS)).half()
    assert made.smooth.dtype == torch.float32 and made.bias.dtype == torch.float16


def test_a_module_that_0_2_pickled_is_read():
    """It held what it knew of its format; today's pickles hold nothing of a product, whose fields may change."""
    made = Linear.from_float(torch.randn(64, 128), "w8a8")
    assert b"terrazzo.ops.products" not in pickle.dumps(made)
    twin = Linear.__new__(Linear)
    twin.__setstate__(made.__getstate__() | {"_family": formats.Family()})
    assert twin.kind is made.kind and not hasattr(twin, "_family")
    assert torch.equal(twin.packed.dequantize(), made.packed.dequantize())
