"""`terrazzo tune`: every verb, bad input in one line, first use, the report."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import sqlite3
import sys

import pytest
import tuning
from terrazzo.autotune import enabled, first_use, isolation, report, runner
from terrazzo.autotune.database import Database, best, from_table, table
from terrazzo.autotune.jobs import Job, budget, job_of, override, read_job, read_shapes, seconds
from terrazzo.autotune.runner import Runner
from terrazzo.cli import main
from terrazzo.lowering.errors import ArgumentError, CaptureError, ToolchainError
from terrazzo.lowering.targets import Target
from terrazzo.ops.call import plans
from terrazzo.ops.weight_only import op as weight_only
from terrazzo.schedules import records

H200 = Target.parse("nvidia/nvidia-h200")
RUN = ("tune", "--shape", "512x1024", "--strategy", "top-k", "--trials", "5")


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv(records.VARIABLE, raising=False)
    records.clear()
    yield
    records.clear()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Jobs of the command measure and compile with the fake parts."""
    command = (sys.executable, str(tuning.HERE / "fake_measurer.py"), str(tmp_path / "log"), "0", "clean")
    monkeypatch.setattr(isolation.Measurer.__init__, "__defaults__", (None, command, 5.0))
    monkeypatch.setattr(runner, "CompilePool", lambda done, workers: tuning.InstantCompiler(done))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tune", "run"), "no weight is named"),
        (("tune", "--model", "llama-9"), "llama-9"),
        (("tune", "--op", "w4a99", "--model", "llama-3-8b"), "w4a99"),
        ((*RUN, "--strategy", "magic"), "--strategy magic: must be one of"),
        ((*RUN, "--budget", "soon"), "--budget soon: is no time"),
        ((*RUN, "--budget", "0m"), "is no time"),
        ((*RUN, "--trials", "-3"), "-3 is not in the range 0<=x"),
        ((*RUN, "--target", "sm_1", "--dry-run"), "sm_1"),
        ((*RUN, "--m", "0", "--dry-run"), "no list of positive numbers"),
        ((*RUN, "--group", "7", "--dry-run"), "--group 7: must be"),
        (("tune", "--op", "w4a8", "--shape", "64x64", "--symmetric", "--dry-run"), "always have offsets"),
        (("tune", "--shapes", "/nowhere/shapes.txt"), "cannot be read"),
        (("tune", "--job", "/nowhere/job.toml"), "cannot be read"),
        (("tune", "prune"), "name what to delete"),
        (("tune", "merge", "/nowhere/x.db"), "is no file"),
        (("tune", "import", "/nowhere/x.json"), "cannot be read"),
        (("tune", "frob"), "frob"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1 and not out


READING = {"list": (), "best": (), "export": (), "report": (), "space": ("-o", "s.json"), "prune": ("--failed",)}
"""Verbs that ask a database what it has, and what else they need."""


@pytest.mark.parametrize("verb", READING)
def test_a_verb_that_asks_makes_no_database(capsys, tmp_path, verb):
    link = sqlite3.connect(tmp_path / "notes.db")
    link.execute("CREATE TABLE notes (text TEXT)")
    link.close()
    (tmp_path / "empty").touch()
    before = {name: (tmp_path / name).read_bytes() for name in ("notes.db", "empty")}
    for name in ("new/t.db", *before):
        code, out, err = run(capsys, "tune", verb, *READING[verb], "--database", str(tmp_path / name))
        assert (code, out) == (2, "") and "no such trial database" in err and len(err.splitlines()) == 1
    code, _, err = run(capsys, "tune", verb, *READING[verb])
    assert code == 2 and str(tmp_path / "cache" / "tuning" / "trials.db") in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.db"]
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_database_without_trials_says_so(capsys, tmp_path):
    Database(tmp_path / "t.db").close()
    for verb, words in (("export", "one such GPU, it has: none"), ("report", "no times"), ("list", "")):
        code, _, err = run(capsys, "tune", verb, "--database", str(tmp_path / "t.db"))
        assert code == (2 if words else 0) and words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = [", "cannot be read: "),
        ("model = 'llama-3-8b'", "model llama-3-8b: is no field of a job; use one of budget"),
        ("m = ['a']", "must be a list of numbers"),
        ("m = [true]", "must be a list of numbers"),
        ("shapes = ['6144']", "is no shape"),
        ("trials = 'many'", "must be int"),
        ("symmetric = 1", "must be bool"),
        ("group = true", "must be int"),
        ("budget = 'soon'", "job.toml: budget soon: is no time"),
        ("shapes_file = 'none.txt'", "cannot be read"),
        ("op = 'w4a7'", "job.toml: op w4a7: must be one of"),
        ("patience = -1", "must not be negative"),
        *(
            (f"op = 'attention'\ncaches = ['{cache}']", "cache of positive numbers")
            for cache in ("8x32/0x4k", "0x8/8x4k")
        ),
        ("models = []", "must be a list of strings"),
    ],
)
def test_bad_job_files_are_one_line_and_exit_code_2(capsys, tmp_path, text, words):
    path = tmp_path / "job.toml"
    path.write_text(text)
    code, out, err = run(capsys, "tune", "--job", str(path), "--dry-run")
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1 and not out


