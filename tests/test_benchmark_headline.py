"""README's table: the fastest peer of each shape, the worst shape, peers of the same run."""

import json

import pytest

from benchmarks import headline, papers, readme, report


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[4:-1]]


def shown(gpu: str = "") -> list[str]:
    return [line for line in headline.table(gpu).splitlines()[2:] if line.startswith("|")]


@pytest.fixture
def result():
    return {name: "0" for name in report.FIELDS} | {"commit": "c0ffee", "copy_gb_s": 4000.0, "rows": []}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    made = tmp_path / "benchmarks" / "results"
    made.mkdir(parents=True)
    monkeypatch.setattr(report, "RESULTS", made)
    return made


def test_each_shape_is_compared_with_its_own_fastest_peer(folder, result):
    """Peers that win in turn: 4 and 2 by the first, 2 and 4 by the second; the fastest of each shape gives 2 and 2."""
    assert "No result file" in headline.table()
    shared = {"op": "w4a16", "m": 16, "n": 64, "dtype": "float16", "format": "u4"}
    rows = [
        shared | {"k": 64, "us": 10.0, "peers": {"cublas_f16": 40.0, "vllm_marlin": 20.0, "generic": 1.0}},
        shared | {"k": 128, "us": 10.0, "peers": {"cublas_f16": 20.0, "vllm_marlin": 40.0}},
        shared | {"k": 192, "us": 10.0, "peers": {"cublas_f16": 4.0, "vllm_marlin": 90.0}},
        shared | {"k": 256, "us": None, "peers": {"vllm_marlin": 1.0}},
    ]
    (folder / "w4a16_h200.json").write_text(json.dumps({**result, "gpu": "NVIDIA H200", "rows": rows}))
    (line,) = shown()
    assert line.startswith("| [W4A16](benchmarks/results/w4a16_h200.json) | H200 | cuBLAS f16, Marlin |")
    mean = (2 * 2 * 0.4) ** (1 / 3)
    assert cells(line) == ["", "", f"{mean:.2f} (0.40)", *[""] * 6]
    assert shown("H100") == [line]  # products of another card, where this one has no row of them
    on_this = {**result, "gpu": "NVIDIA H100 80GB HBM3", "rows": rows}
    (folder / "w4a16_h100.json").write_text(json.dumps(on_this))
    (only,) = shown("H100")
    assert "| H100 |" in only and len(shown()) == 2
    fewer = [row | {"peers": {"cublas_f16": row["peers"].get("cublas_f16", 9.0)}} for row in rows]
    (folder / "w4a16_h100.json").write_text(json.dumps(on_this | {"rows": fewer}))
    assert shown("H100") == [line]  # it ran beside fewer peers here
    (folder / "w4a16_h100.json").unlink()
    (folder / "w4a16_held_out_h200.json").write_text(json.dumps({**result, "gpu": "NVIDIA H200", "rows": rows[:2]}))
    tuned, held = shown()
    assert held.startswith("| [W4A16, two shapes, layers outside the tuned list](") and cells(tuned) == cells(line)
    assert "Again: `python -m benchmarks.linear --formats FILE --shapes tuned` or `held-out`" in headline.table()
    (folder / "fp8_h200.json").write_text(json.dumps({**result, "gpu": "NVIDIA H200", "rows": rows[:2]}))
    assert len(shown("H200")) == 2 and len(shown()) == 3  # README leaves other forms of a row to the page of results


def test_a_quantizer_inside_of_the_clock_has_a_row_beside_peers_that_need_none(folder, result):
    row = {"op": "w4a8", "m": 1, "n": 64, "k": 64, "dtype": "float16", "format": "u4_lqq", "us": 10.0,
           "variants": {"with_quantizer": 20.0}, "peers": {"cublas_f16": 60.0, "torch_fp8": 15.0}}  # fmt: skip
    (folder / "w4a8_h100.json").write_text(json.dumps({**result, "gpu": "NVIDIA H100 80GB HBM3", "rows": [row]}))
    alone, whole = shown("H100")
    assert "[W4A8, one shape]" in alone and "| cuBLAS f16, torch fp8 |" in alone and cells(alone)[0] == "1.50 (1.50)"
    assert "[W4A8, with its quantizer, one shape]" in whole and "| cuBLAS f16 |" in whole
    assert cells(whole)[0] == "3.00 (3.00)"
    paid = row | {"peers_with_quantizer": {"torch_fp8": 18.0}}
    (folder / "w4a8_h100.json").write_text(json.dumps({**result, "gpu": "NVIDIA H100 80GB HBM3", "rows": [paid]}))
    assert cells(shown("H100")[1])[0] == "0.90 (0.90)"


def test_a_format_beside_our_own_w4a8_has_rows_of_that(folder, result):
    row = {"op": "w4ax", "m": 4, "n": 64, "k": 64, "dtype": "float16", "format": "s4", "us": 10.0,
           "variants": {"with_quantizer": 20.0}, "peers": {"cublas_f16": 30.0, "terrazzo_w4a8": 9.0},
           "peers_with_quantizer": {"terrazzo_w4a8": 15.0}}  # fmt: skip
    (folder / "w4ax_h100.json").write_text(json.dumps({**result, "gpu": "NVIDIA H100 80GB HBM3", "rows": [row]}))
    found = {line.split("]")[0].strip("| ["): cells(line)[1] for line in shown()}
    assert found == {
        "W4Ax, one shape": "3.00 (3.00)", "W4Ax, over our W4A8, one shape": "0.90 (0.90)",
        "W4Ax, with its quantizer, one shape": "1.50 (1.50)",
        "W4Ax, with its quantizer, over our W4A8, one shape": "0.75 (0.75)",
    }  # fmt: skip


