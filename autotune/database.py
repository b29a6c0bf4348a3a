"""Every measured trial, in one SQLite file (WAL): safe for several jobs at once, complete up to the last commit.

A trial is one schedule of one problem on one GPU, with its time or with the reason why it has none. Nothing is ever
overwritten; a time for a schedule that was measured more often is the median of its trials.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.lowering.cache import cache_root
from terrazzo.lowering.data_files import is_count, is_number, is_text, parse_json
from terrazzo.lowering.errors import ArgumentError, CacheError, shown
from terrazzo.lowering.folders import make_folders
from terrazzo.schedules import records

Row = TypeVar("Row")
Fault = tuple[str, object, str]
"""Field, value, what it must be."""
VERSION = 1
STATUSES = ("ok", "compile", "spills", "wrong", "crash", "hang", "error")
"""ok: timed and correct. compile: does not compile. spills: too many registers spill (runner.MOST_SPILLED), not run.
wrong: its output is. crash, hang: its process died or was stopped. error: the operator or CUDA refused it."""
ROLES = ("heuristic", "search", "confirm")
UNKNOWN = "unknown"
"""Program of an imported heuristic's time."""
TABLE = "table:"
"""How the uid of an imported record begins."""
BUSY_S = 60.0
_YEAR_9999 = 253402300799.0
_MOST_TEXT = 20_000  # characters of a uid, which holds a whole record, or of an error
_TABLES = """
CREATE TABLE IF NOT EXISTS trials (
  id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, job TEXT NOT NULL, op TEXT NOT NULL, facts TEXT NOT NULL,
  m INTEGER NOT NULL, program TEXT NOT NULL, schedule TEXT NOT NULL, role TEXT NOT NULL,
  arch TEXT NOT NULL, gpu TEXT NOT NULL, sms INTEGER NOT NULL, driver TEXT, cuda TEXT, torch TEXT, tilelang TEXT,
  terrazzo TEXT, sources TEXT, status TEXT NOT NULL, us REAL, spread REAL, predicted_us REAL, error TEXT NOT NULL,
  bound TEXT, bound_us REAL, created REAL NOT NULL);
CREATE INDEX IF NOT EXISTS by_problem ON trials (gpu, op, facts, m);
CREATE TABLE IF NOT EXISTS peers (
  uid TEXT NOT NULL UNIQUE, job TEXT NOT NULL, op TEXT NOT NULL, facts TEXT NOT NULL, m INTEGER NOT NULL,
  gpu TEXT NOT NULL, name TEXT NOT NULL, us REAL NOT NULL, created REAL NOT NULL);
"""
_NUMBERS = ("spread", "predicted_us", "bound_us")
MACHINE = ("arch", "gpu", "sms", "driver", "cuda", "torch", "tilelang", "terrazzo", "sources")
_COLUMNS = ("uid", "job", "op", "facts", "m", "program", "schedule", "role", *MACHINE)
_COLUMNS += ("status", "us", "spread", "predicted_us", "error", "bound", "bound_us", "created")
_PEER = ("uid", "job", "op", "facts", "m", "gpu", "name", "us", "created")


@dataclass(frozen=True)
class Machine:
    """Where and with what a trial was measured; `sources` is a digest of the library's text."""

    arch: str
    gpu: str
    sms: int
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    tilelang: str | None = None
    terrazzo: str | None = None
    sources: str | None = None


@dataclass(frozen=True)
class Problem:
    """What is tuned: an operator, the facts of its weight (N, K, format) or cache, and the number of tokens (of
    sequences times kv heads for attention)."""

    op: str
    facts: tuple[tuple[str, Any], ...]
    m: int

    @staticmethod
    def of(op: str, facts: Mapping[str, Any], m: int) -> Problem:
        return Problem(op, tuple(sorted(facts.items())), m)

    @property
    def n(self) -> int:
        return dict(self.facts)["n"]

    @property
    def k(self) -> int:
        return dict(self.facts)["k"]

    @property
    def text(self) -> str:
        """The facts as the database keeps them."""
        return json.dumps(dict(self.facts), sort_keys=True)

    @property
    def what(self) -> str:
        """The weight or cache in words."""
        facts = dict(self.facts)
        if "n" in facts:
            experts = f"{facts['experts']} x " if "experts" in facts else ""
            return f"{experts}({facts['n']}, {facts['k']})"
        page = f" page {facts['page']}" if facts.get("page") else ""
        size = f" {facts['tokens']} x {facts['rows']} rows" if "tokens" in facts else ""
        return f"{facts.get('k_format')}/{facts.get('v_format')}{size}{page}"

    def __str__(self) -> str:
        return f"{self.op} {self.what} M {self.m}"


