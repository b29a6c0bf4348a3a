"""Small cases of every program, for compute-sanitizer to watch:

    compute-sanitizer --tool memcheck python tests/gpu/sanitized.py w4a8

Operands and references are made on the CPU, so that the watched process launches our kernels and little else. Their
names are printed as they run. `planted` reads behind the end of a weight, which memcheck must report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import attention_cases
import attention_write_cases
import line_tables
import oracles
import prefill_cases
import sanitized_cases
import test_grouped_gpu as grouped_cases
import torch
import w4a8_fp8_oracles
import w4a8_oracles
import w4ax_cases
import w4ax_expert_cases
from terrazzo.lowering import is_ready
from terrazzo.ops import w4a8, w4a16
from terrazzo.schedules import records, small_batch, stream_k

W4A16, F16 = oracles.Spec, oracles.Case
W4A8, S8 = w4a8_oracles.Spec, w4a8_oracles.Case
E4M3, S4F8 = w4a8_fp8_oracles.Spec, w4a8_fp8_oracles.Case
W4AX, S4 = w4ax_cases.Spec, w4ax_cases.Case
Stack, Grouped, Experts, Coded = grouped_cases.Spec, grouped_cases.Case, sanitized_cases.Experts, sanitized_cases.Coded
DEVICE = "cuda"


@dataclass(frozen=True)
class Watched:
    """A case of one of the oracles. `target`: of the program, None for the GPU's own; `tile`: of W4A16's stream_k or
    small_batch, None for the usual one."""

    name: str
    case: Any
    target: str | None = None
    tile: stream_k.StreamK | small_batch.SmallBatch | None = None

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Inside, W4A16 takes the tile."""
        if self.tile is None:
            yield
            return
        program = "stream_k" if isinstance(self.tile, stream_k.StreamK) else "small_batch"
        with records.forced("w4a16", program, self.tile.params()):
            records.changed()
            yield
        records.changed()

    def weight(self) -> w4a16.PackedWeight | w4a8.PackedWeight:
        case = self.case
        module, integer = (oracles, (True,)) if isinstance(case, oracles.Case) else (w4a8_oracles, ())
        return module.canonical(case.spec, *integer, case.seed).to("cpu").pack(target=self.target).to(DEVICE)

    def requests(self) -> list:
        """The kernels that this case launches, with line tables."""
        with self.forced():
            return [line_tables.lined(request) for request in self._requests()]

    def _requests(self) -> list:
        case = self.case
        if isinstance(case, oracles.Case):
            return w4a16.weight_requests(self.weight(), case.m, getattr(torch, case.spec.dtype), case.numerics)
        if isinstance(case, w4a8_oracles.Case):
            dtype = getattr(torch, case.dtype) if case.kind == "random" else None
            return w4a8.weight_requests(self.weight(), case.m, dtype, **case.options)
        return case.requests()

    def run(self) -> None:
        """Launch and compare; AssertionError for a wrong output or a kernel that would be compiled here."""
        requests = self.requests()
        assert all(is_ready(request) for request in requests), f"{self.name}: compile its kernels first"
        run = {oracles.Case: run_w4a16, w4a8_oracles.Case: run_w4a8}.get(type(self.case))
        plain = {attention_cases.Case: attention_cases.run, attention_write_cases.Case: attention_write_cases.check}
        plain[prefill_cases.Case] = prefill_cases.check
        plain |= {w4ax_cases.Case: w4ax_cases.product, w4a8_fp8_oracles.Case: w4a8_fp8_oracles.check}
        plain |= {w4ax_expert_cases.Case: w4ax_expert_cases.check, sanitized_cases.Experts: sanitized_cases.run_experts}
        plain[sanitized_cases.Coded] = sanitized_cases.run_coded
        with self.forced():
            run(self.case, self.weight(), requests) if run else plain[type(self.case)](self.case)
        torch.cuda.synchronize()


def run_w4a16(case: oracles.Case, weight: w4a16.PackedWeight, requests: list) -> None:
    rng = torch.Generator().manual_seed(case.seed + 1)
    dtype = getattr(torch, case.spec.dtype)
    x = torch.randint(-3, 4, (case.m, case.spec.k), generator=rng).to(dtype)
    y = torch.full((case.m, case.spec.n), float("nan"), dtype=dtype).to(DEVICE)
    w4a16.gemm(x.to(DEVICE), weight, out=y, numerics=case.numerics)
    (numerics,) = {dict(request.params)["numerics"] for request in requests}
    right = w4a16.reference.gemm(x, oracles.canonical(case.spec, True, case.seed).to("cpu"), numerics).to(dtype)
    oracles.check_equal(case, "integer product", y.cpu(), right)


