"""gpt-oss on a GPU: a small folder of its structure from `terrazzo.load` to generated tokens, beside transformers in
float32; and its experts at their real sizes, in float64."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo import nn  # noqa: E402
from terrazzo.lowering.targets import Target  # noqa: E402
from terrazzo.nn import generation  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.nn.preparing import kernel_requests  # noqa: E402
from terrazzo.ops import activation, model_requests, moe, mxfp4, mxfp4_fp8  # noqa: E402
from terrazzo.ops.kinds.base import Serving  # noqa: E402
from terrazzo.ops.model_layers import Linear  # noqa: E402
from terrazzo.ops.w4a8 import fp8_reference  # noqa: E402
from terrazzo.ops.weight_only import reference  # noqa: E402

from tests.nn.gpt_oss_folder import apart, config_of, logits, written  # noqa: E402
from tests.nn.gpt_oss_folder import model_of as random_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_compiles")
DEVICE = "cuda"
PROMPTS = [torch.randint(0, 512, (m,), generator=torch.Generator().manual_seed(m)) for m in (300, 41)]
"""The first is longer than twice the window."""
NEW = 12


@pytest.fixture(autouse=True)
def hopper(gpu) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")


@cache
def folder() -> tuple[Path, torch.nn.Module]:
    """Ratios of gpt-oss-20b, of a tenth of its width: 32 experts of which four are taken, 8 queries for each key, a
    window of 128 in every second layer, sizes that are no multiple of 64."""
    config = config_of(
        hidden_size=288, intermediate_size=288, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=512, num_local_experts=32, num_experts_per_tok=4, sliding_window=128, max_position_embeddings=2048,
    )  # fmt: skip
    return written(Path(tempfile.mkdtemp()), random_model(config), config)


@cache
def exact() -> torch.nn.Module:
    """transformers' own modules in float32."""
    return folder()[1].to(DEVICE)


@cache
def rounded(dtype: str) -> torch.nn.Module:
    """The same in 16 bits: how far rounding takes a model of random routers from float32."""
    return copy.deepcopy(exact()).to(getattr(torch, dtype))


@dataclass(frozen=True)
class Case:
    """A model as it is loaded."""

    dtype: str
    activations: str | None = None

    def model(self) -> Any:
        return _loaded(self)

    def requests(self) -> list:
        target = Target.detect()
        return kernel_requests(self.model(), [1, 2, 41, 82, 294, 300, 341], target=target)


@cache
def _loaded(case: Case) -> Any:
    return load(folder()[0], device=DEVICE, dtype=getattr(torch, case.dtype), activations=case.activations)


CASES = {"bfloat16": Case("bfloat16"), "float16": Case("float16"), "e4m3": Case("bfloat16", "e4m3")}


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each token's logits, over their norm."""
    return torch.tensor([apart(one, other) for one, other in zip(got[0], wanted[0])])


@pytest.mark.parametrize("cases", [pytest.param((case,), id=name) for name, case in CASES.items()])
@torch.no_grad()
def test_logits_are_those_of_transformers(compiled, cases):
    """Of a prompt beyond the window and six steps: no farther from float32 than transformers in the same dtype."""
    (case,) = cases
    tokens = PROMPTS[0][None].to(DEVICE)
    wanted, got = exact()(tokens).logits, logits(case.model(), tokens)
    assert bool(got.isfinite().all())
    own, theirs = off_by(got, wanted), off_by(rounded(case.dtype)(tokens).logits, wanted)
    print(f"{case}: off by {own.median():.4f} (90 %: {own.quantile(0.9):.4f}), transformers {theirs.median():.4f}")
    assert own.median() < theirs.median() and own.quantile(0.9) < theirs.quantile(0.9)
    assert own[-6:].median() < theirs.quantile(0.9)
    assert torch.equal(logits(case.model(), tokens), got)


@pytest.mark.parametrize("cases", [pytest.param((CASES[name],), id=name) for name in ("float16", "bfloat16")])
@torch.no_grad()
def test_generated_tokens_are_likely_ones_of_transformers(compiled, cases):
    """Greedy tokens of two prompts at once, by both loops: each has the highest float32 logit behind those before it,
    within what rounding moves logits by."""
    (case,) = cases
    made = generation.generate(case.model(), PROMPTS, max_new_tokens=NEW)
    rows = torch.stack([PROMPTS[1]] * 2).to(DEVICE)
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    again = case.model().generate(rows, attention_mask=torch.ones_like(rows), **options)
    assert torch.equal(again[0], again[1])
    for prompt, tokens in [*zip(PROMPTS, made), (PROMPTS[1], again[0, len(PROMPTS[1]) :])]:
        assert len(tokens) == NEW
        whole = torch.cat([prompt.to(DEVICE), torch.as_tensor(tokens).to(DEVICE)])
        wanted, near = (
            it(whole[None, :-1]).logits[0, len(prompt) - 1 :].float() for it in (exact(), rounded(case.dtype))
        )
        short = wanted.amax(-1) - wanted.gather(1, whole[len(prompt) :, None])[:, 0]
        most = 2 * float((near - wanted).abs().max())
        print(f"{case}: {int((short == 0).sum())} of {NEW} the same, short by {float(short.max()):.4f} of {most:.4f}")
        assert float(short.max()) <= most


