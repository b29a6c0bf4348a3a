"""What result files become: means, goals, tables, plots, the generated parts of the documents."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import types

import pytest

from benchmarks import choice, linear, plot, readme, report, tables
from benchmarks.peers import attention as attention_peers
from benchmarks.peers import byte_inputs as byte_peers
from benchmarks.peers import weights as peers


def row(m, n, k, us, cublas, **more):
    return {
        "op": "w4a16", "format": "u4_zeros", "dtype": "float16", "group": 128, "m": m, "n": n, "k": k, "model": "a.b",
        "us": us, "spread": 0.01, "bytes": n * k // 2, "schedule": "s", "bound": "load", "predicted_us": 1.0,
        "peers": {"cublas_f16": cublas, **more},
    }  # fmt: skip


@pytest.fixture
def result():
    failed = row(16, 64, 64, None, 5.0) | {"failure": "3 elements of y are NaN"}
    return {
        "gpu": "NVIDIA H200", "sms": 132, "driver": "1", "cuda": "13", "torch": "2", "tilelang": "0", "terrazzo": "0",
        "commit": "c0ffee", "date": "2026-01-01", "copy_gb_s": 4000.0, "call_overhead_us": {"terrazzo": 9.0},
        "rows": [
            row(1, 57344, 8192, 70.0, 210.0, rival=105.0),
            row(1, 64, 64, 2.0, 8.0, rival=8.0),
            row(16, 57344, 8192, 100.0, 200.0),
            failed,
        ],
    }  # fmt: skip


def test_means_are_geometric_and_skip_failures(result):
    assert report.speedups(result) == {1: pytest.approx(math.sqrt(3 * 4)), 16: pytest.approx(2)}
    assert report.speedups(result, "rival") == {1: pytest.approx(math.sqrt(2))}
    assert report.peer_names(result) == ["rival"]
    assert report.geomean([]) is None
    assert report.failures(result) == ["(64, 64) M = 16: 3 elements of y are NaN"]


def test_a_file_with_a_missing_field_is_named(tmp_path, result):
    path = tmp_path / "w4a16_x.json"
    path.write_text(json.dumps(result))
    assert report.load(path) == result
    for broken, name in (({**result, "rows": [{"op": "w4a16"}]}, "format"), ({"gpu": "x"}, "sms")):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=f"'{name}'"):
            report.load(path)


def test_file_names():
    assert report.file_name("w4a16", "NVIDIA H200") == "w4a16_h200.json"
    assert report.file_name("w4a16", "NVIDIA A100-SXM4-80GB") == "w4a16_a100_sxm4.json"
    assert report.file_name("w4a16", "NVIDIA H100 80GB HBM3") == "w4a16_h100.json"
    assert report.file_name("w4a16", "NVIDIA GeForce RTX 4090") == "w4a16_4090.json"


@pytest.mark.parametrize("name", linear.FORMATS)
def test_every_published_result_is_complete(name):
    for path in report.files(name):
        result = report.load(path)
        assert report.timed(result) and {row["dtype"] for row in result["rows"]} <= {"float16", "bfloat16"}
        assert {report.baseline(row) for row in report.timed(result)} and None not in map(
            report.baseline, report.timed(result)
        )


def test_a_formats_files_are_its_own(monkeypatch, tmp_path, result):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name in ("mxfp4_h200", "mxfp4_held_out_h200", "mxfp4_fp8_h200", "mxfp4_fp8_held_out_h200", "mxfp4_h100"):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    named = lambda name: [path.stem for path in report.files(name)]
    assert named("mxfp4") == ["mxfp4_h200", "mxfp4_held_out_h200"]
    assert named("mxfp4_fp8") == ["mxfp4_fp8_h200", "mxfp4_fp8_held_out_h200"] and named("fp8") == []


def test_the_summary_names_its_source_its_shapes_and_its_repeats(result):
    for each in result["rows"]:
        each["repeats"] = 7
    text = report.summary_markdown(result, "benchmarks/results/w4a16_h200.json", "W4A16", "again")
    assert text.startswith("W4A16 on one NVIDIA H200, float16:") and "2 layers, 57344 x 8192, 64 x 64; 7 to 7" in text
    assert "[benchmarks/results/w4a16_h200.json]" in text and "Again: `again`." in text
    assert "| M | 1 | 16 |" in text and "| terrazzo | 3.46x | 2.00x |" in text and "| rival | 1.41x |  |" in text


def test_the_summary_has_what_was_timed_at_the_power_limit(result):
    timed = row(64, 64, 64, 10.0, 20.0) | {"sustained": {report.OURS: 10.0, "cublas_f16": 15.0}}
    found = result | {"rows": [row(1, 64, 64, 10.0, 20.0), timed]}
    text = report.summary_markdown(found, "f.json", "W4A16", "again")
    assert "| terrazzo | 2.00x | 2.00x |" in text and "| at the power limit |  | 1.50x |" in text


def test_a_commit_in_no_history_is_marked(result):
    marked = lambda **more: "c †." in report.summary_markdown(result | more, "f.json", "W4A16", "again")
    assert not marked() and marked(commit=report.LOST[0][:6] + report.LOST[0][6:] + "0") is False
    lost = result | {"commit": f"{report.LOST[0]}0000"}
    assert report.lost(lost) == " †" and report.lost(lost | {"commit_on_main": "abc"}) == ""


def test_what_a_product_with_its_quantizer_is_compared_with(result):
    found = row(1, 64, 64, 1.0, 4.0, vllm_marlin=3.0, torch_fp8=2.0) | {"peers_with_quantizer": {"torch_fp8": 2.5}}
    assert report.beside_quantizer(found) == {"cublas_f16": 4.0, "vllm_marlin": 3.0, "torch_fp8": 2.5}


def test_the_documents_are_current():
    assert readme.stale() == {}
    assert readme.main(["--check"]) == 0


def test_a_stale_document_is_found(monkeypatch, capsys):
    monkeypatch.setitem(readme.PARTS, "models", lambda: "something else")
    assert readme.main(["--check"]) == 1
    assert "docs/benchmarks.md is out of date" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown"):
        readme.fill("<!-- generated: unknown -->\n<!-- end: unknown -->")


def test_figures_come_from_the_files(monkeypatch, tmp_path, result):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "No result file" in readme.products() and "No result file" in readme.figures()
    (tmp_path / "w4a16_h200.json").write_text(json.dumps(result))
    (tmp_path / "w4a16_h200.svg").write_bytes(b"")
    assert readme.products().startswith("## W4A16\n\nW4A16 on one") and "## W4A8" not in readme.products()
    assert set(readme.LAYERS) == set(tables.LAYERS)
    assert "3.46x" in readme.products() and "![speed-up by M](w4a16_h200.svg)" in readme.products()


def test_plots(tmp_path, result):
    pytest.importorskip("matplotlib")
    path = tmp_path / "w4a16_h200.json"
    path.write_text(json.dumps(result))
    assert plot.main([str(path)]) == 0
    text = path.with_suffix(".svg").read_text()
    assert "<svg" in text and "<!-- rival -->" in text
    path.write_text(json.dumps({**result, "rows": []}))
    assert plot.main([str(path)]) == 2


def test_the_plot_of_decode_has_packages_beside_ours_and_the_faster_of_their_pages(tmp_path):
    pytest.importorskip("matplotlib")
    peers = {"sdpa_flash_f16": 40.0, "sdpa_cudnn_f16": 30.0, "flash_attn3_fp8": 15.0, "flash_attn3_fp8_page128": 12.0}
    at = {"batch": 8, "q_heads": 32, "kv_heads": 8, "kv_len": 4096, "page": 0, "q_len": 1, "peers": peers}
    rows = [
        {**at, "k_format": "int4", "v_format": "int4", "us": 8.0},
        {**at, "k_format": "int4", "v_format": "int4", "us": 6.0, "page": 128},
        {**at, "k_format": "int4", "v_format": "int4", "us": 5.0, "q_len": 4},
        {**at, "k_format": "int8", "v_format": "int4", "us": 9.0},
    ]
    path = tmp_path / "attention_h100.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H100", "date": "2026-11-26", "rows": rows}))
    assert plot.main([str(path)]) == 0
    text = path.with_suffix(".svg").read_text()
    assert {"2.50", "3.75"} == set(re.findall(r"<!-- (\d\.\d\d) -->", text))
    assert all(f"<!-- {word} -->" in text for word in ("FlashAttention-3 fp8", "terrazzo int4", "8 x 32/8"))
    assert "int8" not in text
    path.write_text(json.dumps({"gpu": "NVIDIA H100", "date": "2026-11-26", "rows": [{**rows[0], "us": None}]}))
    assert plot.main([str(path)]) == 2


def test_a_row_is_one_line(capsys, result):
    for one in result["rows"]:
        linear.show(one)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "rival 1.50x" in lines[0] and "FAILED" in lines[3]


def test_peers_that_are_absent_say_so():
    every = {peer.name: peer for form in linear.FORMATS.values() for peer in form.peers}
    assert all("_" in name for name in every) and len(every) > 15
    assert peers.missing_module("no_such_package.core") == "no_such_package is not installed"
    assert peers.missing_module("json") == ""
    for name, peer in every.items():
        package = name.split("_")[0]
        if package in ("vllm", "humming") and package not in sys.modules and peer.missing():
            assert package in peer.missing()
        if package == "qserve" and not byte_peers.QSERVE.with_suffix(".so.xz").is_file():
            assert "tools/pack_qserve.py" in peer.missing()


def test_gptq_words_of_the_peers():
    import torch

    codes = torch.randint(0, 16, (5, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = peers.pack_rows(codes)
    assert words.dtype == torch.int32 and words.shape == (3, 5)
    for row_, n, j in ((0, 0, 0), (1, 4, 7), (2, 3, 5)):
        assert (int(words[row_, n]) >> (4 * j)) & 15 == int(codes[n, 8 * row_ + j])
    assert peers.accepted(lambda a, b: None, {"a": 1, "c": 2}) == {"a": 1}


def test_outputs_of_byte_peers_are_held_against_their_own_operands():
    import torch

    rng = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 512, generator=rng) * torch.randn(64, 4, generator=rng).exp().repeat_interleave(128, 1)
    held = byte_peers.Int4.of(dense)
    assert (held.codes >= -8).all() and (held.codes.abs().amax(1) >= 7).all()
    every = torch.arange(64)
    assert float((held.rows(held.scales, every) - dense).abs().max()) <= 0.5001 * float(held.scales.max())
    peer = byte_peers.CutlassW4A8()
    exact = lambda picked: held.rows(held.scales, picked)
    rounded = lambda picked: exact(picked).to(torch.float8_e4m3fn).double()
    for rows in (exact, rounded):
        loaded = byte_peers.Loaded(lambda x, s, own=rows: (x.double() @ own(every).T * s).bfloat16(), rows)
        x = peer.prepare(torch.randn(24, 512, generator=rng), loaded)
        y = peer.call(x, loaded)
        assert byte_peers.error(y, x, rows) < 2**-8 < byte_peers.MOST_ERROR
        assert byte_peers.error(y, x, rounded if rows is exact else exact) > 2 * byte_peers.MOST_ERROR
        assert byte_peers.error(y * float("nan"), x, rows) == float("inf")
    normal = torch.randn(256, 2048, generator=rng)
    held, every = byte_peers.Int4.of(normal), torch.arange(256)
    factors = held.scales.amax(1, keepdim=True) / 56
    once = held.rows((held.scales / factors).to(torch.float8_e4m3fn).float(), every)
    seen = [held.rows(held.scales, every), once * factors, once.to(torch.float8_e4m3fn).double() * factors]
    errors = [float((weight - normal).norm() / normal.norm()) for weight in seen]  # as docs/benchmarks.md has them
    assert errors == pytest.approx([0.117, 0.120, 0.122], abs=1e-3)
    integers = byte_peers.HummingBytes("int8").prepare(torch.randn(3, 8, generator=rng), loaded)
    assert integers[0].dtype == torch.int8 and int(integers[0].abs().max()) == 127


def test_a_layer_of_humming_is_asked_with_the_tile_that_it_chooses_for_the_tokens(monkeypatch):
    import torch

    asked, called = [], []
    choose = lambda config, shape_m: asked.append((config, shape_m)) or {"block_shape": (shape_m, 128, 64)}
    monkeypatch.setitem(sys.modules, "humming", types.ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.tune", types.SimpleNamespace(get_heuristics_config=choose))

    class Layer:
        humming_config = "6144 x 4096"

        def __call__(self, **given):
            called.append(given)

    peers.Humming.tile.cache_clear()
    for m in (8, 8, 9):
        peers.Humming.run(Layer(), torch.empty(m, 1), input_scale=m)
    tiles = [json.loads(given["tuning_config"]) for given in called]
    assert tiles == [[[0, 1 << 30, {"block_shape": [m, 128, 64]}]] for m in (8, 8, 9)]
    assert asked == [("6144 x 4096", 8), ("6144 x 4096", 9)] and [given["input_scale"] for given in called] == [8, 8, 9]
    peers.Humming.tile.cache_clear()

    @dataclasses.dataclass(frozen=True)
    class Config:
        shape_n: int
        shape_k: int

        def to_str(self):
            return f"{self.shape_n} x {self.shape_k}"

    small = types.SimpleNamespace(humming_config=Config(512, 512))
    wanted = peers.Humming.ahead(small, [(64, 32), (32, 64)], (1, 4))
    assert [words for words, _ in wanted] == ["64 x 32"] * 2 + ["32 x 64"] * 2
    assert json.loads(wanted[1][1])[0][2]["block_shape"][0] == 4
    peers.Humming.tile.cache_clear()


def test_experts_of_a_peer_are_held_against_their_own_operands():
    import torch

    from benchmarks.peers.experts import Stack, TritonExperts

    random = torch.Generator().manual_seed(0)
    words = torch.randint(0, 256, (3, 8, 16), generator=random, dtype=torch.uint8)
    stack = Stack(words, torch.rand(3, 8, 2, generator=random).bfloat16())
    first = (float(words[1, 2, 8] & 15) - 8, float(words[1, 2, 8] >> 4) - 8)  # channels 16 and 17: the second group
    assert stack.rows(1)[2, 16:18].tolist() == [float(stack.scales[1, 2, 1]) * code for code in first]
    x, starts = torch.randn(5, 32, generator=random).bfloat16(), [0, 2, 2, 5]
    y = torch.cat([x[:2].double() @ stack.rows(0).T, x[2:].double() @ stack.rows(2).T]).bfloat16()
    peer = TritonExperts()
    assert peer.wrong(y, x, starts, stack) == ""
    assert peer.wrong(y, x, [0, 0, 2, 5], stack).startswith("expert 1: off by")
    y[4, 3] = float("nan")
    assert peer.wrong(y, x, starts, stack) == "1 elements of y are NaN"


def test_mxfp4_experts_of_a_peer_mean_what_ours_do():
    import torch
    from terrazzo.ops import mxfp4

    from benchmarks.peers.experts import Stack, wrong

    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 64, 32), generator=random, dtype=torch.uint8)
    stack = Stack(codes, torch.randint(116, 122, (2, 64, 2), generator=random, dtype=torch.uint8))
    ours = mxfp4.from_gpt_oss(codes.view(2, 64, 2, 16), stack.scales)
    assert all(torch.equal(stack.rows(e), ours[e].dequantize()) for e in range(2))
    x = torch.randn(5, 64, generator=random).bfloat16()
    y = torch.cat([x[:2].double() @ stack.rows(0).T, x[2:].double() @ stack.rows(1).T]).bfloat16()
    assert wrong(y, x, [0, 2, 5], stack) == "" and wrong(y, x, [0, 1, 5], stack).startswith("expert ")


def test_benchmarks_of_experts_name_the_kernels_of_each_operator():
    from benchmarks import grouped

    for op in grouped.GROUP:
        layer = grouped.LAYERS_OF.get(op, grouped.LAYERS)[0]
        assert grouped.requests_of(op, layer) and hasattr(grouped.operator_of(op), "grouped_gemm")
        if op not in grouped.WEIGHT_ONLY:
            assert len(grouped.requests_of(op, layer, dense=True)) > len(grouped.requests_of(op, layer))


def test_outputs_of_products_with_blocks_are_held_against_the_scales_that_they_read():
    import torch
    from terrazzo.ops import w8a8

    from benchmarks.peers import bytes as block_peers

    random = torch.Generator().manual_seed(0)
    dense = (
        torch.randn(200, 384, generator=random)
        * torch.randn(2, 3, generator=random).exp().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200]
    )
    weight = w8a8.quantize_weight(dense, codes="e4m3", granularity="block")
    blocks = block_peers.Blocks.of(weight)
    assert blocks.scales.shape == (2, 3)
    assert torch.equal(blocks.rows(torch.arange(200)), weight.dequantize())
    peer, x = block_peers.TorchBlocks(), torch.randn(21, 384, generator=random)
    codes, scales = peer.prepare(x, None)
    assert scales.shape == (21, 3) and scales.stride() == (1, 21)
    seen = codes.double() * scales.double().repeat_interleave(128, 1)
    assert float((seen - x).norm() / x.norm()) < 0.04
    y = (seen @ blocks.rows(torch.arange(200)).T).bfloat16()
    assert peer.wrong(y, x, (None, blocks)) == ""
    turned = dataclasses.replace(blocks, scales=blocks.scales.roll(1, 1))
    for off in (seen @ turned.rows(torch.arange(200)).T, y * float("nan")):
        assert peer.wrong(off.bfloat16(), x, (None, blocks)).startswith("off by")


def test_attention_that_is_off_is_refused():
    import torch

    exact = torch.ones(2, 4, dtype=torch.float64)
    for peer in attention_peers.PEERS:
        attention_peers.check(peer, exact * 1.005, exact)
        with pytest.raises(ValueError, match="off by"):
            attention_peers.check(peer, exact * 1.2, exact)
        with pytest.raises(ValueError, match="off by nan"):
            attention_peers.check(peer, exact * float("nan"), exact)


def test_tables_of_other_results(monkeypatch, tmp_path, result):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    cache = {"k_format": "int4", "v_format": "int4", "batch": 8, "q_heads": 32, "kv_heads": 8}
    decode = cache | {"kv_len": 32768, "q_len": 4, "page": 0, "us": 80.0, "peers": {"a": 400.0, "b": 240.0}}
    paged = decode | {"page": 128, "us": 90.0}
    prefill = cache | {
        "kv_len": 4096,
        "new": 512,
        "mode": "fresh",
        "us": 100.0,
        "tflops": 321.0,
        "peers": {"sdpa_a": 90.0},
    }
    grouped = {"op": "w4a8", "layer": "8 experts", "m": 128, "us": 35.0, "copy_share": 0.85, "torch_bf16": 70.0}
    other = grouped | {"op": "w4a16", "vllm_triton": 52.5}
    rows = {"attention_h200": [decode, paged], "attention_prefill_h200": [prefill], "grouped_h200": [grouped, other]}
    step = cache | {"kv_len": 4096, "kind": "mean", "us": 88.0, "decode_us": 80.0, "added": 0.1}
    rows["attention_write_h200"] = [cache | {"kv_len": 131072, "us": 200.0, "of_copy_time": 1.3}, step]
    ragged = cache | {"batch": "8:1-9", "mean": 5, "longest": 9, "q_len": 1, "page": 128, "us": 40.0, "even": 60.0}
    rows["attention_ragged_h200"] = [ragged | {"peers": {"a": 100.0}}, ragged | {"q_len": 4, "peers": {}}]
    short = cache | {"batch": 1, "kv_len": 8208, "new": 16, "mode": "fresh"}
    rows["attention_prefill_parts_h200"] = [short | {"splits": n, "us": us} for n, us in ((1, 90.0), (None, 30.0))]
    coded = decode | {"q_len": 1, "plain": 80.0, "us": 81.0}
    rows["attention_codes_h200"] = [coded | {"quant": "int8", "behind": 83.0}]
    rows["attention_codes_h200"] += [coded | {"quant": "int8_block128", "behind": None}]
    for name, found in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**result, "rows": found}))
    attention = readme.PARTS["attention"]
    assert "| 2.00x | 1.50x |" in readme.figures() and "torch's grouped bf16 product" in readme.figures()
    assert "| 8 x 32/8 x 32K, q_len 4 | 80.0 (3.00x) |" in attention() and "90.0" not in attention()
    assert "8:1-9" not in readme.figures()
    assert "512 new after 3584 | `int4/int4` | fresh | 100 | 321 | 0.90x |" in attention()
    assert "| `int4/int4` | 8 x 32/8 x 4K | 80.0 + 10% |" in attention() and "`int4/int4` 1.30" in attention()
    assert "| 8:1-9 | 5 | 9 | 40.0, 60.0 (2.50x) |" in attention()
    assert "| 8:1-9, q_len 4 | 5 | 9 | 40.0, 60.0 |" in attention()
    assert "| 1 x 32/8 | 16 | 8192 | 90 | 30 | 3.00x |" in attention()
    assert "| 8 x 32/8 x 32K | 80.0, 81.0, 83.0 | 80.0, 81.0 |" in attention()
    assert "| 8 experts | 128 | `w4a8` | 35.0 | 85% | 2.00x |" in readme.figures()
    assert "torch's fastest f16 attention" in attention() and "| 100 | 321 | 0.90x |" in attention()
    both = prefill | {"peers": {"sdpa_a": 90.0, "flash_attn3_f16": 80.0, "flash_attn3_fp8": 50.0}}
    (tmp_path / "attention_prefill_h200.json").write_text(json.dumps({**result, "rows": [both]}))
    assert "| 100 | 321 | 0.80x | 0.50x |" in attention()


def test_the_table_of_formats_has_accuracy_beside_speed(monkeypatch, tmp_path, result):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    small, large = sorted(linear.TUNED, key=lambda shape: shape[0] * shape[1])[:: len(linear.TUNED) - 1]
    rows = [row(4, *small, 10.0, 20.0), row(4, *large, 10.0, 80.0), row(1024, *small, None, 5.0)]
    rows.append(row(4, 640, 64, 10.0, 999.0))  # a layer that other files lack
    (tmp_path / "w4a16_h200.json").write_text(json.dumps({**result, "rows": rows}))
    read = {"path": "kernels", "k_format": "float16", "error": 0.002}
    accuracy = [
        read | {"weights": "w4a16-g128", "ratio": 1.012},
        read | {"weights": "w4a16-g128", "ratio": 9.0, "path": "simulated"},
        read | {"weights": "w4a16-g128", "ratio": 9.0, "k_format": "int4"},
        read | {"weights": "w4a16-g128@f16", "ratio": 9.0},
        read | {"weights": "w4ax", "ratio": 1.1},
    ]
    (tmp_path / "accuracy_small_h100.json").write_text(json.dumps({"model": "small", "rows": accuracy}))
    bits = 8 * rows[1]["bytes"] / (large[0] * large[1])
    head, _, *lines = choice.table().splitlines()
    assert head.startswith("| weights | bits | small | 4 tokens |")
    assert lines[0] == f"| `w4a16-g128` | {bits:.2f} | 1.012 ± 0.002 | 4.00x |  |  |  |  | H200 |"
    assert lines[1].startswith("| `w4ax` |  | 1.100 ± 0.002 |  |") and len(lines) == 2


def test_the_picture_of_formats_is_that_of_the_files(tmp_path):
    """Its texts, figures among them; curves of another matplotlib may differ."""
    pytest.importorskip("matplotlib")
    said = lambda path: set(re.findall("<!-- (.*?) -->", path.read_text()))
    drawn = said(choice.draw(tmp_path / "choosing.svg"))
    assert drawn == said(choice.PICTURE), "draw it again: python -m benchmarks.choice"
    assert {"w4a16-g128", "4 tokens"} <= drawn and any(text.endswith(" %") for text in drawn)
