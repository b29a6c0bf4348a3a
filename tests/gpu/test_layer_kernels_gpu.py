"""RMSNorm and gated activations on the GPU: eager torch's bits, float64's values, graphs, dependent launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import delayed_writer
import pytest
import torch
from oracles import TARGET
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.kernels import get_kernel
from terrazzo.lowering.targets import Target
from terrazzo.ops import activation, attention, norm, quantized, rope
from terrazzo.ops.activation import reference as activation_reference
from terrazzo.ops.activation.op import Call as GatedCall
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import rope_writing
from terrazzo.ops.norm import reference as norm_reference
from terrazzo.ops.norm.op import Call as NormCall
from terrazzo.ops.rope import reference as rope_reference
from terrazzo.ops.rope.op import Call as TurnedCall

pytestmark = [pytest.mark.usefixtures("nothing_compiles")]
AT = TARGET or None
TOKENS = (1, 7, 300)
EPS = 1e-5


def target() -> Target | str:
    """An architecture by its name is that of the program alone: the GPU that runs it is the one here."""
    return TARGET or Target.detect()


@dataclass(frozen=True)
class Norm:
    """Rows of RMSNorm; `facts` as `kernel_requests` takes them."""

    k: int
    facts: dict[str, Any] = field(default_factory=dict, hash=False)

    def requests(self) -> list:
        return norm.kernel_requests(self.k, target=target(), **self.facts)

    def __str__(self) -> str:
        return f"{self.k}-" + "-".join(str(value) for value in self.facts.values())


@dataclass(frozen=True)
class Gated:
    """Rows of gated activations; `facts` as `kernel_requests` takes them."""

    k: int
    facts: dict[str, Any] = field(default_factory=dict, hash=False)

    def requests(self) -> list:
        return activation.kernel_requests(self.k, target=target(), **self.facts)

    __str__ = Norm.__str__


def names(cases: tuple) -> str:
    return str(cases[0])


bf16 = dict(dtype="bfloat16")
NORMS = [
    Norm(4096, dict(quant="int8")),
    Norm(4096, dict(quant="int8", numerics="model")),
    Norm(4096, dict(numerics="model") | bf16),
    Norm(8192, dict(quant="int8", smooth=True) | bf16),
    Norm(1024, dict(residual=False)),
    Norm(2880, dict(style="gpt_oss", numerics="model", quant="int8", also_plain=True) | bf16),
    Norm(3584, dict(style="gemma", post=True, numerics="model") | bf16),
    Norm(3584, dict(style="gemma", post=True, quant="int8") | bf16),
    Norm(16384, dict(quant="int8_block128", column_scales=True)),
    Norm(5120, dict(weight_dtype="float32", residual=False, quant="int8")),
    *([] if TARGET == "sm_80" else [Norm(4096, dict(quant="e4m3")), Norm(7168, dict(quant="e4m3_block128") | bf16)]),
]
GATED = [
    Gated(14336, dict(quant="int8")),
    Gated(14336, dict(quant="int8", numerics="model")),
    Gated(1536, bf16),
    Gated(28672, dict(quant="int8", smooth=True) | bf16),
    Gated(2880, dict(activation="swiglu_oai", layout="interleaved", numerics="model") | bf16),
    Gated(2880, dict(activation="swiglu_oai", layout="interleaved", quant="int8")),
    Gated(9216, dict(activation="gelu_tanh", layout="up_gate", numerics="model") | bf16),
    Gated(9216, dict(activation="gelu", quant="int8_block128")),
    Gated(2048, dict(limited=True, numerics="model", quant="int8")),
    Gated(768, dict(quant="int8", experts=128, smooth=True, by_expert=True) | bf16),
    *([] if TARGET == "sm_80" else [Gated(14336, dict(quant="e4m3"))]),
]


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody wrote holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*size: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))) * scale
    return x.to(dtype).cuda()


def norm_inputs(case: Norm, m: int) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any], dict[str, Any]]:
    """x, residual, operands and choices of a call."""
    facts = dict(case.facts)
    dtype = getattr(torch, facts.pop("dtype", "float16"))
    wide = getattr(torch, facts.pop("weight_dtype", str(dtype)[6:]))
    x = random(m, case.k, dtype=dtype)
    x[m // 2, :: case.k // 3] *= 30
    residual = random(m, case.k, dtype=dtype, seed=1, scale=3.0) if facts.pop("residual", True) else None
    offset = 0 if facts.get("style") == "gemma" else 1
    operands: dict[str, Any] = dict(weight=random(case.k, dtype=wide, seed=2, scale=0.1) + offset)
    if facts.pop("post", False):
        operands["post_weight"] = random(case.k, dtype=wide, seed=3, scale=0.1) + offset
    if facts.pop("smooth", False):
        operands["smooth"] = torch.rand(case.k, generator=torch.Generator().manual_seed(4)).cuda() + 0.2
    return x, residual, operands, facts


def norm_call(x, residual, operands, choices):
    if residual is None:
        return norm.rms_norm(x, **operands, eps=EPS, **choices, target=AT)
    return norm.fused_add_rms_norm(x, residual, **operands, eps=EPS, **choices, target=AT)


def norm_reference_of(x, residual, operands, choices):
    defaults = dict(style="llama", quant=None, numerics="fused", also_plain=False, column_scales=False) | choices
    given = (operands["weight"], operands.get("post_weight"), operands.get("smooth"))
    return norm_reference.rms_norm(NormCall(x, residual, *given, EPS, EPS, *defaults.values()))


def check_codes(seen, wanted, exact: bool) -> None:
    assert seen.shape == wanted.shape and seen.codes == wanted.codes
    steps = (seen.q.float() - wanted.q.float()).abs()
    if seen.codes == "int8":
        assert int(steps.max()) <= (0 if exact else 1)
    off = float((steps > 0).float().mean())
    assert off <= (0 if exact else 1e-4), f"{off:.2e} of the codes differ"
    columns = len(seen.q) if getattr(seen, "column_scales", False) else None
    torch.testing.assert_close(seen.scales[..., :columns], wanted.scales[..., :columns], rtol=4e-6, atol=0)
    if getattr(seen, "row_sums", None) is not None:
        assert torch.equal(seen.row_sums, seen.q.sum(1, dtype=torch.int32))


def tensors_of(made) -> list[torch.Tensor]:
    parts = made if isinstance(made, tuple) else (made,)
    found = [it for part in parts for it in ([part] if torch.is_tensor(part) else quantized.tensors(part))]
    return [it.contiguous().view(torch.uint8) for it in found]  # padding of scales stays poisoned: NaN is not NaN


@pytest.mark.parametrize("cases", [(case,) for case in NORMS], ids=names)
@pytest.mark.parametrize("m", TOKENS)
def test_rms_norm_is_eager_torchs_to_the_bit_or_float64s_in_its_bound(cases, m):
    x, residual, operands, choices = norm_inputs(cases[0], m)
    y, codes, h = norm_reference_of(x, residual, operands, choices)
    old = None if residual is None else residual.clone()
    made = norm_call(x, residual, operands, choices)
    if residual is not None:
        off = float((residual != h).float().mean())
        assert off <= (1e-3 if "post_weight" in operands else 0)
    exact = choices.get("numerics") != "model" and "post_weight" not in operands
    if codes is not None:
        check_codes(made[0] if y is not None else made, codes, exact)
    if y is not None:
        seen = made[1] if codes is not None else made
        if exact:
            w = operands["weight"].double() + (choices.get("style") == "gemma")
            ref = h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + EPS) * w
            assert bool(((seen.double() - ref).abs() <= norm_reference.error_bound(h, ref, x.dtype)).all())
        else:
            assert float((seen != y).float().mean()) <= 1e-3  # the last bit of a mean
            torch.testing.assert_close(seen, y, rtol=2**-7 if x.dtype == torch.bfloat16 else 2**-10, atol=0)
    again = norm_call(x, old, operands, choices)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(made), tensors_of(again)))


def gated_inputs(case: Gated, m: int) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    facts = dict(case.facts)
    x = random(m, 2 * case.k, dtype=getattr(torch, facts.pop("dtype", "float16")), scale=2.0)
    operands: dict[str, Any] = {}
    experts, by_expert = facts.pop("experts", 0), facts.pop("by_expert", False)
    if experts:
        cuts = torch.randint(0, m + 1, (experts + 1,), generator=torch.Generator().manual_seed(6)).sort().values
        operands["expert_offsets"] = cuts.int().cuda()
    if facts.pop("smooth", False):
        size = (experts, case.k) if by_expert else (case.k,)
        operands["smooth"] = torch.rand(*size, generator=torch.Generator().manual_seed(4)).cuda() + 0.2
    if facts.pop("limited", False):
        facts["limit"] = 1.5
    return x, operands, facts


@pytest.mark.parametrize("cases", [(case,) for case in GATED], ids=names)
@pytest.mark.parametrize("m", TOKENS)
def test_gated_activations_are_eager_torchs_or_float64s_in_their_bound(cases, m):
    x, operands, choices = gated_inputs(cases[0], m)
    facts = dict(activation="silu", layout="gate_up", limit=None, quant=None, numerics="fused") | choices
    offsets, smooth = operands.get("expert_offsets"), operands.get("smooth")
    limit = 7.0 if facts["activation"] == "swiglu_oai" else facts["limit"]
    kind = (facts["activation"], 1.702, limit)
    made = activation.act_and_mul(x, **operands, **choices, target=AT)
    again = activation.act_and_mul(x, **operands, **choices, target=AT)
    rows = slice(None)
    if offsets is not None:
        low, high = int(offsets[0]), int(offsets[-1])
        rows = slice(low, high)
        outside = torch.cat([made.scales[:low], made.scales[high:]])
        assert bool(outside.isnan().all())
    given = (facts["activation"], facts["layout"], 1.702, limit, facts["quant"], facts["numerics"], False)
    y, codes = activation_reference.act_and_mul(GatedCall(x, smooth, offsets, *given))
    if facts["numerics"] == "model":
        if codes is not None:
            check_codes(made, codes, exact=False)
        else:
            assert float((made != y).float().mean()) <= 1e-4
    else:
        g, u = (t.double() for t in activation_reference.gate_and_up(x, facts["layout"]))
        ref = activation_reference.gated(g, u, *kind, None)
        if codes is None:
            assert bool(((made.double() - ref).abs() <= activation_reference.error_bound(g, u, ref, x.dtype)).all())
        else:
            bound = activation_reference.error_bound(g, u, ref, torch.float16)
            if smooth is not None:
                inverse = 1 / smooth.double()
                inverse = inverse if smooth.ndim == 1 else inverse[activation_reference.experts_of(offsets, m)]
                ref, bound = ref * inverse, bound * inverse
            step = made.scales if made.scales.ndim == 2 else made.scales[:, None]
            step = step.double() if made.scales.ndim == 1 else step.double().repeat_interleave(128, 1)
            half = 0.5 * step if made.codes == "int8" else step * 2.0**-10 + ref.abs() * 2.0**-4
            off = (made.dequantize().double() - ref).abs()[rows] - (half + bound)[rows] * (1 + 1e-6)
            assert bool((off <= 0).all())
    assert all(torch.equal(a, b) for a, b in zip(poison_free(made, rows), poison_free(again, rows)))


def poison_free(made, rows) -> list[torch.Tensor]:
    return [it[rows] for it in tensors_of(made)]


ONE = (Norm(4096, dict(quant="int8")), Gated(14336, dict(quant="int8")))


@pytest.mark.parametrize("cases", [ONE], ids=["int8"])
def test_calls_are_captured_and_compiled_and_take_any_shape(cases):
    torch.use_deterministic_algorithms(False)
    x, residual, operands, _ = norm_inputs(cases[0], 4)
    weight = operands["weight"]

    def layer(x, residual):
        q = norm.fused_add_rms_norm(x, residual, weight, quant="int8", target=AT)
        return q.q, q.scales, q.row_sums

    first = residual.clone()
    expected = [t.clone() for t in layer(x, first)]
    graph, side, second = torch.cuda.CUDAGraph(), torch.cuda.Stream(), residual.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        made = layer(x, second)
    graph.replay()
    assert all(map(torch.equal, made, expected)) and torch.equal(first, second)
    third = residual.clone()
    compiled = torch.compile(layer, fullgraph=True)(x, third)
    assert all(map(torch.equal, compiled, expected)) and torch.equal(first, third)
    apart = torch.cat([x, x], dim=1)[:, : x.shape[1]].view(2, 2, -1)
    fourth = residual.clone()
    q = norm.fused_add_rms_norm(apart, fourth.view(2, 2, -1), weight, quant="int8", target=AT)
    assert q.shape == (2, 2, 4096) and torch.equal(q.q, expected[0]) and torch.equal(first, fourth)
    assert norm.rms_norm(x[:0], weight, quant="int8", target=AT).q.shape == (0, 4096)
    with pytest.raises(ArgumentError, match="residual"):
        norm.fused_add_rms_norm(x, x, weight, target=AT)
    with pytest.raises(ArgumentError, match="residual"):
        norm.fused_add_rms_norm(x, residual.T.contiguous().T, weight, target=AT)
    g = random(4, 28672, dtype=torch.float16)
    h = activation.act_and_mul(g, quant="int8", target=AT)
    run = torch.compile(lambda g: activation.act_and_mul(g, quant="int8", target=AT).q, fullgraph=True)
    assert torch.equal(run(g), h.q)


@dataclass(frozen=True)
class Turned:
    """Heads that are turned; `facts` as `rope.kernel_requests` takes them."""

    head_dim: int
    facts: dict[str, Any] = field(default_factory=dict, hash=False)

    def requests(self) -> list:
        return rope.kernel_requests(self.head_dim, target=target(), **self.facts)

    def __str__(self) -> str:
        return f"{self.head_dim}-" + "-".join(str(value) for value in self.facts.values())


TURNED = [
    Turned(128),
    Turned(128, dict(numerics="model") | bf16),
    Turned(128, dict(norm="llama", positions="int64", numerics="model") | bf16),
    Turned(256, dict(norm="gemma", positions="int32") | bf16),
    Turned(64, dict(layout="interleaved", rotary_dim=32)),
    Turned(96, dict(rotary_dim=48, numerics="model")),
]


@pytest.mark.parametrize("cases", [(case,) for case in TURNED], ids=names)
@pytest.mark.parametrize("m", TOKENS)
def test_heads_are_turned_as_eager_torch_or_float64_turns_them(cases, m):
    case, heads, kv_heads = cases[0], 6, 2
    facts, dim = dict(case.facts), case.head_dim
    dtype = getattr(torch, facts.pop("dtype", "float16"))
    kind, rotary = facts.pop("positions", "none"), facts.get("rotary_dim", dim)
    qkv = random(m, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=2.0)
    angles = torch.rand(max(m, 64), rotary // 2, generator=torch.Generator().manual_seed(3)).cuda() * 6
    tables = angles.cos(), angles.sin()
    operands: dict[str, Any] = {}
    if kind != "none":
        operands["positions"] = torch.randint(0, 64, (m,), generator=torch.Generator().manual_seed(5)).cuda()
        operands["positions"] = operands["positions"].to(getattr(torch, kind))
    if facts.get("norm", "none") != "none":
        for index, name in enumerate(("q_weight", "k_weight")):
            operands[name] = random(dim, dtype=dtype, seed=index, scale=0.1) + (facts["norm"] == "llama")
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=dim)
    made = rope.apply_rope(qkv, *tables, **sizes, **operands, **facts, eps=EPS, target=AT)
    model = facts.get("numerics") == "model"
    given = [operands.get(name) for name in ("positions", "q_weight", "k_weight")]
    rest = (rotary, facts.get("layout", "neox"), facts.get("norm", "none"), EPS, facts.get("numerics", "fused"))
    call = TurnedCall(qkv, *tables, *given, heads, kv_heads, dim, *rest)
    wanted = rope_reference.apply_rope(call, exact=not model)
    for seen, ref in zip(made, wanted):
        if model:
            assert float((seen != ref).float().mean()) <= (0 if rest[2] == "none" else 1e-3)
        else:
            assert bool(((seen.double() - ref).abs() <= rope_reference.error_bound(ref, ref, dtype)).all())
    again = rope.apply_rope(qkv, *tables, **sizes, **operands, **facts, eps=EPS, target=AT)
    assert all(map(torch.equal, made, again))


@dataclass(frozen=True)
class Appended:
    """New tokens that are turned and stored, beside the two operators that do the same."""

    k: str
    v: str
    dtype: str = "float16"
    norm: str = "none"
    residual: int = 0
    head_dim: int = 128

    def requests(self) -> list:
        from terrazzo.ops.attention.writing import writing

        layout, at = CacheLayout(self.k, self.v, self.head_dim), Target.detect()
        kind = dict(rotary_dim=self.head_dim, rope="neox", norm=self.norm, numerics="fused", target=at)
        facts = (layout, self.dtype, 64, self.residual)
        return [
            rope_writing.request(*facts, **kind), writing.write_kernel(*facts, at),
            *rope.kernel_requests(self.head_dim, dtype=self.dtype, norm=self.norm, target=at),
        ]  # fmt: skip


APPENDED = [
    Appended("int4", "int4"),
    Appended("int8", "int4", norm="llama", dtype="bfloat16"),
    Appended("int4_hadamard", "int4"),
    Appended("int4_channel64", "int4", residual=64),
    Appended("float16", "float16", head_dim=64),
    Appended("fp8", "fp8"),
    Appended("int8_static", "int8_static"),
]


@pytest.mark.skipif(bool(TARGET), reason="the write kernel's own tests run programs of sm_80")
@pytest.mark.parametrize("cases", [(case,) for case in APPENDED], ids=names)
@pytest.mark.parametrize("new", [1, 3])
def test_turning_and_storing_at_once_has_the_bits_of_both_operators(cases, new):
    torch.use_deterministic_algorithms(False)
    case, heads, kv, sequences = cases[0], 8, 2, 40
    sizes = dict(kv_heads=kv, head_dim=case.head_dim, pages=120, page_size=64, sequences=sequences, device="cuda")
    layout = CacheLayout(case.k, case.v, case.head_dim)
    for name, fmt in (("k_static", layout.k), ("v_static", layout.v)):
        if fmt.scaling == "static":
            sizes[name] = 0.02 + 0.01 * torch.rand(kv, case.head_dim, device="cuda")
    caches = [attention.KVCache(case.k, case.v, **sizes, residual=case.residual) for _ in range(2)]
    norms = {}
    if case.norm != "none":
        vectors = [random(case.head_dim, dtype=getattr(torch, case.dtype), seed=s) for s in (7, 8)]
        norms = dict(norm=case.norm, q_weight=vectors[0], k_weight=vectors[1])
    names = [[cache.new() for _ in range(sequences)] for cache in caches]
    for step in range(5):  # each sequence at a place of its own in its tile
        counts = [1 + (i * 7) % 60 if step == 0 else new for i in range(sequences)]
        batches = [cache.extend(dict(zip(own, counts))) for cache, own in zip(caches, names)]
        total = sum(counts)
        qkv = random(total, (heads + 2 * kv) * case.head_dim, dtype=getattr(torch, case.dtype), seed=step)
        rows = qkv.view(total, heads + 2 * kv, case.head_dim)
        if step == 0:
            for batch in batches:
                batch.store(rows[:, heads : heads + kv].contiguous(), rows[:, heads + kv :].contiguous(), 0)
            continue
        angles = torch.rand(total, case.head_dim // 2, device="cuda") * 6
        tables = angles.cos(), angles.sin()
        q = batches[0].rope_append(qkv, *tables, 0, heads=heads, **norms)
        facts = dict(heads=heads, kv_heads=kv, head_dim=case.head_dim)
        other, k = rope.apply_rope(qkv, *tables, **facts, **norms)
        shape = (sequences, new, kv, case.head_dim)
        batches[1].append(k.view(shape), rows[:, heads + kv :].contiguous().view(shape), 0)
        assert torch.equal(q.view_as(other), other)
        assert torch.equal(caches[0].pages[0], caches[1].pages[0])
        if case.residual:
            assert torch.equal(caches[0].residual, caches[1].residual)


@dataclass(frozen=True)
class Delayed:
    def requests(self) -> list:
        return [delayed_writer.request("float16", Target.detect())]


@pytest.mark.skipif(bool(TARGET), reason="programs of sm_80 do not start before their predecessors have ended")
@pytest.mark.parametrize("cases", [(Delayed(), *ONE)], ids=["int8"])
@pytest.mark.parametrize("late", ["x", "residual", "residual, two kernels ahead"])
def test_a_kernel_that_starts_early_reads_what_its_predecessors_write_late(cases, late):
    """One kernel of the chain sleeps after it has let the next one start; results are those of a slow chain."""
    writer = get_kernel(cases[0].requests()[0])
    x, residual, operands, choices = norm_inputs(cases[1], 7)
    expected_residual = residual.clone()
    expected = norm_call(x, expected_residual, operands, choices)
    torch.cuda.synchronize()
    stale_x, stale_residual, other = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    writer(x.view(-1), other.view(-1), 0)  # what was never launched is not captured
    for _ in range(3):
        stale_x.zero_(), stale_residual.zero_()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            if late == "x":
                writer(residual.view(-1), stale_residual.view(-1), 0)
                writer(x.view(-1), stale_x.view(-1), 200)
            else:
                writer(x.view(-1), stale_x.view(-1), 0)
                writer(residual.view(-1), stale_residual.view(-1), 200)
                if "two" in late:
                    writer(x.view(-1), other.view(-1), 0)
            made = norm_call(stale_x, stale_residual, operands, choices)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made.q, expected.q) and torch.equal(stale_residual, expected_residual)