EXPERTS, HIDDEN, TOP_K = 32, 2880, 4


@dataclass(frozen=True)
class Real:
    """A layer's experts at the sizes of gpt-oss-20b."""

    activations: str | None = None
    tokens: tuple[int, ...] = (1, 16, 128, 1024)

    def requests(self) -> list:
        e4m3 = self.activations is not None
        options = dict(m=self.tokens, norms=(False,), smooth=False)
        serving = Serving(Target.detect(), "bfloat16", **options)
        found = activation.kernel_requests(
            HIDDEN, m=[TOP_K * t for t in self.tokens], dtype="bfloat16", target=serving.target,
            activation="swiglu_oai", quant="e4m3" if e4m3 else None,
        )  # fmt: skip
        for n in (2 * HIDDEN, HIDDEN):
            kind = Linear("mxfp4_fp8" if e4m3 else "mxfp4", "", n, HIDDEN, 32, True, "float32", True, EXPERTS)
            found += model_requests.layer_requests(kind, serving, TOP_K)
        return found


@cache
def published() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(blocks, scales, bias) of gate and up and of down; scales of a row lie within 8 binades."""
    rng, parts = torch.Generator(DEVICE).manual_seed(5), []
    for n in (2 * HIDDEN, HIDDEN):
        shape, own = (EXPERTS, n, HIDDEN // 32), dict(device=DEVICE, generator=rng)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, **own)
        scales = torch.randint(113, 121, shape, dtype=torch.uint8, **own)
        parts.append((blocks, scales, torch.randn(EXPERTS, n, **own).bfloat16()))
    return tuple(parts)


def decoded(part: tuple[torch.Tensor, ...], expert: int, rows: slice = slice(None)) -> torch.Tensor:
    """float64 [N, K] of one expert as published, by the table of e2m1."""
    levels = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor(levels + [-v for v in levels], dtype=torch.float64, device=DEVICE)
    blocks, scales = part[0][expert, rows].long(), part[1][expert, rows].double()
    values = torch.stack([table[blocks & 15], table[blocks >> 4]], -1).flatten(-2)
    return (values * 2.0 ** (scales[..., None] - 127)).flatten(-2)


@pytest.mark.parametrize("cases", [pytest.param((Real(a),), id=a or "bfloat16") for a in (None, "e4m3")])
@torch.no_grad()
def test_experts_of_their_real_size(compiled, cases):
    """Both products at each element within their bounds, and the weighted sum of all within rounding of bfloat16."""
    (case,) = cases
    gate_up, down = published()
    experts = nn.Experts.from_gpt_oss(gate_up, down, activations=case.activations)
    family = mxfp4 if case.activations is None else mxfp4_fp8
    rng = torch.Generator(DEVICE).manual_seed(6)
    for t in case.tokens:
        x = torch.randn(t, HIDDEN, device=DEVICE, generator=rng).bfloat16()
        ids = torch.rand(t, EXPERTS, device=DEVICE, generator=rng).topk(TOP_K).indices
        shares = torch.rand(t, TOP_K, device=DEVICE, generator=rng)
        routing = moe.sort_by_expert(ids, EXPERTS)
        made, edges = experts(x, ids, shares), routing.offsets.tolist()
        assert torch.equal(experts(x, ids, shares), made)
        given = x if case.activations is None else family.quantize_activations(x)
        rows, outs = moe.gather(given, routing), torch.zeros(t * TOP_K, HIDDEN, dtype=torch.float64, device=DEVICE)
        own = torch.full((t * TOP_K, 2 * HIDDEN), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        more = {} if case.activations is None else dict(out_dtype=torch.bfloat16)
        family.grouped_gemm(rows, experts.gate_up_proj.packed, routing.offsets, out=own, **more)
        sorted_x = moe.gather(x, routing)
        for e in (e for e in range(EXPERTS) if edges[e] < edges[e + 1]):
            part = slice(edges[e], edges[e + 1])
            one = experts.gate_up_proj.packed[e]
            if case.activations is None:
                ref = reference.gemm(rows[part], one, "exact")
                bound = reference.forward_error_bound(rows[part], one, "exact")
            else:
                q, scales = rows.q[part, :HIDDEN], rows.scales[part]
                ref = fp8_reference.gemm(q, scales, one)
                bound = fp8_reference.forward_error_bound(q, scales, one, torch.bfloat16)
            bad = ~((own[part].double() - ref).abs() <= bound)
            assert not bool(bad.any()), f"{t} tokens, expert {e}: {int(bad.sum())} of {bad.numel()} outside the bound"
            h = sorted_x[part].double() @ decoded(gate_up, e).T + gate_up[2][e].double()
            gate, up = h[:, 0::2].clamp(max=7), h[:, 1::2].clamp(-7, 7)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            outs[part] = h @ decoded(down, e).T + down[2][e].double()
        wanted = moe.combine(outs, routing, shares.double())
        off = apart(made.double(), wanted)
        print(f"{case.activations or 'bfloat16'}, {t} tokens: off by {off:.4f}")
        assert off < (0.01 if case.activations is None else 0.05)
