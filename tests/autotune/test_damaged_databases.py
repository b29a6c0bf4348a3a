"""Trial databases and tables from elsewhere: damaged bytes, odd rows and odd records are errors that name the file."""

from __future__ import annotations

import ctypes
import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
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


def test_damaged_bytes_of_a_database_are_refused_or_read(kept, tmp_path, tries):
    path, refused = tmp_path / "damaged.db", []
    for random in tries(120):
        for name in tmp_path.iterdir():
            name.unlink()
        path.write_bytes(mutation.data(kept, random))
        refused.append(not mutation.survives(lambda: use(path)))
    assert sum(refused) > len(refused) / 12


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> bytes:
    """A database of 200 trials, whose tables and indices have several pages."""
    path = tmp_path_factory.mktemp("many") / "t.db"
    with Database(path) as trials:
        made = [Trial(problem, "x", (("warps", at),), HERE, "ok", 1.0 + at) for problem in ASKED for at in range(20)]
        trials.add([replace(it, uid=f"trial {at}") for at, it in enumerate(made)])
        trials.link.execute("PRAGMA journal_mode=DELETE")
    return path.read_bytes()


ASKED = [Problem.of("w4a16", {"n": 512 * (at + 1), "k": 1024, "group": 128}, 8) for at in range(10)]


def rows(path: Path) -> list[list[Trial]]:
    """All trials, and those of each problem, which SQLite finds by an index."""
    with Database(path, create=False) as trials:
        found = [trials.trials(gpu=H200.name, op=it.op, facts=it.text, m=it.m) for it in ASKED]
        return [trials.trials(), *found]


def test_pages_in_each_others_place_lose_no_row_without_a_word(many, tmp_path, tries):
    path = tmp_path / "t.db"
    path.write_bytes(many)
    whole, size = rows(path), 4096
    assert len(whole[0]) == 200 and [len(it) for it in whole[1:]] == [20] * 10 and len(many) > 15 * size
    refused = []
    for random in tries(100):
        left, right = sorted(random.sample(range(1, len(many) // size), 2))
        pages = [many[at : at + size] for at in range(0, len(many), size)]
        pages[left], pages[right] = pages[right], pages[left]
        path.write_bytes(b"".join(pages))
        refused.append(not mutation.survives(lambda: check(rows(path) == whole)))
    assert sum(refused) > len(refused) / 2


def check(right: bool) -> None:
    assert right


def test_a_database_of_swapped_pages_is_named_with_the_remedy(many, tmp_path, capsys):
    path, size = tmp_path / "t.db", 4096
    pages = [many[at : at + size] for at in range(0, len(many), size)]
    leaves = [at for at, page in enumerate(pages) if page[:1] == b"\x0d"]  # of tables
    pages[leaves[0]], pages[leaves[1]] = pages[leaves[1]], pages[leaves[0]]
    path.write_bytes(b"".join(pages))
    assert main(["tune", "list", "--database", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"trial database {path} is damaged: " in said and "t.db .recover | sqlite3 new.db" in said


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that may write what modes let it, also where root runs the tests."""
    drop = ctypes.CDLL(None).prctl  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
    done = [sys.executable, "-m", "terrazzo", *words]
    return subprocess.run(done, capture_output=True, encoding="utf-8", check=False, preexec_fn=lambda: drop(24, 1))


@pytest.fixture
def shelf(tmp_path):
    """A folder that can be removed whatever its mode was."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "unread journal"])
def test_a_database_that_cannot_be_written_is_read(shelf, unread):
    path = shelf / "t.db"
    with Database(path) as trials:
        trials.add([Trial(ASKED[0], "x", (), HERE, "ok", 1.0, uid=uid) for uid in "ab"])
        kept = {name: (shelf / name).read_bytes() for name in ("t.db", "t.db-wal")}
    if unread:  # as a killed process leaves it
        for name, data in kept.items():
            (shelf / name).write_bytes(data)
    for file in shelf.iterdir():
        file.chmod(0o444)
    shelf.chmod(0o555)
    done = command("tune", "list", "--database", str(path))
    if unread:  # in which those two trials are: read, they would be none
        assert done.returncode == 2 and f"trial database {path} cannot be used: " in done.stderr
    else:
        assert done.returncode == 0 and "2" in done.stdout, done.stderr
        done = command("tune", "prune", "--failed", "--database", str(path))
        assert done.returncode == 2 and "attempt to write a readonly database" in done.stderr
    assert {file.name for file in shelf.iterdir()} == ({"t.db", "t.db-wal"} if unread else {"t.db"})


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
            row = random.choice(link.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall())[0]
            link.execute(f"UPDATE OR IGNORE {table} SET {name} = {cast} WHERE rowid = ?", (value, row))
    link.close()


def draw(path: Path, folder: Path) -> None:
    with Database(path, create=False) as trials:
        mutation.survives(lambda: report.points_of(trials.trials(), trials.peers()))


def test_odd_rows_are_refused_or_read(kept, tmp_path, tries):
    path, refused = tmp_path / "odd.db", []
    for random in tries(100):
        path.write_bytes(kept)
        spoil(path, random)
        refused.append(not mutation.survives(lambda: use(path)))
        if len(refused) % 10 == 1:
            mutation.survives(lambda: draw(path, tmp_path))
    assert sum(refused) > len(refused) / 4


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


def test_damaged_tables_are_refused_or_serve(shipped, tmp_path, tries):
    """They are read, imported, asked for every problem that the whole one names, and drawn."""
    path, refused = tmp_path / "table.json", []
    asked = [(row["op"], row["facts"], row["m"]) for row in shipped["records"]]
    for random in tries(50):
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
            with Database(tmp_path / "t.db") as trials:
                trials.add(store.from_table(data, path.name))
                every = trials.trials()
                trials.prune(before=1e11)
            best = store.best(every)
            for it in best:
                records.Table(store.table([it], it.trial.machine.gpu, it.trial.machine.sms), "again")
            report.points_of(every, {})
            report.search_curves(every)

        try:
            refused.append(not mutation.survives(serve))
        finally:
            records.clear()
    assert sum(refused) > len(refused) / 5


def test_damaged_results_of_benchmarks_are_refused_or_read(tries):
    problems = [
        Problem.of("w4a16", {"n": 512, "k": 1024}, 8),
        Problem.of("w4a16_grouped", {"n": 512, "k": 1024, "experts": 8}, 8),
        Problem.of("attention", {"head_dim": 128, "rows": 4, "tokens": 4096}, 16),
    ]
    assert len(list(peers_of(RESULT, problems, "r"))) == 3
    for random in tries(400):
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