def test_a_job_file_means_what_it_says(tmp_path):
    (tmp_path / "shapes.txt").write_text("# weights\n512x1024\n256 x 512\n".replace(" x ", "x") + "128x256 1 16, 64\n")
    path = tmp_path / "job.toml"
    path.write_text(
        "op = ['w4a16', 'w4a8']\nmodels = 'llama-3-8b'\nshapes = ['512x1024']\nm = [8, 64]\nbudget = '90s'\n"
        "strategy = 'top-k'\ndtype = 'bf16'\nshapes_file = 'shapes.txt'\n"
    )
    job = read_job(path)
    assert job.ops == ("w4a16", "w4a8") and job.budget_s == 90.0 and job.dtype == "bfloat16"
    assert job.extra == ((512, 1024, ()), (256, 512, ()), (128, 256, (1, 16, 64)))
    problems = job.problems()
    assert len(problems) == len(set(problems)) == 2 * (4 * 2 + 2 + 2 + 3)
    assert {it.m for it in problems if it.n == 128} == {1, 16, 64}
    for word in ("many", "²"):
        (tmp_path / "shapes.txt").write_text(f"512x1024\n512x1024 {word}\n")
        with pytest.raises(ArgumentError, match=r"shapes\.txt:2"):
            read_shapes(tmp_path / "shapes.txt")
    assert [seconds(text) for text in ("90s", "10m", "1.5h", 2)] == [90, 600, 5400, 120]
    assert budget("200 trials") == {"budget_trials": 200}
    assert job_of({"m": 8}, "x").m == (8,)


def test_an_operator_picks_its_problems_from_the_parts_of_a_job():
    parts = [{"op": ["w4a16", "w4a8"], "shapes": ["512x1024"]}, {"op": "w4ax", "shapes": ["256x512"]}]
    job = job_of({"m": [8], "part": parts}, "x")
    assert {it.op for it in job.problems()} == {"w4a16", "w4a8", "w4ax"}
    assert [(it.op, it.n) for it in override(job, ops=("w4a8",)).problems()] == [("w4a8", 512)]
    assert [it.op for it in override(job, ops=("w4ax", "w4a16")).problems()] == ["w4a16", "w4ax"]
    assert override(job, ops=(), m=(16,)).parts == job.parts
    with pytest.raises(ArgumentError, match="in no part of the job.*w4a16, w4a8, w4ax"):
        override(job, ops=("attention",))


def test_dry_run_needs_no_gpu_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(isolation.Measurer, "_send", lambda *_: pytest.fail("a process was started"))
    code, out, _ = run(capsys, "tune", "--model", "llama-3-8b", "--target", "auto", "--budget", "10m", "--dry-run")
    assert code == 0 and "nothing was measured" in out and "28672" in out and "40 problems" in out
    code, out, _ = run(capsys, "tune", "run", "--model", "llama-3-8b", "--target", "sm_80", "--dry-run", "--json")
    data = json.loads(out)
    assert data["gpu"].startswith("NVIDIA A100") and {"multistage"} <= set(data["problems"][-1]["programs"])


