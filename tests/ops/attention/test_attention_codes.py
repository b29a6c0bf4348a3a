"""Codes of decode's outputs without a GPU: what is asked for, fake tensors, traced calls, kernels."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import quantized
from terrazzo.ops.attention import checks, decode, decode_requests, pack_cache, torch_op
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.decoding import codes, reference
from torch._subclasses import FakeTensorMode

FORMS = [(quant, columns) for quant in quantized.QUANTS for columns in {False, "block" in quant}]


@pytest.fixture
def cache():
    return pack_cache(*torch.randn(2, 3, 2, 64, 64), "int4", "int4", lengths=torch.tensor([3, 64, 0]), residual=0)


@pytest.mark.parametrize("quant, columns", FORMS)
def test_fake_tensors_know_the_codes(cache, quant, columns):
    with FakeTensorMode() as mode:
        held = {f.name: getattr(cache, f.name) for f in fields(cache)}
        fake = replace(cache, **{n: mode.from_tensor(t) for n, t in held.items() if isinstance(t, torch.Tensor)})
        q, smooth = torch.empty(3, 2, 6, 64, dtype=torch.float16), torch.empty(384)
        made = decode(q, fake, quant=quant, smooth=smooth, column_scales=columns)
        assert made.shape == (3, 2, 384) and made.q.shape == (6, 384) and made.codes == quant.partition("_")[0]
        sizes = {"int8": (6,), "e4m3": (6,)}.get(quant, (3, 8) if columns else (6, 3))
        assert made.scales.shape == sizes
        assert decode(q[:, 0], fake, quant=quant).shape == (3, 384)


@pytest.mark.parametrize("quant, columns", FORMS)
def test_a_node_of_a_graph_has_the_codes_of_its_output(cache, quant, columns):
    rng = torch.Generator().manual_seed(2)
    q, smooth = torch.randn(3, 1, 6, 64, generator=rng).half(), torch.rand(384, generator=rng) + 0.5
    out, lse, *parts = torch_op.call("decode_quantized", (q,), cache, None, 0.0, 0, None, quant, smooth, columns)
    made = quantized.of_tensors(parts, (3, 1, 384), quant, columns)
    expected, sums, _ = reference.decode(q, cache, reference.Options())
    assert torch.equal(out, expected.half()) and torch.equal(lse, sums.float())
    values = out.view(3, 384).float()
    off = (made.dequantize().view(3, 384) * smooth - values).abs()
    step = {"int8": 0.51 / 127, "e4m3": 0.037}[made.codes]
    assert bool((off <= step * smooth * (values / smooth).abs().amax(1, keepdim=True)).all())
    assert bool((made.q[2].float() == 0).all()), "a row without a token is not zero"
    assert quant != "int8" or torch.equal(made.row_sums, made.q.sum(1, dtype=torch.int32))


BAD_CODES = pytest.mark.parametrize(
    "words, options",
    [
        ("quant = 'int4'.*must be None or one of", dict(quant="int4")),
        ("column_scales = 'yes'.*must be True or False", dict(quant="int8_block128", column_scales="yes")),
        ("column_scales = 1.*must be True or False", dict(column_scales=1)),
        ("smooth = 'given'.*pass quant", dict(smooth=torch.ones(384))),
        ("column_scales = True", dict(quant="int8", column_scales=True)),
        ("column_scales = True", dict(column_scales=True)),
        ("smooth = .*64.*must be a float tensor .384.", dict(quant="int8", smooth=torch.ones(64))),
        ("smooth = .*must be", dict(quant="int8", smooth=torch.ones(384, dtype=torch.int32))),
    ],
)


@BAD_CODES
def test_a_compiled_call_refuses_bad_codes(cache, words, options):
    call = lambda q: decode(q, cache, **options)
    torch._dynamo.reset()
    kind = ArgumentError if type(options.get("column_scales", True)) is bool else Exception  # torch's, of another type
    with torch.no_grad(), pytest.raises(kind, match=words if kind is ArgumentError else "column_scales"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(3, 1, 6, 64, dtype=torch.float16))


@BAD_CODES
def test_bad_codes_are_refused_on_any_device(cache, words, options):
    with pytest.raises(ArgumentError, match=words):
        decode(torch.zeros(3, 1, 6, 64, dtype=torch.float16), cache, **options)
    with pytest.raises(ArgumentError, match="q = .*must be"):
        decode(torch.zeros(6, 64, dtype=torch.float16), cache, quant="int8")


def test_kernels_of_codes_can_be_compiled_up_front(cache):
    facts = dict(target="sm_90a", smooth=True)
    (made,) = decode_requests((3, 1, 6, 64), cache, quant="e4m3", **facts)
    assert dict(made.params)["output"] == "e4m3" and dict(made.params)["smooth"] is True
    (plain,) = decode_requests((3, 1, 6, 64), cache, target="sm_90a")
    assert not {"output", "smooth", "column_scales"} & dict(plain.params).keys()
    with pytest.raises(ArgumentError, match="quant = 'e4m3'.*sm_80"):
        decode_requests((3, 1, 6, 64), cache, quant="e4m3", target="sm_80")
    with pytest.raises(ArgumentError, match="smooth"):
        decode_requests((3, 1, 6, 64), cache, smooth=True, target="sm_90a")


def test_a_launch_gets_a_counter_for_each_sequence_and_room_for_codes(cache, monkeypatch):
    """Launches on the CPU: what the kernel is given, in the order of its program."""
    from terrazzo.lowering import kernels
    from terrazzo.lowering.targets import Target

    given = []

    class Kernel:
        def __call__(self, *args):
            given.append(args)

    monkeypatch.setattr(kernels, "get_kernel", lambda request: Kernel())
    monkeypatch.setattr(launch, "current_targets", lambda *_: (Target.parse("sm_90a"), Target.parse("sm_90a")))
    monkeypatch.setattr(checks, "check_on_gpu", lambda *_: None)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    counted = []
    monkeypatch.setattr(
        launch, "semaphores", lambda device, count, captured: counted.append(count) or torch.zeros(count)
    )
    q = torch.zeros(3, 1, 6, 64, dtype=torch.float16)
    made = decode(q, cache, quant="int8_block128", column_scales=True)
    decode(q, cache)
    assert counted[0] == counted[1] + 3 and len(given[0]) == len(given[1]) + 4
    assert given[0][14].data_ptr() == made.q.data_ptr() and given[0][15].numel() == 3 * 4
    assert isinstance(made, quantized.BlockQuantizedActivations) and codes.coding_of(None, False, False) is None
