"""Trial databases and tables from elsewhere: damaged bytes, odd rows and odd records are errors that name the file."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from random import Random

import mutation
import pytest
from terrazzo.autotune import database as store
from terrazzo.autotune import report
from terrazzo.autotune.benchmark_peers import is_result, peers_of
from terrazzo.autotune.database import Database, Machine, Problem, Trial
from terrazzo.autotune.operators import get_operator
from terrazzo.cli import main
from terrazzo.lowering.errors import ArgumentError, CacheError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import records

pytestmark = pytest.mark.usefixtures("without_records")
H200 = Target.parse("nvidia/nvidia-h200")
HERE = Machine("sm_90a", H200.name, 132, "1", "13.0", "2", "0.1.15", "0.1.0", "abc")
RESULT = {
    "gpu": "x", "rows": [
        {"n": 512, "k": 1024, "m": 8, "peers": {"cublas_f16": 4.0}},
        {"experts": 8, "n": 512, "k": 1024, "m": 8, "torch_bf16": 9.0},
        {"op": "attention_decode", "batch": 2, "kv_heads": 8, "q_len": 1, "q_heads": 32, "head_dim": 128,
         "kv_len": 4096, "peers": {"flash": 9.0}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def shipped() -> dict:
    """A table of one record of each operator that the shipped one has."""
    data = json.loads((records.FOLDER / "h200.json").read_text())
    return data | {"records": list({row["op"]: row for row in data["records"]}.values())}


@pytest.fixture(scope="module")
def kept(tmp_path_factory, shipped) -> bytes:
    """A database with imported records, failed trials and peers, closed and whole in one file."""
    path = tmp_path_factory.mktemp("kept") / "t.db"
    with Database(path) as trials:
        trials.add(store.from_table(shipped, "shipped"))
        problem = Problem.of("w4a16", {"n": 512, "k": 1024, "group": 0}, 8)
        for at in range(40):
            trials.add([Trial(problem, "small_batch", (("warps", at),), HERE, "crash", error="died", uid=str(at))])
        trials.add_peer(problem, H200.name, "cublas_f16", 4.0, "j", "p")
        trials.link.execute("PRAGMA journal_mode=DELETE")
    return path.read_bytes()


def use(path: Path) -> None:
    """Everything that is read of a database."""
    with Database(path, create=False) as trials:
        every = trials.trials()
        best = store.best(every)
        store.table(best, H200.name, 132)
        mutation.survives(lambda: store.spaces_of(every))
        trials.peers()
        trials.add([Trial(Problem.of("w4a16", {}, 1), "x", (), HERE, "ok", 1.0, uid="new")])
        trials.prune(failed=True)


def hold(kept: bytes, folder: Path, random: Random, cases: int) -> int:
    path, refused = folder / "damaged.db", 0
    for _ in range(cases):
        for name in folder.iterdir():
            name.unlink()
        path.write_bytes(mutation.data(kept, random))
        refused += not mutation.survives(lambda: use(path))
    return refused


@pytest.mark.random
def test_damaged_bytes_of_a_database_are_refused_or_read(kept, tmp_path, seed):
    assert hold(kept, tmp_path, Random(seed), 120) > 10


@pytest.mark.slow
@pytest.mark.random
def test_thousands_of_damaged_databases_are_refused_or_read(kept, tmp_path, seed):
    assert hold(kept, tmp_path, Random(seed + 1), 3000) > 100


CELLS = (b"\xff\xfe", "{", "[1]", "[" * 5000, '{"n": "x"}', '{"n": 0}', "null")


def is_storable(value) -> bool:
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def spoil(path: Path, random: Random) -> None:
    """Another value into some cells, whatever the schema says of them."""
    with sqlite3.connect(path) as link:
        link.execute("PRAGMA ignore_check_constraints=ON")
        for _ in range(random.choice((1, 1, 2))):
            table = random.choice(("trials", "trials", "peers"))
            columns = [(row[1], row[3]) for row in link.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
            name, required = random.choice(columns)
            value = random.choice((*mutation.ODD, *CELLS))
            if isinstance(value, (list, dict)):
                value = json.dumps(value)
            if isinstance(value, str):  # as text, also what is no UTF-8
                value = value.encode("utf-8", "surrogatepass")
            if not is_storable(value) or (value is None and required):
                continue
            cast = "CAST(? AS TEXT)" if isinstance(value, bytes) and value != b"\xff\xfe" else "?"
            row = link.execute(f"SELECT rowid FROM {table} ORDER BY random() LIMIT 1").fetchone()[0]
            link.execute(f"UPDATE OR IGNORE {table} SET {name} = {cast} WHERE rowid = ?", (value, row))
    link.close()


def hold_rows(kept: bytes, folder: Path, random: Random, cases: int) -> int:
    path, refused = folder / "odd.db", 0
    for at in range(cases):
        path.write_bytes(kept)
        spoil(path, random)
        refused += not mutation.survives(lambda: use(path))
        if at % 10 == 0:
            draw(path, folder)
    return refused


def draw(path: Path, folder: Path) -> None:
    with Database(path, create=False) as trials:
        mutation.survives(lambda: report.points_of(trials.trials(), trials.peers()))


@pytest.mark.random
def test_odd_rows_are_refused_or_read(kept, tmp_path, seed):
    assert hold_rows(kept, tmp_path, Random(seed), 100) > 30


@pytest.mark.slow
@pytest.mark.random
def test_thousands_of_odd_rows_are_refused_or_read(kept, tmp_path, seed):
    assert hold_rows(kept, tmp_path, Random(seed + 1), 2000) > 500


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("facts = '[1]'", r"trial database .*t\.db is damaged: in trials, rowid = 1 has facts, schedule = .*delete it"),
        ("us = 'soon'", r"us = 'soon', where there must be a time in microseconds"),
        ("us = -1.0", "us = -1.0"),
        ("created = 1e300", r"created = 1e\+300, where there must be a unix time"),
        ("gpu = x'1b5b316d'", "gpu = b'"),
        ("status = 'lost'", "status = 'lost', where there must be one of ok"),
        ("m = 4611686018427387904", "m = 4611686018427387904"),
        ("gpu = CAST(x'ff' AS TEXT)", "cannot be used: Could not decode to UTF-8"),
    ],
)
def test_a_damaged_row_is_named(kept, tmp_path, change, said, capsys):
    path = tmp_path / "t.db"
    path.write_bytes(kept)
    with sqlite3.connect(path) as link:
        link.execute(f"UPDATE trials SET {change} WHERE id = 1")
    link.close()
    with Database(path) as trials, pytest.raises(CacheError, match=said):
        trials.trials()
    with Database(tmp_path / "new.db") as other, pytest.raises(CacheError, match="damaged|cannot be used"):
        other.merge(path)
    assert main(["tune", "list", "--database", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_database_of_other_columns_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "t.db") as link:
        link.execute("CREATE TABLE trials (id INTEGER)")
        link.execute("CREATE TABLE peers (id INTEGER)")
    link.close()
    with pytest.raises(CacheError, match="is another kind of database: its trials have no arch, bound"):
        Database(tmp_path / "t.db")


def test_a_full_disk_is_an_error_and_keeps_what_was_there(tmp_path):
    problem = Problem.of("w4a16", {"n": 512}, 8)
    with Database(tmp_path / "t.db") as trials:
        trials.add([Trial(problem, "x", (), HERE, "ok", 1.0, uid="first")])
        pages = trials.link.execute("PRAGMA page_count").fetchone()[0]
        trials.link.execute(f"PRAGMA max_page_count={pages}")
        many = [Trial(problem, "x", (), HERE, "crash", error="e" * 9000, uid=str(at)) for at in range(20)]
        with pytest.raises(CacheError, match=r"t\.db cannot be used: database or disk is full"):
            trials.add(many)
        trials.link.execute("PRAGMA max_page_count=1000")
        assert [it.uid for it in trials.trials()] == ["first"]
        assert trials.add(many) == 20


def read_tables(shipped: dict, random: Random, cases: int, folder: Path) -> int:
    """Damaged tables: read, imported, asked for every problem that the whole one names, and drawn."""
    path, refused = folder / "table.json", 0
    asked = [(row["op"], row["facts"], row["m"]) for row in shipped["records"]]
    for _ in range(cases):
        path.write_bytes(mutation.text(mutation.value(shipped, random), random))

        def serve() -> None:
            table = records.Table.read(path)
            records.use(table)
            for op, facts, m in asked:
                for tokens in (m, m + 1):
                    problem, target = Problem.of(op, facts, tokens), H200
                    get_operator(op).plan(problem, target)
                    records.explain(op, facts, tokens, target)
                    records.tokens(op, facts, target)
            data = json.loads(path.read_bytes())
            with Database(folder / "t.db") as trials:
                trials.add(store.from_table(data, path.name))
                every = trials.trials()
                trials.prune(before=1e11)
            best = store.best(every)
            for it in best:
                records.Table(store.table([it], it.trial.machine.gpu, it.trial.machine.sms), "again")
            report.points_of(every, {})
            report.search_curves(every)

        try:
            refused += not mutation.survives(serve)
        finally:
            records.clear()
    return refused


@pytest.mark.random
def test_damaged_tables_are_refused_or_serve(shipped, tmp_path, seed):
    assert read_tables(shipped, Random(seed), 50, tmp_path) > 10


@pytest.mark.slow
@pytest.mark.random
def test_thousands_of_damaged_tables_are_refused_or_serve(shipped, tmp_path, seed):
    assert read_tables(shipped, Random(seed + 1), 1500, tmp_path) > 300


def read_results(random: Random, cases: int) -> None:
    problems = [
        Problem.of("w4a16", {"n": 512, "k": 1024}, 8),
        Problem.of("w4a16_grouped", {"n": 512, "k": 1024, "experts": 8}, 8),
        Problem.of("attention", {"head_dim": 128, "rows": 4, "tokens": 4096}, 16),
    ]
    assert len(list(peers_of(RESULT, problems, "r"))) == 3
    for _ in range(cases):
        data = mutation.value(RESULT, random)
        if is_result(data):
            mutation.survives(lambda data=data: list(peers_of(data, problems, "r")))


@pytest.mark.parametrize("value", ["8", [8], 8.0, True, None])
@pytest.mark.parametrize("name", ["q_len", "q_heads", "kv_heads", "batch", "head_dim", "kv_len", "n", "k", "m"])
def test_sizes_of_a_result_are_integers(name, value):
    rows = [row | {name: value} for row in RESULT["rows"] if name in row]
    assert rows
    for row in rows:
        with pytest.raises(ArgumentError, match=f"{name} = .* is no integer"):
            list(peers_of(RESULT | {"rows": [row]}, [], "r"))


@pytest.mark.random
def test_damaged_results_of_benchmarks_are_refused_or_read(seed):
    read_results(Random(seed), 400)


@pytest.mark.parametrize("name", ["deep", "digits", "bytes"])
def test_files_that_are_no_tables_are_refused_by_the_command(name, tmp_path, capsys):
    bad = {"deep": b"[" * 100_000, "digits": b'{"rows": ' + mutation.DIGITS.encode() + b"}", "bytes": b"\xff"}
    path = tmp_path / "x.json"
    path.write_bytes(bad[name])
    assert main(["tune", "import", str(path), "--database", str(tmp_path / "t.db")]) == 2
    assert f"{path}: cannot be read" in capsys.readouterr().err


def test_reports_draw_problems_of_this_version_only(shipped):
    for row in shipped["records"]:
        good = row["facts"]
        assert report.understands(Problem.of(row["op"], good, row["m"]))
        assert not report.understands(Problem.of("w3a7", good, row["m"]))
        assert not report.understands(Problem.of(row["op"], good | {"more": 1}, row["m"]))
        for name in set(good) - {"scales"}:
            gone = {key: value for key, value in good.items() if key != name}
            other = 5 if isinstance(good[name], str) else "x"
            for facts in (gone, *(good | {name: value} for value in (other, "x", -1, 1.0, None))):
                assert not report.understands(Problem.of(row["op"], facts, row["m"])), facts


def test_values_that_no_measurement_has_are_not_kept(tmp_path):
    good = Trial(Problem.of("w4a16", {"n": 512}, 8), "x", (("warps", 4),), HERE, "ok", 1.0, uid="1")
    from dataclasses import replace

    with Database(tmp_path / "t.db") as trials:
        for change in (
            {"us": float("nan")}, {"us": -1.0}, {"us": "1"}, {"program": "\x1b[2J"}, {"created": 1e30}, {"role": "x"},
            {"params": (("warps", "4"),)}, {"params": (("warps", 2**40),)}, {"machine": replace(HERE, gpu="\ud800")},
            {"problem": Problem.of("w4a16", {"n": 0}, 8)}, {"problem": Problem.of("w4a16", {"n": 512}, 2**31)},
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match=": must be "):
                trials.add([replace(good, **change)])
        assert trials.add([good]) == 1
        with pytest.raises(ArgumentError, match="us = inf: must be a time"):
            trials.add_peer(good.problem, "x", "cublas", float("inf"), "j", "u")
