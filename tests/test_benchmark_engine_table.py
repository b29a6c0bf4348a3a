"""benchmarks.engine_table without an engine: processes that stand in say when they do what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import engine, engine_table, tables

STAND_IN = """
import json, os, subprocess, sys, time
from benchmarks import engine
o = engine.arguments(sys.argv[1:])
def said(what):
    with open(os.environ["SAID"], "a") as file:
        file.write(json.dumps([o.weights, o.kv_cache_dtype, what, time.monotonic()]) + chr(10))
said("import")
time.sleep(0.05)
engine.gate(o, "engine")
said("start")
if o.weights == "w4a8":  # what it starts may outlive it, and has its pipes
    subprocess.Popen(["sleep", "60"])
if o.weights == os.environ.get("BROKEN"):
    sys.exit(3)
time.sleep(0.3 if o.kernel == "auto" else 0.1)
said("ready")
if o.warm:
    sys.exit(0)
engine.gate(o, "timing")
said("timing")
time.sleep(0.2)
facts = engine.configured(o) | dict(step_ms=2.0, tokens_s=100.0, kv_tokens=1_500_000)
rows = [facts | dict(batch=batch, prompt=prompt) for batch, prompt in engine.cases(o)]
rows[-1] |= dict(failure="no room") if o.weights == "none" else {}
engine.write(o.out, dict(gpu="H100", commit=o.commit, rows=rows))
said("end")
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Runs it with stand-ins; (exit code, what they said, the file)."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("PYTHONPATH", str(Path(engine.__file__).parents[1]))
    monkeypatch.setattr(engine_table, "PROGRAM", (sys.executable, str(tmp_path / "stand_in.py")))

    def run(*more: str):
        (tmp_path / "said").write_text("")
        out = tmp_path / "engine.json"
        code = engine_table.main(["qwen2.5-7b", "--out", str(out), "--commit", "a", *more])
        said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
        return code, said, out

    return run


def test_nothing_runs_while_a_configuration_is_timed(table, capsys):
    code, said, _ = table("--only", "bf16", "awq", "w4a16-int4", "w4a8-int4")
    assert code == 0
    timed = [what[:2] for what in said if what[2] == "timing"]
    assert timed == [["none", "auto"], ["awq", "auto"], ["awq", "int4_per_token_head"], ["w4a8", "int4_per_token_head"]]
    for weights, cache, _, began in (what for what in said if what[2] == "timing"):
        (ended,) = (at for *own, what, at in said if own == [weights, cache] and what == "end")
        assert not [what for what in said if began < what[3] < ended], "something else was going on"
    starts = [what[:2] for what in said if what[2] == "start"]
    assert starts.count(["none", "auto"]) == 1 and starts.count(["awq", "auto"]) == 2, "caches of all but the first"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["bfloat16", "bfloat16", "vLLM's", "2.00 (100)", "no room", "1.50 million"] in lines
    assert ["W4A8 int8", "int4", "ours", "2.00 (100)", "2.00 (100)", "1.50 million"] in lines


def test_a_page_says_how_often_and_how_evenly_was_timed():
    facts = dict(shape="qwen2.5-7b", weights="none", kernel="auto", kv="auto", prompt=3000, output=128, kv_tokens=10**6)
    rows = [facts | dict(batch=24, step_ms=7.0, tokens_s=1e3, repeats=3, spread=0.0123)]
    rows += [facts | dict(batch=80, failure="no room")]
    header = dict(gpu="H100", torch="2", date="2026", commit="1", vllm="0.26.0", rows=rows)
    assert "medians of 3 runs, which differ by up to 1.2%" in tables.served(header, "f.json")
    assert tables.owner("served_qwen2.5-7b_h100.json") == "served_*.json"


def test_a_run_goes_on_where_it_stopped(table, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "awq")
    code, said, out = table("--only", "bf16", "awq", "w4a8-int4", "--cold")
    assert code == 1 and "awq: exit code 3" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["rows"]) == 4, "what comes after the broken one is timed"
    monkeypatch.delenv("BROKEN")
    code, said, _ = table("--only", "bf16", "awq", "w4a8-int4", "--cold")
    assert code == 0 and {what[0] for what in said} == {"awq"}
    assert table("--commit", "b")[0] == 2 and "has rows of commit a, this is b" in capsys.readouterr().err


def test_a_run_ends_in_time(table, capsys):
    code, said, _ = table("--only", "bf16", "--budget", "0.1")
    assert code == 1 and "bf16: no time left" in capsys.readouterr().out
    assert not [what for what in said if what[2] == "end"]


def test_engines_that_start_at_once_fit_the_gpu():
    every = {name: engine_table.gigabytes("qwen2.5-7b", name) for name in engine_table.CONFIGURATIONS}
    assert every["bf16"] == pytest.approx(15.2 + 4, rel=0.02) and every["awq"] == pytest.approx(5.6 + 4, rel=0.03)
    assert sum(every.values()) - every["bf16"] < engine_table.AT_ONCE_GB
    assert engine_table.gigabytes("qwen3-30b-a3b", "bf16") == pytest.approx(61 + 4, rel=0.02)


def test_all_configurations_are_started_alike():
    o = engine_table.arguments(["qwen2.5-7b", "--bundle", "b"])
    made = {name: engine.arguments(engine_table.words(o, name)) for name in engine_table.CONFIGURATIONS}
    differ = {"weights", "kernel", "kv_cache_dtype", "attention", "bundle", "profile"}
    alike = [{name: value for name, value in vars(each).items() if name not in differ} for each in made.values()]
    assert all(each == alike[0] for each in alike) and not alike[0]["eager"]
    assert {name for name, each in made.items() if each.bundle} == {n for n in made if n.startswith("w4")}
    assert made["w4a8-int4"].profile == ["80x2500"] and made["bf16"].profile is None


def test_biases_of_a_model_have_kernels():
    found = {}
    for model in ("qwen2.5-7b", "llama-3-8b"):
        o = engine.arguments(["--shape", model, "--weights", "awq", "--dtype", "bfloat16", "--step-tokens", "16"])
        requests = engine.requests(o, engine.compiled_for()[0])
        found[model] = {dict(request.params).get("bias") for request in requests}
    assert found == {"qwen2.5-7b": {False, True}, "llama-3-8b": {False}}


def test_a_bundle_has_the_kernels_of_both_cards():
    """An H200 was lent for an H100, and took another schedule for one of its layers: none of ours was timed."""
    targets = engine.compiled_for()
    assert ["H100" in targets[0].name, "H200" in targets[1].name] == [True, True]
    o = engine.arguments(["--shape", "qwen2.5-7b", "--weights", "awq", "--dtype", "bfloat16"])
    first, second = (set(engine.requests(o, target)) for target in targets)
    assert second - first and first - second
