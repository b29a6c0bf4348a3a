"""benchmarks.engine without an engine: rows are joined, layers are those that vLLM makes, weights are the same anew."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import engine, engine_model, tables
from tests.integrations import vllm_program


def row(**more) -> dict:
    facts = dict(
        shape="llama-3-8b", layers=32, weights="w4a16", group=128, dtype="float16", kv="auto", kernel="terrazzo",
        batch=1, prompt=1024, output=256, eager=False, step_ms=2.5, tokens_s=400.0,
    )  # fmt: skip
    return facts | more


def test_runs_of_one_configuration_are_joined(tmp_path, capsys):
    out = tmp_path / "engine.json"
    engine.write(out, dict(gpu="H100", rows=[row(), row(batch=16)]))
    engine.write(out, dict(gpu="H100", rows=[row(kernel="machete", step_ms=3.0)]))
    engine.write(out, dict(gpu="H100", rows=[row(step_ms=2.0)]))
    rows = json.loads(out.read_text())["rows"]
    assert sorted((r["kernel"], r["batch"], r["step_ms"]) for r in rows) == [
        ("machete", 1, 3.0), ("terrazzo", 1, 2.0), ("terrazzo", 16, 2.5),
    ]  # fmt: skip
    other = dict(gpu="H100", commit="b", rows=[row(kernel="marlin", step_ms=9.0)])
    (tmp_path / "other.json").write_text(json.dumps(other))
    joined = tmp_path / "joined.json"
    assert engine.main(["--join", str(out), str(tmp_path / "other.json"), "--out", str(joined)]) == 0
    commits = {(r["kernel"], r["commit"]) for r in json.loads(joined.read_text())["rows"]}
    assert commits == {("machete", None), ("marlin", "b"), ("terrazzo", None)}
    assert len(json.loads(joined.read_text())["rows"]) == 4
    assert engine.main(["--table", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[7] for line in lines] == ["terrazzo", "machete", "terrazzo"]


def test_what_caches_are_compared_with_stands_in_their_file(tmp_path, monkeypatch):
    """A run on vLLM's own cache is a row of weights by itself, and one of caches beside others."""
    monkeypatch.setattr(engine.report, "RESULTS", tmp_path)
    files = [tmp_path / "plain.json", tmp_path / "ours.json"]
    for file, kv in zip(files, ("auto", "int4_per_token_head")):
        file.write_text(json.dumps(dict(gpu="NVIDIA H100", rows=[row(kv=kv)])))
    assert engine.main(["--join", *map(str, files)]) == 0
    assert {path.name for path in tmp_path.glob("*engine_*")} == {"kv_engine_h100.json"}
    assert engine.main(["--join", str(files[0])]) == 0
    assert len(json.loads((tmp_path / "engine_h100.json").read_text())["rows"]) == 1