@dataclass(frozen=True)
class Trial:
    """One schedule tried on one problem.

    Attributes:
        role: "heuristic" (what runs without a record), "search", or "confirm" (measured once more in the end).
        us, spread: median microseconds and (90th - 10th percentile) / median; None unless status is "ok".
        predicted_us: by the cost model. bound, bound_us: resource that bounds the problem and its time alone.
        error: the reason, "" if ok.
        created: unix time. uid: unique, made from the job and a number.
    """

    problem: Problem
    program: str
    params: tuple[tuple[str, int], ...]
    machine: Machine
    status: str
    us: float | None = None
    spread: float | None = None
    predicted_us: float | None = None
    error: str = ""
    role: str = "search"
    bound: str | None = None
    bound_us: float | None = None
    job: str = ""
    uid: str = ""
    created: float = field(default_factory=lambda: time.time())

    @property
    def schedule(self) -> str:
        """The schedule as the database keeps it."""
        return json.dumps(dict(self.params), sort_keys=True)

    @property
    def imported(self) -> bool:
        """Whether it is a record of a table, or the heuristic's time in one, and no trial of a job in this database."""
        return self.uid.startswith(TABLE)

    @property
    def identity(self) -> tuple[str, str, str, int, str, str]:
        """What a second trial of the same thing shares."""
        return self.machine.gpu, self.problem.op, self.problem.text, self.problem.m, self.program, self.schedule


def _fault(it: Trial) -> Fault | None:
    """(field, value, what it must be) of what no measurement can have put into a trial, or None."""
    time, number = records.is_time, lambda value: is_number(value, 0, 1e15)
    optional = lambda check, value: value is None or check(value)
    machine = {name: getattr(it.machine, name) for name in MACHINE}
    checks = (
        ("status", it.status, it.status in STATUSES, f"one of {', '.join(STATUSES)}"),
        ("role", it.role, it.role in ROLES, f"one of {', '.join(ROLES)}"),
        ("op", it.problem.op, is_text(it.problem.op), "the name of an operator"),
        ("facts", it.problem.facts, records.is_facts(dict(it.problem.facts)), "text, bools and sizes by name"),
        ("m", it.problem.m, is_count(it.problem.m, 1), "a positive integer of 31 bits"),
        ("program", it.program, is_text(it.program), "the name of a program"),
        ("schedule", it.params, records.is_schedule(dict(it.params)), "integers of 31 bits by name"),
        ("sms", it.machine.sms, is_count(it.machine.sms), "a number of SMs"),
        *((name, machine[name], is_text(machine[name]), "text") for name in ("arch", "gpu")),
        *((name, machine[name], optional(is_text, machine[name]), "text") for name in MACHINE[3:]),
        ("us", it.us, optional(time, it.us), "a time in microseconds"),
        *((name, getattr(it, name), optional(number, getattr(it, name)), "a number") for name in _NUMBERS),
        ("error", it.error, isinstance(it.error, str) and _stored(it.error), "text"),
        ("bound", it.bound, optional(is_text, it.bound), "the name of a resource"),
        ("job", it.job, is_text(it.job), "text"),
        ("uid", it.uid, is_text(it.uid, _MOST_TEXT), "text"),
        ("created", it.created, is_number(it.created, 0, _YEAR_9999), "a unix time"),
    )
    return next(((name, value, what) for name, value, right, what in checks if not right), None)


def _stored(text: str) -> bool:
    """Whether SQLite keeps a text: what is no UTF-8 it does not."""
    return len(text) <= _MOST_TEXT and not any("\ud800" <= letter <= "\udfff" for letter in text)


def default_path() -> Path:
    """tuning/trials.db beside the kernel cache."""
    return cache_root() / "tuning" / "trials.db"


