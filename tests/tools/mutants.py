"""Faults put into the house's host code, one at a time, to see which of them no test finds.

    python3 tests/tools/mutants.py --seed 1 --count 150 --jobs 2 --out build/mutants.json    (make mutants)
    python3 tests/tools/mutants.py --again build/mutants.json                                only what survived, again

A mutant is one small change of a copy of the tree: `<` for `<=`, a raise that is gone, two arguments swapped. The quick
tests of its floor run against it for at most a minute, those first whose imports reach the changed module soonest. A
test counts only if it passes where the same module has another text and the same meaning: so tests that read sources,
digests of kernels or identities kill nothing. Modules that hold tile programs are left out.
tests/data/mutants.json says of each survivor which test was written for it, or why none was.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
TURNS = ("ops", "nn", "layouts", "ops", "schedules", "lowering", "ops", "integrations")
"""Whose turn it is to be changed: `ops` is as long as all others."""
SECONDS = 60
"""For one mutant, unless `--seconds` says more: on a busy machine."""
MOST_FILES = 16
"""Files of tests that one mutant meets."""
LEFT_OUT = ("layouts/picture.py",)  # drawings
_SAID = ("__repr__", "__str__", "__dir__")
_TYPES = ("isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "zip", "next", "print", "warn", "once")
_SWAPS = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Add: ast.Sub,
    ast.Mult: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.And: ast.Or,
}
_SWAPS |= {new: old for old, new in _SWAPS.items()} | {ast.Mod: ast.FloorDiv, ast.Div: ast.Mult}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Mutant:
    """A change of `file`, a path below the root: `old`, at `line` from byte `start`, is `new`."""

    file: str
    line: int
    start: int
    operator: str
    old: str
    new: str
    text: str = ""  # the line that is changed
    verdict: str = ""  # killed, survived, timeout
    test: str = ""
    ran: int = 0
    seconds: float = 0.0

    def applied(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        before = sum(map(len, lines[: self.line - 1])) + self.start
        whole = b"".join(lines)
        old = self.old.encode()
        if whole[before : before + len(old)] != old:
            raise SystemExit(f"{self.file}:{self.line} has changed since the mutant was made")
        return (whole[:before] + self.new.encode() + whole[before + len(old) :]).decode()


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """(operator, what stands in the node's place)."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            yield "comparison", ast.Compare(node.left, [_SWAPS[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in _SWAPS and not {type(node.left), type(node.right)} & _TEXTS:
            yield "arithmetic", ast.BinOp(node.left, _SWAPS[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield "and / or", ast.BoolOp(_SWAPS[type(op)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "dropped not", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.If() | ast.IfExp() | ast.While():
            yield "negated condition", node.test
        case ast.Raise():
            yield "dropped raise", "pass"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "dropped statement", "pass"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "returned None", "return None"
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield "min / max, any / all", ast.Call(ast.Name(_CALLS[name]), node.args, node.keywords)
        case ast.Call(args=[one, two, *others]) if not any(isinstance(a, ast.Starred) for a in node.args):
            if _name(node.func) not in _TYPES and ast.unparse(one) != ast.unparse(two):
                yield "swapped arguments", ast.Call(node.func, [two, one, *others], node.keywords)
        case ast.Slice(lower=lower) if lower is not None and node.upper is None and node.step is None:
            yield "later start", ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), None, None)


_TEXTS = {ast.JoinedStr, ast.List, ast.Tuple}


def _name(func: ast.AST) -> str:
    return getattr(func, "id", getattr(func, "attr", ""))


def host_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may be changed: no words, annotations, decorators, nor what only type checkers read."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                waiting += [] if node.name in _SAID else [*node.body, *node.args.defaults]
                waiting += [default for default in node.args.kw_defaults if default is not None]
                continue
            case ast.ClassDef():
                waiting += node.body
                continue
            case ast.AnnAssign(value=value):
                waiting += [value] * (value is not None)
                continue
            case ast.Raise():
                yield node
                continue
            case ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                continue
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                continue
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                continue
            case ast.Call(func=func) if _name(func).endswith(("Error", "Warning")) or _name(func) in _TYPES:
                continue
        yield node
        waiting += ast.iter_child_nodes(node)


@cache
def sites(floor: str) -> dict[str, list[Mutant]]:
    """All mutants of a floor by operator."""
    found = defaultdict(list)
    for path in sorted((ROOT / floor).rglob("*.py")):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text()
        if path.name == "__init__.py" or file in LEFT_OUT or "tilelang.language" in source:
            continue
        lines = source.encode().splitlines(keepends=True)
        offsets = [0]
        for line in lines:
            offsets.append(offsets[-1] + len(line))
        for node in host_code(ast.parse(source)):
            for operator, new in changes(node):
                where = node.test if operator == "negated condition" else node
                first, last = where.lineno, where.end_lineno
                old = source.encode()[offsets[first - 1] + where.col_offset : offsets[last - 1] + where.end_col_offset]
                text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
                text = f"not ({text})" if operator == "negated condition" else text
                if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare):
                    text = f"({text})"
                made = Mutant(file, first, where.col_offset, operator, old.decode(), text)
                made.text = lines[first - 1].decode().strip()
                found[operator].append(made)
    return found


def drawn(seed: int, count: int) -> list[Mutant]:
    """So many different mutants; equal for equal trees and seeds."""
    generator, found = random.Random(seed), {}
    for turn in range(4 * count):
        of = sites(TURNS[turn % len(TURNS)])
        mutant = generator.choice(of[generator.choice(sorted(of))])
        found.setdefault((mutant.file, mutant.line, mutant.start, mutant.operator), mutant)
        if len(found) == count:
            break
    return list(found.values())


def found_again(listed: list[dict]) -> list[Mutant]:
    """Those that did not die, where they stand in the tree of today."""
    found = []
    for one in listed:
        if one.get("verdict") != "killed":
            same = [
                mutant
                for mutant in sites(one["file"].partition("/")[0])[one["operator"]]
                if all(getattr(mutant, name) == one[name] for name in ("file", "old", "new", "text"))
            ]
            if same:
                found.append(min(same, key=lambda mutant: abs(mutant.line - one["line"])))
            else:
                print(f"gone: {one['file']}:{one['line']} {one['old']!r}")
    return found


# Which tests: those whose imports reach the module.


@cache
def modules() -> dict[str, Path]:
    """Names that an import statement may use -> file."""
    found = {}
    for floor in dict.fromkeys(TURNS):
        for path in (ROOT / floor).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found["terrazzo." + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found | {path.stem: path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"}


@cache
def imported(path: Path) -> frozenset[Path]:
    """Files that a file imports by name; a package's name leads to the module that defines it."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {known[alias.name] for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                file = known.get(f"{node.module}.{alias.name}") or known.get(node.module)
                if file is not None and file.name == "__init__.py":
                    file = _defining(file).get(alias.name, file)
                found |= {file} - {None}
    return frozenset(found)


@cache
def _defining(package: Path) -> dict[str, Path]:
    found = {}
    for node in ast.walk(ast.parse(package.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            found |= {alias.name: modules()[node.module] for alias in node.names}
    return found


@cache
def distances(test: Path) -> dict[Path, int]:
    """Imports from a test's file to each file that it reaches."""
    found, waiting = {test: 0}, [test]
    for path in waiting:
        for other in imported(path) - found.keys():
            found[other] = found[path] + 1
            waiting.append(other)
    return found


@cache
def tests_of(file: str) -> tuple[str, ...]:
    """Files of tests for a module: of its floor, and those of others that import it; nearest first."""
    path, floor, never = ROOT / file, file.partition("/")[0], 99
    name = path.stem if path.stem not in ("op", "format", "entry", "requests") else path.parent.name + "_" + path.stem
    ranked = []
    for test in (ROOT / "tests").glob("*/**/test_*.py"):
        if not find_spec("hypothesis") and "from hypothesis" in test.read_text():
            continue
        far, of = distances(test).get(path, never), test.relative_to(ROOT).parts[1]
        if of == floor or (far == 1 and of != "gpu"):
            mirrors = test.parent.relative_to(ROOT / "tests") == path.parent.relative_to(ROOT)
            near = mirrors or path.parent.name in test.stem
            ranked.append((name not in test.stem, far, not near, test.stat().st_size, str(test.relative_to(ROOT))))
    return tuple(entry[-1] for entry in sorted(ranked)[:MOST_FILES])


# As a plug-in of pytest, in the processes that test a mutant.


def _note(*words: object) -> None:
    with open(os.environ["MUTANT_LOG"], "a", encoding="utf-8") as log:
        print(*words, file=log, flush=True)


def pytest_collection_modifyitems(config, items) -> None:
    """What compiles comes last."""
    items.sort(key=lambda item: item.get_closest_marker("compiles") is not None)


def pytest_runtest_logstart(nodeid, location) -> None:
    _note("start", nodeid)


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        _note("failed", report.nodeid)
    elif report.when == "call" and report.passed:
        _note("passed", report.nodeid)


def pytest_collectreport(report) -> None:
    if report.failed:
        _note("failed", report.nodeid)


class Worker:
    """A copy of the tree in which one mutant after the other stands."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.tree, self.writes = folder, seconds, folder / "tree", 0
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", ".ruff_cache")
        shutil.copytree(ROOT, self.tree, symlinks=True, ignore=ignored)

    def write(self, file: str, text: str) -> None:
        """With a time of its own: Python takes bytecode of the same second and length for that of this text."""
        path = self.tree / file
        path.write_text(text)
        self.writes += 1
        os.utime(path, (now := time.time() - 1_000_000 + 10 * self.writes, now))

    def pytest(self, tests: list[str], without: set[str], seconds: float, fresh: bool) -> tuple[str, str, int]:
        """(passed, failed or timeout; the test that failed or was running; tests that passed)."""
        log = self.folder / "log"
        log.write_text("")
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        kernels = self.folder / "kernels" if fresh else self.folder.parent / "kernels"
        if fresh:
            shutil.rmtree(kernels, ignore_errors=True)
        environment = os.environ | {
            "PYTHONPATH": f"{self.tree}{os.pathsep}{Path(__file__).parent}",
            "MUTANT_LOG": str(log),
            "TERRAZZO_CACHE_DIR": str(kernels),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "mutants",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
        ]
        command += [
            "-o",
            "addopts=",
            f"--basetemp={self.folder / 'tmp'}",
            *(f"--deselect={t}" for t in without),
            *tests,
        ]
        with open(self.folder / "output", "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=self.tree, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(seconds, 1))
            finally:
                late = process.poll() is None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        notes = [line.partition(" ")[::2] for line in log.read_text().splitlines()]
        failed = [test for word, test in notes if word == "failed"]
        passed = sum(word == "passed" for word, _ in notes)
        if failed:
            return "failed", failed[0], passed
        if late:
            return "timeout", notes[-1][1] if notes else "", passed
        return ("passed", "", passed) if process.returncode in (0, 5) else ("failed", "pytest", passed)

    def judge(self, mutant: Mutant, unfit: Callable[[str, str], bool | None], tell: Callable[..., None]) -> None:
        """Run the tests against a mutant; `unfit` and `tell` share what is known of tests that only read the text."""
        source, fresh = (self.tree / mutant.file).read_text(), mutant.file.startswith("lowering/")
        tests, without, begun = list(tests_of(mutant.file)), set(), time.monotonic()
        try:
            while True:
                self.write(mutant.file, mutant.applied(source))
                left = self.seconds - (time.monotonic() - begun)
                result, test, mutant.ran = self.pytest(tests, without, left, fresh)
                mutant.test, mutant.verdict = test, {"passed": "survived", "failed": "killed"}.get(result, result)
                if result != "failed":
                    break
                if unfit(mutant.file, test) is None:
                    self.write(mutant.file, source + "\n_SAME = True\n")
                    alone = [test] if test != "pytest" else tests
                    result, _, _ = self.pytest(alone, set(), self.seconds, fresh)
                    tell(mutant.file, test, result == "failed")
                if not unfit(mutant.file, test):
                    break
                without.add(test)
                tests = [file for file in tests if file != test]
                if not tests or time.monotonic() - begun > self.seconds:
                    mutant.test, mutant.verdict = "", "timeout" if tests else "survived"
                    break
        finally:
            self.write(mutant.file, source)
        mutant.seconds = round(time.monotonic() - begun, 1)


def run(
    mutants: list[Mutant], jobs: int, out: Path, budget: float, head: dict, seconds: float = SECONDS
) -> list[Mutant]:
    """Judge them, each job in a copy of the tree of its own; what is known is written after each."""
    waiting: queue.Queue[Mutant] = queue.Queue()
    for mutant in mutants:
        waiting.put(mutant)
    end, lock, done, unfit = time.monotonic() + budget, threading.Lock(), [], {}
    out.parent.mkdir(parents=True, exist_ok=True)

    def work(folder: Path) -> None:
        worker = Worker(folder, seconds)
        while time.monotonic() < end - seconds:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            worker.judge(mutant, lambda *key: unfit.get(key), lambda *given: unfit.update({given[:2]: given[2]}))
            with lock:
                done.append(mutant)
                said = f"{mutant.verdict:8} {mutant.seconds:5} s  {mutant.file}:{mutant.line} {mutant.operator}: "
                print(f"[{len(done)}/{len(mutants)}] {said}{mutant.old!r} -> {mutant.new!r}  {mutant.test}", flush=True)
                counts = Counter(one.verdict for one in done)
                out.write_text(
                    json.dumps({**head, "counts": counts, "mutants": list(map(asdict, done))}, indent=1),
                    encoding="utf-8",
                )

    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        threads = [threading.Thread(target=work, args=(Path(folder) / str(n),)) for n in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.json")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; none begins in the last 60")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one mutant")
    parser.add_argument("--again", type=Path, help="judge what did not die in this result, or committed file, again")
    parser.add_argument("--list", action="store_true", help="name the mutants and their tests, run none")
    given = parser.parse_args()
    if given.again is None:
        mutants = drawn(given.seed, given.count)
    else:
        mutants = found_again(json.loads(given.again.read_text())["mutants"])
    if given.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line} {mutant.operator}: {mutant.old!r} -> {mutant.new!r}")
            print("   ", *tests_of(mutant.file))
        return
    head = {"seed": given.seed, "count": given.count}
    done = run(mutants, given.jobs, given.out, given.budget, head, given.seconds)
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in done).most_common()))


if __name__ == "__main__":
    main()