def test_a_job_and_what_becomes_of_its_trials(capsys, tmp_path, fake, monkeypatch):
    """run, list, best, export, explain, import, merge, prune and report on one database."""
    code, out, err = run(capsys, *RUN, "--m", "8,64")
    assert code == 0 and "(512, 1024)" in out and "done: " in err
    assert any("x the heuristic" in line for line in err.splitlines())
    code, out, err = run(capsys, *RUN, "--m", "8,64", "--resume", "--json")
    summary = json.loads(out)
    assert summary["trials"] == 0 and summary["reused"] == 10 and len(summary["best"]) == 2 and not err
    code, out, _ = run(capsys, "tune", "list", "--json")
    (job,) = json.loads(out)["jobs"]
    assert job["problems"] == 2 and job["ok"] == job["trials"] - sum(job["failed"].values())
    assert "w4a16" in run(capsys, "tune", "list")[1]
    code, out, _ = run(capsys, "tune", "best", "--json", "--shape", "512x1024")
    best = json.loads(out)
    assert [row["m"] for row in best] == [8, 64] and all(row["us"] <= row["heuristic_us"] for row in best)
    table, text = tmp_path / "t" / "h200.json", ("--shape", "512x1024", "--m", "8,9", "--target", "sm_90a")
    assert run(capsys, "tune", "export", "-o", str(table))[0] == 0
    assert json.loads(run(capsys, "tune", "export")[1]) == json.loads(table.read_text())
    again = tmp_path / "again.json"
    assert run(capsys, *RUN, "--m", "8,64", "--resume", "--export", str(again))[0] == 0
    assert again.read_text() == table.read_text()
    monkeypatch.setenv(records.VARIABLE, str(table))
    rows = json.loads(run(capsys, "tune", "explain", *text, "--json")[1])
    assert [row["how"] for row in rows] == ["exact", "heuristic"] and "has M = 8, 64" in rows[1]["reasons"][0]
    assert "exact" in run(capsys, "tune", "explain", *text)[1]
    second = ("--database", str(tmp_path / "second.db"))
    assert "4 new trials of 4" in run(capsys, "tune", "import", str(table), *second)[1]
    assert "new trials" in run(capsys, "tune", "merge", str(tmp_path / "cache" / "tuning" / "trials.db"), *second)[1]
    assert "0 trials deleted" in run(capsys, "tune", "prune", "--gpu", "another", *second)[1]
    assert run(capsys, "tune", "prune", "--older-than", "0", *second)[0] == 0
    assert json.loads(run(capsys, "tune", "best", "--json", *second)[1]) == []