class Served:
    """Requests of an engine that prefills one of them in a step of 100 ms, while others get a token, of 10 ms alone."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.length, self.most = clock, {}, 0

    def add_request(self, name, prompt, how) -> None:
        self.length[name], self.most = 0, how.max_tokens

    def has_unfinished_requests(self) -> bool:
        return any(0 <= length < self.most for length in self.length.values())

    def step(self) -> list[SimpleNamespace]:
        running = [name for name, length in self.length.items() if 0 < length < self.most]
        new = [name for name, length in self.length.items() if not length][:1]
        self.clock[0] += 0.1 if new else 0.01
        for name in running + new:
            self.length[name] += 1
        made = lambda name: SimpleNamespace(
            request_id=name, outputs=[SimpleNamespace(token_ids=[0] * self.length[name])],
            finished=self.length[name] == self.most,
        )  # fmt: skip
        return [made(name) for name in running + new]


@pytest.mark.parametrize(("tokens", "steps"), [(20, 14), (7, 1), (6, 0), (4, 0)])
def test_a_step_is_timed_while_all_requests_are_decoded(monkeypatch, tokens, steps):
    """Neither prefills count, nor steps of those requests that are left when the first ones have all their tokens."""
    clock, seen = [0.0], []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(engine.time, "perf_counter", lambda: clock[0])
    profiler = SimpleNamespace(start=lambda: seen.append(clock[0]), stop=lambda: seen.append(clock[0]))
    o, llm = engine.arguments([]), SimpleNamespace(llm_engine=Served(clock))
    found = engine.generate(llm, o, 6, 16, tokens, "a", profiler if steps else None)
    assert found["steps"] == steps and found["first_s"] == pytest.approx(0.6)
    assert found["step_ms"] == (pytest.approx(10.0) if steps else None)
    assert seen == ([pytest.approx(0.6), pytest.approx(0.6 + 0.01 * steps)] if steps else [])


def test_a_model_has_positions_for_the_longest_sequence(tmp_path):
    """8192 tokens of a prompt and its answer are more than the table of Llama 3 has."""
    o = engine.arguments(["--cases", "1x1024", "64x8192", "--output", "160"])
    for positions, found in ((0, 8192), (engine.longest(o), 8192 + 160 + 16)):
        folder = engine_model.write_config(tmp_path, "llama-3-8b", "w4a16", 128, positions=positions)
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == found


def test_answers_are_found_among_what_an_engines_processes_say():
    said = vllm_program.ANSWER + '{"model": {"tokens": [[1]]}}'
    assert vllm_program.answers_in(f"loading\n{said}\n(Worker_TP1) INFO shutting down") == {"model": {"tokens": [[1]]}}
    assert vllm_program.answers_in("(Worker_TP1) ERROR") is None


def test_too_few_tokens_to_decode_all_requests_together_are_refused(capsys):
    assert engine.main(["--cases", "64x8192", "--output", "64"]) == 2
    assert "output = 64: must be at least 74 for 64 requests of 8192 tokens" in capsys.readouterr().err
    engine.check(engine.arguments(["--cases", "64x8192", "1x8192", "--output", "128"]))


def test_a_step_is_the_sum_of_its_kernels():
    events = [("gemm", 3000.0), ("gemm", 1000.0), ("norm", 500.0), *((f"small{i}", 100.0) for i in range(3))]
    found = engine.shares(events, 10, most=2)
    assert found == {"gemm": 0.4, "norm": 0.05, "others": 0.03}
    assert engine.shares(events[:3], 1) == {"gemm": 4.0, "norm": 0.5}


def test_launches_of_one_name_are_told_apart_by_their_sizes():
    event = lambda ts, dur, grid, name="main_kernel": {
        "name": name, "ts": ts, "dur": dur,
        "args": {"grid": [grid, 1, 1], "block": [128, 2, 1], "registers per thread": 96},
    }  # fmt: skip
    events = [event(3, 5.0, 132), event(1, 10.0, 132), event(2, 2.0, 28), event(4, 3.0, 7, "norm")]
    assert engine.launches(events, 2) == [
        ["main_kernel", "[132, 1, 1]", 256, 96, 1.0, 7.5], ["main_kernel", "[28, 1, 1]", 256, 96, 0.5, 2.0],
        ["norm", "[7, 1, 1]", 256, 96, 0.5, 3.0],
    ]  # fmt: skip


def test_a_row_is_the_median_of_its_runs_or_says_that_nothing_finds_room(monkeypatch):
    o, steps = engine.arguments(["--repeat", "3", "--output", "128"]), iter([9.0, 3.0, 2.0, 2.5])
    ran = lambda *args: dict(seconds=2.0, first_s=1.0, step_ms=next(steps))
    monkeypatch.setattr(engine, "generate", ran)
    cache = SimpleNamespace(num_gpu_blocks=100, block_size=64)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)))
    row = engine.measured(llm, o, 2, 3000)
    assert (row["step_ms"], row["steps_ms"], row["repeats"], row["tokens_s"]) == (2.5, [3.0, 2.0, 2.5], 3, 128.0)
    assert row["spread"] == 0.4 and row["kv_tokens"] == 6400
    row = engine.measured(llm, o, 3, 3000)
    assert row["failure"] == "6400 tokens find room, 9384 are needed" and "step_ms" not in row


def test_caches_are_rows_of_their_own_and_a_table():
    facts = dict(batch=64, prompt=8192, output=64, kv_tokens=1_000_000, page=64)
    rows = [
        row(kernel="auto", attention="vllm", step_ms=30.0, first_s=2.0, **facts),
        row(kernel="auto", attention="terrazzo", kv="int4_per_token_head", step_ms=10.0, first_s=1.9, **facts),
        row(kernel="auto", attention="terrazzo", step_ms=31.0, first_s=2.1, **facts),
    ]
    assert len({engine.key(each) for each in rows}) == 3
    header = dict(gpu="H100", torch="2", date="2026", commit="1", vllm="0.26.0", rows=rows)
    text = tables.kv_engine(header, "f.json")
    cells = [[cell.strip() for cell in line.split("|")[3:-1]] for line in text.splitlines() if line.startswith("| `")]
    assert cells[:3] == [
        ["auto, vLLM", "121", "30.00 (400)"], ["auto, ours", "121", "31.00, 0.97x (400)"],
        ["int4, ours", "121", "10.00, 3.00x (400)"],
    ]  # fmt: skip
    assert [each[-1] for each in cells[3:]] == ["2.000", "2.100, 0.95x", "1.900, 1.05x"]


def test_cases_name_requests_and_prompts():
    assert engine.cases(engine.arguments(["--batch", "1", "16", "--prompt", "512"])) == [(1, 512), (16, 512)]
    o = engine.arguments(["--cases", "64x8192", "1x1024", "--kv-cache-dtype", "int4_per_token_head"])
    assert engine.cases(o) == [(64, 8192), (1, 1024)]
    assert engine.attention_kind(o).layout.k_format == "int4_hadamard"


def test_layers_are_those_that_vllm_makes():
    wanted = engine.wanted(engine.arguments(["--shape", "llama-3-8b", "--weights", "w4a8"]))
    sizes = [(w.n, w.k, w.experts) for w in wanted]
    assert sizes == [(6144, 4096, 0), (4096, 4096, 0), (28672, 4096, 0), (4096, 14336, 0)]
    assert {w.operator for w in wanted} == {"w4a8"}
    moe = engine.wanted(engine.arguments(["--shape", "qwen3-30b-a3b"]))
    assert [(w.n, w.k, w.experts) for w in moe][2:] == [(1536, 2048, 128), (2048, 768, 128)]
    shards = engine.wanted(engine.arguments(["--shape", "qwen3-30b-a3b", "--ranks", "2"]))
    sizes = [(w.n, w.k, w.full_k, w.experts) for w in shards]
    assert sizes == [(2560, 2048, 2048, 0), (2048, 2048, 4096, 0), (768, 2048, 2048, 128), (2048, 384, 768, 128)]


def test_a_table_says_where_a_step_goes():
    kernels = {"main_kernel": 1.0, "void flash::FlashAttn": 0.5, "nvjet_hsh": 0.25, "triton_red": 0.125}
    result = dict(rows=[row(), row(step_ms=2.0, kernels_ms=kernels)])
    cells = [cell.strip() for cell in tables.step_parts(result).splitlines()[-1].split("|")[1:-1]]
    assert cells == [
        "`llama-3-8b`", "`w4a16`", "terrazzo", "auto, vLLM", "1 x 1024", "2.00", "0.50", "1.00", "0.25", "0.12", "0.12",
    ]  # fmt: skip
    ours = row(kernel="machete", attention="terrazzo")
    assert tables.part_of(ours, "main_kernel") == "attention"
    assert tables.part_of(ours, "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<") == "products"
    assert tables.part_of(ours, "triton_poi_fused_machete_mm_mul_silu_slice_1") == "others"
    assert tables.step_parts(dict(rows=[row()])) == ""


def test_a_table_sets_the_gain_of_kernels_beside_that_of_the_engine():
    """Ours beside other kernels of the same weights, and 8-bit activations beside 16-bit ones of ours."""
    result = dict(gpu="H100", torch="2", date="2026", commit="1", vllm="0.26.0")
    result["rows"] = [
        row(kernel="machete", step_ms=4.0, tokens_s=200.0, kernels_ms={"machete_mm": 3.0}),
        row(kernels_ms={"main_kernel": 1.5}),
        row(weights="w4a8", step_ms=2.0, tokens_s=500.0),
        row(kernel="marlin", batch=16),
    ]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in tables.gains(result).splitlines()[6:]]
    assert cells == [
        ["`w4a16`", "1", "machete", "1.50, 2.00x", "1.60x", "2.00x"],
        ["`w4a8`", "1", "ours, `w4a16`", "", "1.25x", "1.25x"],
    ]
    bare = dict(rows=[{name: value for name, value in one.items() if name != "kernels_ms"} for one in result["rows"]])
    without = [[cell.strip() for cell in line.split("|")[2:-1]] for line in tables.gains(bare).splitlines()[6:]]
    assert without == [[*line[:3], *line[4:]] for line in cells] and "products" not in tables.gains(bare)
    assert tables.gains(dict(rows=[row(kernel="marlin")])) == ""
    assert tables.gains(result) in tables.engine(result, "f.json")


@pytest.mark.parametrize(
    ("name", "dtype", "low", "high"),
    [
        ("layers.0.weight_packed", torch.int32, -(2**31), 2**31 - 1),
        ("layers.0.weight", torch.int8, -8, 7),
        ("layers.0.weight_scale", torch.bfloat16, 2.0**-10, 2.0**-9),
        ("layers.0.norm.weight", torch.float16, 1, 1),
        ("embed.weight", torch.float16, -8, 8),
    ],
)
def test_weights_depend_on_their_names_alone(name, dtype, low, high):
    made = [torch.zeros(64, 128, dtype=dtype) for _ in range(3)]
    engine_model.fill(name, made[0])
    engine_model.fill(name, made[1])
    engine_model.fill(name.replace("0", "1").replace("embed", "head"), made[2])
    assert torch.equal(made[0], made[1])
    assert low <= made[0].double().min() and made[0].double().max() <= high
    assert "norm" in name or not torch.equal(made[0], made[2])


def test_stored_zero_points_are_codes():
    words = torch.zeros(8, 16, dtype=torch.int32)
    engine_model.fill("layers.0.qzeros", words)
    nibbles = torch.stack([(words.long() >> (4 * i)) & 15 for i in range(8)])
    assert set(nibbles.flatten().tolist()) == {7, 8, 9}


def test_scales_fit_every_format():
    """Two levels of W4A8, float16 factors of e4m3, 16 bits: all of them mean the same weight."""
    from terrazzo.ops import w4a8, w4a16

    codes, scales = torch.zeros(64, 32, dtype=torch.int32), torch.zeros(64, 2, dtype=torch.bfloat16)
    engine_model.fill("a.weight_packed", codes)
    engine_model.fill("a.weight_scale", scales)
    read = (w4a16.read_compressed_tensors, w4a8.read_compressed_tensors, w4a8.fp8.read_compressed_tensors)
    first, *others = [one(codes, scales, group_size=128).dequantize().double() for one in read]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", engine_model.QUANTIZATION)
def test_configs_say_how_weights_are_stored(tmp_path, name):
    folder = engine_model.write_config(tmp_path / name, "tiny-llama", name, 64, layers=3)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3 and ("quantization_config" in config) == (name != "none")


def test_gptq_models_name_all_layers_but_the_router(tmp_path):
    """As vLLM asks: a part of the layer's name, of fused layers by the one or the other name."""
    folder = engine_model.write_config(tmp_path, "qwen3-30b-a3b", "gptq", 128)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]["modules_in_block_to_quantize"]
    taken = lambda name: any(part in f"model.layers.0.{name}" for part in stated)
    assert not taken("mlp.gate") and not taken("lm_head")
    assert all(map(taken, ("mlp.experts", "mlp.gate_up_proj", "self_attn.qkv_proj", "self_attn.q_proj")))