def test_peers_of_another_run_are_left_out(folder, result):
    ours = {"shape": "llama", "weights": "w4a16", "kv": "auto", "batch": 1, "kernel": "terrazzo", "step_ms": 2.0}
    peer = ours | {"kernel": "machete", "step_ms": 5.0, "commit": "a"}
    rows = [ours | {"commit": "a"}, peer, peer | {"kernel": "marlin", "step_ms": 2.2, "commit": "b"}]
    card = {**result, "gpu": "NVIDIA H100 80GB HBM3", "vllm": "0.26.0"}
    (folder / "engine_h100.json").write_text(json.dumps({**card, "rows": [*rows, peer | {"batch": 4}]}))
    (line,) = shown()
    assert "| H100 | Machete |" in line and cells(line)[:2] == ["2.50 (2.50)", ""]
    (folder / "engine_h100.json").unlink()
    step = {"ms": 2.0, "new": 1, "k_format": "int4", "weights": "w", "batch": 1, "peers": {"transformers_f16": 6.0}}
    steps = [step | {"commit": "a", "peers_commit": "a"}, step | {"batch": 4, "commit": "b", "peers_commit": "a"}]
    (folder / "decode_step_h100.json").write_text(json.dumps({**card, "rows": steps}))
    (line,) = shown()
    assert cells(line)[:2] == ["3.00 (3.00)", ""]


def test_result_files_name_commits_of_the_history():
    """But those of LOST, which no file may join; `make docs` fails of the same."""
    if readme.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs git and the whole history")
    assert readme.unknown_commits() == [] and len(list(report.RESULTS.glob("*_h*00.json"))) > 50


def test_docs_fail_where_a_file_has_no_commit_or_a_table_no_file(folder, result, monkeypatch, capsys):
    if readme.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs git and the whole history")
    monkeypatch.setattr(readme, "filled", lambda name: "[claim](benchmarks/results/none_h100.json)")
    monkeypatch.setattr(readme, "drawn", dict)
    good = readme.git("rev-parse", "HEAD")
    for commit, said in ((good, ""), ("0" * 40, "0000000"), (f"{report.LOST[0]}0", "")):
        (folder / "w4a16_h100.json").write_text(json.dumps({**result, "gpu": "NVIDIA H100", "commit": commit}))
        assert len(readme.unknown_commits()) == bool(said)
    (folder / "w4a16_h100.json").write_text(json.dumps({**result, "gpu": "NVIDIA H100", "commit": "0" * 40}))
    written = []
    monkeypatch.setattr(readme.Path, "write_text", lambda path, text, **how: written.append(path))
    assert readme.main([]) == 1 and not written
    error = capsys.readouterr().err
    assert "w4a16_h100.json: its commit 000000000000 is in no history" in error
    assert "README.md: benchmarks/results/none_h100.json is no file" in error


def test_a_claim_stands_beside_a_file_or_says_that_nothing_was_measured():
    for paper, claim, ours, _ in papers.claims():
        assert paper and claim and (ours == papers.NOT or "](benchmarks/results/" in ours), paper
    rows = papers.rows_of("w4a16_h100", lambda row: row["m"] == 16)
    ratios = [row["peers"]["cublas_f16"] / row["us"] for row in rows]
    said = papers.over("w4a16_h100", "cublas_f16", (16,))
    assert len(ratios) == 4 and said.startswith(
        f"{report.geomean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def test_experts_and_attention_are_read_by_what_they_do(folder, result):
    layer = {"op": "w4a16", "m": 32, "tokens": 16, "experts": 8, "us": 10.0, "torch_bf16": 40.0}
    even = layer | {"m": 128, "vllm_triton": 1.0}
    stacks = [layer | {"vllm_triton": 30.0}, layer | {"vllm_triton": 120.0, "torch_bf16": 10.0}, layer, even]
    (folder / "grouped_h200.json").write_text(json.dumps({**result, "gpu": "NVIDIA H200", "rows": stacks}))
    (line,) = shown()
    assert "| [W4A16, experts](" in line and "| H200 | torch bf16, vLLM's Triton experts |" in line
    assert cells(line)[2] == f"{3**0.5:.2f} (1.00)"
    (folder / "grouped_h200.json").unlink()
    read = {"op": "attention_prefill", "k_format": "int4", "v_format": "int4", "batch": 1, "page": 16, "us": 10.0,
            "mode": "stored", "peers": {"flash_attn3_f16": 9.0}}  # fmt: skip
    rows = [read, read | {"mode": "fresh", "peers": {"flash_attn3_f16": 10.0}}]
    (folder / "attention_prefill_h100.json").write_text(json.dumps({**result, "gpu": "NVIDIA H100", "rows": rows}))
    stored, fresh = shown()
    assert "read from the cache" in stored and cells(stored)[0] == "0.90 (0.90)"
    assert "read as they are" in fresh and cells(fresh)[0] == "1.00 (1.00)"