def run_w4a8(case: w4a8_oracles.Case, weight: w4a8.PackedWeight, requests: list) -> None:
    rng = torch.Generator().manual_seed(case.seed + 1)
    if case.kind == "random":
        x = torch.randn(case.m, case.spec.k, generator=rng).to(getattr(torch, case.dtype))
        q, scales, _ = w4a8.reference.quantize_activations(x, w4a8_oracles.canonical(case.spec, case.seed).smooth)
        given = x.to(DEVICE)
    else:
        q = torch.randint(-127, 128, (case.m, case.spec.k), generator=rng, dtype=torch.int8)
        scales = torch.exp(torch.randn(case.m, generator=rng) - 4)
        made = w4a8_oracles.activations(q, scales)
        parts = (part.to(DEVICE) for part in (made.q, made.scales, made.row_sums))
        given = w4a8.QuantizedActivations(*parts, made.shape)
    y = torch.full((case.m, case.spec.n), -77, dtype=getattr(torch, case.out)).to(DEVICE)
    w4a8.gemm(given, weight, out=y, **case.options)
    w4a8_oracles.compare(case, "product", y.cpu(), q, scales)


ROWS = attention_cases.Case(q_len=4, lengths=(150, 7), page=64, style="warpgroups")
PLANTED = Watched("planted", F16(W4A16(256, 512), 4))
# One case for each program and each of its forms: X alone or shared by a cluster, split along k, shared tiles.
FAMILIES: dict[str, tuple[Watched, ...]] = {
    "w4a16": (
        Watched("small_batch", F16(W4A16(256, 512), 4)),
        Watched("small_batch cluster", F16(W4A16(257, 512, 64), 16)),
        Watched("small_batch split", F16(W4A16(128, 10944), 8)),
        Watched("stream_k", F16(W4A16(257, 640, bias=True), 64)),
        Watched("stream_k parted", F16(W4A16(256, 4096), 100), tile=stream_k.StreamK(64, 2, 1, 4, 128)),
        Watched("stream_k pairs", F16(W4A16(256, 1024), 100), tile=stream_k.StreamK(128, 2, 1, 4, 128, cluster=2)),
        Watched(
            "small_batch joined", F16(W4A16(257, 1024), 8), tile=small_batch.SmallBatch(1, 2, 4, 4, 2, 2, joined=True)
        ),
        Watched(
            "small_batch with three of four rows",
            F16(W4A16(257, 1152, 64), 3),
            tile=small_batch.SmallBatch(1, 1, 8, 4, 1, 2, tokens=4),
        ),
        Watched("stream_k post", F16(W4A16(256, 512, 32, scale="float32"), 33)),
        Watched("multistage", F16(W4A16(256, 512), 64), "sm_80"),
    ),
    "w4a8": (
        Watched("small_batch", S8(W4A8(257, 512, 64), 7, "int32", kind="integer")),
        Watched("small_batch cluster split", S8(W4A8(128, 10944, 32), 16, "float16", "unsigned", kind="integer")),
        Watched("stream_k, quantizer with smooth", S8(W4A8(257, 640, bias=True, smooth=True), 64)),
        Watched("quantizer, many rows", S8(W4A8(64, 203), 300)),
        Watched("multistage split", S8(W4A8(257, 512, 64), 40, "int32", kind="integer"), "sm_80"),
        Watched("stream_k e4m3, quantizer", S4F8(E4M3(257, 640, 64, bias=True, smooth=True), 70)),
    ),
    # More units of k for a CTA than stages of its ring: the cases above refill none.
    "refills": (
        Watched("w4a16", F16(W4A16(256, 1536), 64), tile=stream_k.StreamK(64, 2, 1, 3, stage_k=64)),
        Watched("w4a8 int8", S8(W4A8(256, 2048, 64), 40, "int32", kind="integer")),
        Watched("w4a8 unsigned", S8(W4A8(256, 4096, 128), 100, "bfloat16", "unsigned", kind="integer")),
        Watched("w4a8 e4m3", S4F8(E4M3(256, 2048, 32), 20, "integer")),
        Watched("w4ax integer shared", S4(W4AX(256, 2048, 0.5, scales="two_level"), (100,))),
    ),
    "w4ax": (
        Watched("small_batch", S4(W4AX(130, 640, 0.25, bias=True), (5,))),
        Watched("small_batch cluster split", S4(W4AX(128, 10944, 0.25), (16,), "float16")),
        Watched("stream_k", S4(W4AX(130, 650, 0.25), (40,), "bfloat16")),
        Watched("stream_k, two halves of the tokens, shared", S4(W4AX(256, 2048, 0.5), (100,))),
        Watched("persistent", S4(W4AX(130, 650, 0.4), (20,), "float16", "sm_80")),
        Watched("integer", S4(W4AX(130, 650, 0.25, True, "two_level"), (5, 40), "bfloat16")),
        Watched("experts", w4ax_expert_cases.Case(W4AX(130, 650, 0.25, True, "two_level"), (20, 0, 3, 40), "bfloat16")),
    ),
    "experts": (
        Watched("w4a16 on mma.sync", Experts(Grouped(Stack("w4a16", 4, 130, 328, 32, bias=True), 16), (20, 0, 3, 70))),
        Watched("w4a8 on mma.sync", Experts(Grouped(Stack("w4a8", 3, 130, 272, 64), 16, out="int32"), (5, 0, 40))),
        Watched("w4a8 with biases", Experts(Grouped(Stack("w4a8", 3, 130, 272, 64, bias=True), 16), (1, 33, 0))),
    ),
    "attention": (
        Watched("int4", attention_cases.Case(lengths=(100, 7), q_len=2)),
        Watched("int4 channels, paged, split", attention_cases.Case("int4_channel128", page=128, splits=2)),
        Watched("float16", attention_cases.Case("float16", "float16", lengths=(65, 0))),
        Watched("int8 paged", attention_cases.Case("int8", "int8", head_dim=64, page=64, lengths=(130, 3))),
        Watched("int4, 16 rows on wgmma", attention_cases.Case(q_len=4, lengths=(150, 7), page=64, style="warpgroups")),
        Watched(
            "int4 channels, 28 rows on wgmma, split",
            attention_cases.Case(
                "int4_channel64", "int2", group=7, q_len=4, lengths=(210, 3), splits=2, style="warpgroups"
            ),
        ),
        Watched("int4, balanced", attention_cases.Case(lengths=(700, 0, 30), balanced=True, style="chosen")),
        Watched(
            "float16, 16 rows, balanced",
            attention_cases.Case(
                "float16", "float16", q_len=4, lengths=(9, 400), page=64, balanced=True, style="chosen"
            ),
        ),
        Watched("int4 by cp.async", attention_cases.Case(lengths=(100, 7), target="sm_80")),
        Watched("store int4", attention_write_cases.Case(old=(0, 5), new=(40, 3))),
        Watched("append channels", attention_write_cases.Case("int4_channel64", old=(63, 60), new=(8, 8), page=64)),
        Watched("prefill int4", prefill_cases.Case(past=(100, 0), new=(40, 3))),
        Watched("prefill channels, new tokens", prefill_cases.Case("int4_channel64", fresh=True, page=64)),
        Watched("prefill int8 by mma.sync", prefill_cases.Case("int8", "int8", schedule=("mma", 2, 8, 3))),
        Watched("prefill through shared memory", prefill_cases.Case(past=(300,), schedule=("shared", 8, 8, 2))),
        Watched("codes of tokens", Coded(attention_cases.Case(lengths=(100, 7), q_len=2), "int8", False, True)),
        Watched("codes, split", Coded(attention_cases.Case(page=128, lengths=(900, 3), splits=3), "int8", False, True)),
        Watched("codes of blocks from rows on wgmma", Coded(ROWS, "e4m3_block128", True, False)),
        Watched("append residual", attention_write_cases.Case(residual=32, old=(3, 31), new=(2, 2), dtype="bfloat16")),
    ),
}


def planted() -> None:
    """The storage of the weight is cut off behind its tensor."""
    weight = PLANTED.weight()
    weight.words.untyped_storage().resize_(4096)
    w4a16.gemm(torch.ones(4, 512, dtype=torch.float16).to(DEVICE), weight)
    torch.cuda.synchronize()


def main(name: str, say: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
    line_tables.line_all()
    oracles.DEVICE = w4a8_oracles.DEVICE = w4ax_cases.HOME = w4a8_fp8_oracles.HOME = "cpu"
    if name == PLANTED.name:
        planted()
    for watched in FAMILIES.get(name, ()):
        say(f"{name} {watched.name}")
        watched.run()
    say("ok")


if __name__ == "__main__":
    main(sys.argv[1])