class _Page(html.parser.HTMLParser):
    """What a page holds and loads."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.loads, self.text, self.metas, self.open = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.loads += [given[name] for name in ("src", "href") if given.get(name)] if tag in _LOADING else []
        self.metas += [given] if tag == "meta" else []
        self.open += [tag] if tag not in ("meta", "link", "br", "use", "path", "rect") else []

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            continue

    def handle_data(self, data):
        self.text.append(data)


_LOADING = ("script", "img", "link", "iframe", "a", "image")


def test_the_report_is_one_page_that_loads_nothing(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the tune extra is not installed")
    job = dataclasses.replace(tuning.SMALL, ops=("w4a16", "w4a8"), most=6)
    tuning.run(job, tmp_path / "t.db", tmp_path / "log", faults=True)
    out, png = tmp_path / "r.html", tmp_path / "r.png"
    code, said, _ = run(
        capsys, "tune", "report", "--database", str(tmp_path / "t.db"), "-o", str(out), "--png", str(png)
    )
    assert code == 0 and "4 problems" in said and png.read_bytes().startswith(b"\x89PNG")
    page = _Page()
    page.feed(out.read_text())
    assert (
        page.tags.count("svg") == 3 and page.tags.count("table") == 5 and not page.loads and "script" not in page.tags
    )
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.metas and not page.open
    words = " ".join(page.text)
    assert "NVIDIA H200" in words and "Slowest against their bound" in words and "url(http" not in out.read_text()
    with Database(tmp_path / "t.db") as database:
        trials = database.trials()
        points = report.points_of(trials, database.peers())
    assert page.tags.count("details") == 2 and "w4a16, 2 problems" in words
    assert all(point.peer_us == 30.0 and point.us > point.bound_us for point in points)
    for line in report.search_curves(trials).values():
        assert line[-1] == 1.0 and line == sorted(line, reverse=True)
    machine = trials[0].machine
    kept = from_table(table(best(trials), machine.gpu, machine.sms), "t.json")
    assert not report.search_curves(kept) and len(report.points_of(kept, {})) == 4  # imported records are no trials
    slow = max(points, key=lambda point: point.us / point.bound_us)
    assert f"{slow.us / slow.bound_us:.3f}" in words or f"{slow.us / slow.bound_us:.1f}" in words


def test_the_report_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ToolchainError, match=r"terrazzo\[tune\]"):
        report._pyplot()


def first_use_job(job, database, problem, target):
    fast = tuning.measurer(first_use_job.log)
    return Runner(job, database, [fast], tuning.InstantCompiler, resume=True, workers=2, problems=[problem])


def plan(m: int) -> dict:
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16", dtype="float16")
    return dict(plans.plan(m, weight_only.Facts(512, 2048, **facts), H200).request.params)


def test_first_use_tunes_each_bucket_once(tmp_path, monkeypatch):
    first_use_job.log = tmp_path / "log"
    monkeypatch.setattr(first_use, "_runner", first_use_job)
    heuristic = plan(5)
    with enabled(trials=8, database=tmp_path / "t.db"):
        tuned = plan(5)
        count = len(first_use_job.log.read_text().splitlines())
        assert count >= 8 and plan(8) == plan(1) == tuned and tuned != heuristic
        assert len(first_use_job.log.read_text().splitlines()) == count
        plan(64)
        assert len(first_use_job.log.read_text().splitlines()) > count
    assert plan(7) == tuned  # what was found stays in use
    with Database(tmp_path / "t.db") as database:
        assert {it.problem.m for it in database.trials()} == {8, 64}
    records.clear()
    assert plan(5) == heuristic
    count = len(first_use_job.log.read_text().splitlines())
    with enabled(trials=8, database=tmp_path / "t.db"):
        assert plan(5) == tuned  # from the database
    assert len(first_use_job.log.read_text().splitlines()) == count


def test_first_use_does_not_tune_while_a_graph_is_captured(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with enabled(database=tmp_path / "t.db"), pytest.raises(CaptureError, match="M 8 is not tuned yet"):
        plan(5)
    with pytest.raises(ArgumentError, match="budget"), enabled(budget="soon"):
        plan(5)


def test_ctrl_c_in_a_first_use_ends_the_program(tmp_path):
    class Stopped:
        def run(self):
            return runner.Summary("job", ended="interrupted")

    tuner = first_use.FirstUse(tmp_path / "t.db", 60.0, 4, "top-k", lambda *_: Stopped())
    with records.tuning(tuner), pytest.raises(KeyboardInterrupt):
        plan(5)


def test_a_job_of_no_tokens_has_one_of_each_bucket():
    tokens = [it.m for it in Job(shapes=((512, 1024),)).problems()]
    assert [records.bucket(m) for m in tokens] == tokens == [8 << at for at in range(10)]


def test_jobs_refuse_nonsense():
    with pytest.raises(ArgumentError, match="measure_ms"):
        Job(measure_ms=0.0)
    with pytest.raises(ArgumentError, match="at least 1"):
        Job(m=(0,))
    with pytest.raises(ArgumentError, match="must be one of .*w8a8_grouped, .*attention.*; use one of these"):
        Job(ops=("w4a17",))
    for name, bad in (
        ("within", float("nan")), ("most", 0), ("group", 0), ("group", 2.5), ("pages", (-1,)), ("q_len", (9,)),
        ("experts", (0,)), ("shapes", ((0, 64),)), ("shapes", ((64, 64.0),)), ("shapes", ("64x64",)), ("m", 4),
        ("models", "llama-3-8b"), ("caches", ("8x33/8x4k",)), ("trials", -1), ("budget_s", float("nan")),
        ("trials", "x"), ("trials", None), ("trials", 1.5), ("seed", [5]), ("measure_ms", "x"), ("within", True),
        ("symmetric", []), ("ops", [["w4a16"]]), ("models", (5,)), ("caches", (5,)), ("shapes", [5]),
        ("shapes", [[64, 64]]), ("extra", 5), ("extra", (5,)), ("extra", ((64, 64),)), ("extra", ((64, 64, 8),)),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"{name} = "):
            Job(**{name: bad})


def test_trials_are_asked_by_their_columns(tmp_path):
    with Database(tmp_path / "t.db") as trials, pytest.raises(ArgumentError, match="gpus = 'x': is no column"):
        trials.trials(gpus="x")