class Database:
    """The trials in one file.

    Args:
        path: the file. create: make it if it is not there, with its folder. Without, a read-only file is read.

    Raises:
        CacheError: it is not there, cannot be opened, is damaged, or is another kind of file or of another version.
    """

    def __init__(self, path: Path | str | None = None, create: bool = True) -> None:
        self.path = Path(path) if path is not None else default_path()
        try:
            if create:
                make_folders(self.path.parent)
            elif not self.path.is_file():
                raise CacheError(f"no such trial database: {self.path}; name one with --database")
            where, write = self._where(create)
            self.link = sqlite3.connect(where, BUSY_S, isolation_level=None, check_same_thread=False, uri=not write)
            self.link.row_factory = sqlite3.Row
            self.link.execute("PRAGMA trusted_schema=OFF")  # of a file from elsewhere
            self.link.execute("PRAGMA cell_size_check=ON")
            self._recognize(create)
            self._require_whole()
            if not write:
                return
            self._write_ahead()
            self.link.execute("PRAGMA synchronous=NORMAL")
            with self.writing():
                for statement in filter(str.strip, _TABLES.split(";")):
                    self.link.execute(statement)
                self.link.execute(f"PRAGMA user_version={VERSION}")
        except (OSError, ValueError, sqlite3.Error) as error:  # ValueError: a path with a null byte
            self._close_quietly()
            raise self._refusal(error) from error
        except CacheError:
            self._close_quietly()
            raise

    def _where(self, create: bool) -> tuple[Path | str, bool]:
        """What SQLite opens, and whether for writing."""
        if create or (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)):
            return self.path, True
        wal = Path(f"{self.path}-wal")  # what a writer has not moved into the file yet
        unread = wal.is_file() and wal.stat().st_size
        return f"{self.path.absolute().as_uri()}?mode=ro{'' if unread else '&immutable=1'}", False

    def _require_whole(self) -> None:
        """Refuse a file whose pages do not belong together: rows would be missing from answers.

        A tenth of a second for 100,000 trials. SQLite's quick_check leaves indices out, by which rows are found.
        """
        said = self.link.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if said != "ok":
            raise CacheError(
                f"trial database {self.path} is damaged: {' '.join(said.split())}; put back a copy of it, save what "
                f"can be read (sqlite3 {self.path.name} .recover | sqlite3 new.db), or name another with --database"
            )

    def _refusal(self, error: Exception) -> CacheError:
        return CacheError(f"trial database {self.path} cannot be used: {error}; name another with --database")

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Inside, what SQLite says of a damaged, full or locked file is an error that names it."""
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise self._refusal(error) from error

    def _write_ahead(self) -> None:
        """Readers do not wait for a writer. SQLite does not wait, either, while another process makes this change."""
        end = time.monotonic() + BUSY_S
        while True:
            try:
                self.link.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _recognize(self, create: bool) -> None:
        """Refuse, before anything is written to it, a file that is no trial database, nor an empty one to make it."""
        version = self.link.execute("PRAGMA user_version").fetchone()[0]
        tables = {row["name"] for row in self.link.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version not in (0, VERSION):
            raise CacheError(f"{self.path} is a trial database of version {version}, this one writes {VERSION}")
        if not {"trials", "peers"} <= tables and (tables or version or not create):
            raise CacheError(f"no such trial database: {self.path} holds none; name another with --database")
        for name, columns in (("trials", _COLUMNS), ("peers", _PEER)) if tables else ():
            missing = set(columns) - {row["name"] for row in self.link.execute(f"PRAGMA table_info({name})")}
            if missing:
                seen = f"its {name} have no {', '.join(sorted(missing))}"
                raise CacheError(f"{self.path} is another kind of database: {seen}; name another with --database")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction; waits for other writers.

        Raises:
            CacheError: the file is damaged, the disk full, or another process has it for `BUSY_S`; nothing is kept.
        """
        with self._using():
            self.link.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.link.execute("COMMIT")
            except BaseException:
                if self.link.in_transaction:  # SQLite has ended it when the disk is full
                    self.link.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file; further calls raise sqlite3.ProgrammingError."""
        self.link.close()

    def _close_quietly(self) -> None:
        if getattr(self, "link", None) is not None:
            self.link.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, trials: Iterable[Trial]) -> int:
        """Keep trials, those whose uid is known already excepted; committed when this returns. How many were new.

        Raises:
            ArgumentError: a trial has a value that no measurement has, as a status that is none of `STATUSES`; nothing
                is kept.
        """
        columns, rows = _COLUMNS, []
        for it in trials:
            if fault := _fault(it):
                raise ArgumentError(fault[0], fault[1], f"must be {fault[2]}", f"correct it in {it.job or 'the trial'}")
            own = (it.uid, it.job, it.problem.op, it.problem.text, it.problem.m, it.program, it.schedule, it.role)
            made = tuple(asdict(it.machine)[name] for name in MACHINE)
            rows.append((*own, *made, *(getattr(it, name) for name in columns[len(own) + len(made) :])))
        marks = ", ".join("?" * len(columns))
        with self.writing():
            before = self.link.total_changes
            self.link.executemany(f"INSERT OR IGNORE INTO trials ({', '.join(columns)}) VALUES ({marks})", rows)
            return self.link.total_changes - before

    def add_peer(self, problem: Problem, gpu: str, name: str, us: float, job: str, uid: str) -> None:
        """Keep the time of another implementation of a problem.

        Raises:
            ArgumentError: it is no time, or has no name.
        """
        row = (uid, job, problem.op, problem.text, problem.m, gpu, name, us, time.time())
        if fault := _peer_fault(dict(zip(_PEER, row))):
            raise ArgumentError(fault[0], fault[1], f"must be {fault[2]}", f"correct it in {job}")
        with self.writing():
            self.link.execute("INSERT OR IGNORE INTO peers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def trials(self, **where: str | int | float | None) -> list[Trial]:
        """Trials in order, those whose columns have the given values (None values are left out).

        Raises:
            ArgumentError: there is no such column. CacheError: the file is damaged; the message names the row.
        """
        given = {name: value for name, value in where.items() if value is not None}
        for name in set(given) - {"id", *_COLUMNS}:
            raise ArgumentError(name, given[name], "is no column of the trials", f"use one of {', '.join(_COLUMNS)}")
        text = " AND ".join(f"{name} = ?" for name in given) or "1"
        with self._using():
            rows = self.link.execute(f"SELECT * FROM trials WHERE {text} ORDER BY id", tuple(given.values())).fetchall()
        return [self._whole(row, "trials", _trial, _fault) for row in rows]

    def _whole(
        self, row: sqlite3.Row, table: str, made: Callable[[sqlite3.Row], Row], fault: Callable[[Row], Fault | None]
    ) -> Row:
        """What a row stands for.

        Raises:
            CacheError: the row is damaged.
        """
        try:
            found = made(row)
            wrong = fault(found)
        except (ValueError, AttributeError, TypeError) as error:  # facts or a schedule that are no JSON object
            wrong = "facts, schedule", f"{row['facts']!r}", f"JSON objects ({error})"
        if wrong:
            key = f"rowid = {row['id']}" if table == "trials" else f"uid = {row['uid']!r}"
            seen = f"{wrong[0]} = {shown(wrong[1])}, where there must be {wrong[2]}"
            remedy = f"delete it (DELETE FROM {table} WHERE {key}), or name another with --database"
            raise CacheError(f"trial database {self.path} is damaged: in {table}, {key} has {seen}; {remedy}")
        return found

    def peers(self, gpu: str | None = None) -> dict[tuple[Problem, str], float]:
        """(problem, name) -> median microseconds of other implementations."""
        found: dict[tuple[Problem, str], list[float]] = {}
        for row in self._peer_rows(gpu):
            problem = Problem.of(row["op"], parse_json(row["facts"]), row["m"])
            found.setdefault((problem, row["name"]), []).append(row["us"])
        return {place: statistics.median(times) for place, times in found.items()}

    def _peer_rows(self, gpu: str | None = None) -> list[dict[str, Any]]:
        text = f"SELECT {', '.join(_PEER)} FROM peers WHERE gpu = coalesce(?, gpu) ORDER BY created"
        with self._using():
            rows = self.link.execute(text, (gpu,)).fetchall()
        return [self._whole(row, "peers", dict, _peer_fault) for row in rows]

    def merge(self, other: Path | str) -> int:
        """Add the trials and peers of another database; how many trials were new.

        Raises:
            CacheError: it is not there, or cannot be read.
        """
        if not os.path.isfile(other):
            raise CacheError(f"{other} is no file; name a trial database")
        with closing(Database(other, create=False)) as source:
            new = self.add(source.trials())
            rows = [tuple(row.values()) for row in source._peer_rows()]
        with self.writing():
            self.link.executemany("INSERT OR IGNORE INTO peers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return new

    def prune(
        self, gpu: str | None = None, sources: str | None = None, before: float | None = None, failed: bool = False
    ) -> int:
        """Delete the trials that match everything given; how many there were. Nothing given deletes nothing.

        Args:
            sources: delete trials of other library sources than this digest. before: unix time. failed: only without a
                time.
        """
        rules = [("gpu = ?", gpu), ("sources IS NOT ?", sources), ("created < ?", before)]
        used = [(rule, value) for rule, value in rules if value is not None]
        texts = [rule for rule, _ in used] + ["status != 'ok'"] * failed
        if not texts:
            return 0
        with self.writing():
            done = self.link.execute(f"DELETE FROM trials WHERE {' AND '.join(texts)}", [value for _, value in used])
            return done.rowcount


def _trial(row: sqlite3.Row) -> Trial:
    facts, params = parse_json(row["facts"]), parse_json(row["schedule"])
    own = ("program", "status", "us", "spread", "predicted_us", "error", "role", "bound", "bound_us", "job", "uid")
    return Trial(
        Problem.of(row["op"], facts, row["m"]),
        params=tuple(sorted(params.items())),
        machine=Machine(*(row[name] for name in MACHINE)),
        created=row["created"],
        **{name: row[name] for name in own},
    )


def _peer_fault(row: Mapping[str, Any]) -> Fault | None:
    """As `_fault`, of the time of another implementation."""
    checks = (
        *((name, is_text(row[name], _MOST_TEXT), "text") for name in ("uid", "job", "op", "gpu", "name")),
        ("facts", records.is_facts(parse_json(row["facts"])), "text, bools and sizes by name"),
        ("m", is_count(row["m"], 1), "a positive integer of 31 bits"),
        ("us", records.is_time(row["us"]), "a time in microseconds"),
        ("created", is_number(row["created"], 0, _YEAR_9999), "a unix time"),
    )
    return next(((name, row[name], what) for name, right, what in checks if not right), None)


@dataclass(frozen=True)
class Best:
    """The fastest schedule of a problem on a GPU, and what it is compared with.

    Attributes:
        trial: its last trial, with the median time of all its trials.
        heuristic_us: of the schedule that runs without a record, None if it was not measured.
        tried: distinct schedules with a time. failed: distinct schedules without one.
    """

    trial: Trial
    heuristic_us: float | None
    tried: int
    failed: int


def medians(trials: Sequence[Trial]) -> list[Trial]:
    """One trial for each distinct schedule that has a time: its last one, with the median time of all."""
    groups: dict[tuple, list[Trial]] = {}
    for it in trials:
        if it.status == "ok" and it.us is not None:
            groups.setdefault(it.identity, []).append(it)
    return [replace(same[-1], us=statistics.median([it.us for it in same])) for same in groups.values()]


def best(trials: Sequence[Trial]) -> list[Best]:
    """The fastest schedule of each problem on each GPU, in order of appearance, by trials of the newest versions.

    Confirmed schedules come first: a single lucky measurement does not win against them.
    """
    problems: dict[tuple[str, Problem], list[Trial]] = {}
    for it in trials:
        problems.setdefault((it.machine.gpu, it.problem), []).append(it)
    found = []
    for every in problems.values():
        made = (every[-1].machine.terrazzo, every[-1].machine.tilelang)
        same = [it for it in every if (it.machine.terrazzo, it.machine.tilelang) == made]
        timed = medians(same)
        if not timed:
            continue
        confirmed = {it.identity for it in same if it.role == "confirm" and it.status == "ok"}
        pool = [it for it in timed if it.identity in confirmed] or timed
        # the schedule that the present heuristic takes is the last one that was measured in this role
        heuristic = {it.identity for it in [it for it in same if it.role == "heuristic"][-1:]}
        base = next((it.us for it in timed if it.identity in heuristic), None)
        failed = {it.identity for it in same} - {it.identity for it in timed}
        found.append(Best(min(pool, key=lambda it: it.us), base, len(timed), len(failed)))
    return found


def spaces_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """Every tried schedule of some problems of one GPU as a file to replay searches with; us is null where it failed.

    Raises:
        ArgumentError: no trials, or trials of several GPUs.
    """
    gpus = sorted({it.machine.gpu for it in trials})
    if len(gpus) != 1:
        raise ArgumentError("gpu", ", ".join(gpus) or None, "must be one GPU that has trials", "name it with --gpu")
    trials = [it for it in trials if it.program != UNKNOWN]
    times = {it.identity: round(it.us, 3) for it in medians(trials)}
    problems: dict[Problem, dict[str, dict[str, Any]]] = {}
    newest = {(it.problem, it.program): [name for name, _ in it.params] for it in trials}
    for it in {trial.identity: trial for trial in trials}.values():
        programs = problems.setdefault(it.problem, {})
        columns = [name for name, _ in it.params]
        if columns != newest[it.problem, it.program]:
            continue  # of a version whose schedules have other fields
        own = programs.setdefault(it.program, {"columns": [*columns, "us"], "rows": []})
        own["rows"].append([*(value for _, value in it.params), times.get(it.identity)])
    last = trials[-1].machine
    head = {"gpu": last.gpu, "sms": last.sms, "terrazzo": last.terrazzo, "tilelang": last.tilelang}
    rows = [
        {"op": problem.op, "facts": dict(problem.facts), "m": problem.m, "programs": programs}
        for problem, programs in problems.items()
    ]
    return head | {"problems": rows}


def table(found: Iterable[Best], gpu: str, sms: int) -> dict[str, Any]:
    """The best schedules of a GPU as the object of a table file (schedules/records.py)."""
    rows = []
    for it in found:
        trial, machine = it.trial, it.trial.machine
        if (machine.gpu, machine.sms) != (gpu, sms):
            continue
        row = {"op": trial.problem.op, "facts": dict(trial.problem.facts), "m": trial.problem.m}
        row |= {"program": trial.program, "schedule": dict(trial.params)}
        row |= {"us": round(trial.us, 3), "spread": trial.spread and round(trial.spread, 4)}
        row |= {"heuristic_us": it.heuristic_us and round(it.heuristic_us, 3), "tried": it.tried}
        row |= {name: getattr(machine, name) for name in ("driver", "cuda", "torch", "tilelang", "terrazzo", "sources")}
        row["date"] = datetime.fromtimestamp(trial.created, timezone.utc).date().isoformat()
        rows.append(row)
    size = lambda row: [at if type(at := row["facts"].get(name)) is int else 0 for name in ("n", "k", "tokens")]
    rows.sort(key=lambda row: (row["op"], size(row), records.key("", row["facts"]), row["m"]))
    return {"schema": records.SCHEMA, "gpu": gpu, "sms": sms, "records": rows}


def from_table(data: Mapping[str, Any], source: str) -> list[Trial]:
    """The records of a table file as trials, to import them.

    Raises:
        ArgumentError: not a table.
    """
    checked = records.Table(data, source)
    found = []
    for rows in checked.rows.values():
        for row in rows.values():
            made = {name: row.get(name) for name in MACHINE if name not in ("arch", "gpu", "sms")}
            machine = Machine(arch=str(row.get("arch", "")), gpu=checked.gpu, sms=checked.sms, **made)
            problem = Problem.of(row["op"], row["facts"], row["m"])
            uid = f"{TABLE}{records.key(row['op'], row)}"
            one = Trial(problem, row["program"], tuple(sorted(row["schedule"].items())), machine, "ok", row["us"])
            job = "import " + "".join(letter if letter.isprintable() else "?" for letter in source)
            one = replace(one, spread=row.get("spread"), role="confirm", job=job, uid=uid)
            base = row.get("heuristic_us")
            if base is not None:  # of a schedule that a table does not name, unless it is the fastest
                unknown = {} if base == row["us"] else dict(program=UNKNOWN, params=(), spread=None)
                found.append(replace(one, us=base, role="heuristic", uid=f"{uid} heuristic", **unknown))
            found.append(one)
    return found
