"""GPU tests: skip with a reason without a GPU; compile every kernel of the selected cases in parallel, up front.

`make test-gpu` runs them all and keeps a record of it. Where there is no network, and no .venv of make's:

    python3 -m pytest tests/gpu --record benchmarks/results/gpu_tests.json

Files by name in the place of tests/gpu replace their own entries; `--commit HEX` says it where there is no git.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-cases",
        type=int,
        default=None,
        help="random cases of each fuzz (default $TERRAZZO_FUZZ_CASES)",
    )
    parser.addoption("--record", type=Path, help="a JSON file: which files of tests ran whole, on which card")
    parser.addoption("--commit", help="with --record, and no git: the commit of this tree")
    parser.addoption("--gpu", help="with --compile-only, and no GPU: the one to compile for, as nvidia/nvidia-h200")
    parser.addoption("--compile-only", action="store_true", help="compile the kernels of the selected tests, run none")


def pytest_configure(config: pytest.Config) -> None:
    """With --gpu, before the tests' modules ask what GPU there is; with --record, before anything runs."""
    if (path := config.getoption("record", None)) is not None:
        config.pluginmanager.register(recorder(config, path))
    gpu = config.getoption("gpu", None)
    if gpu is None:
        return
    if not config.getoption("compile_only", False):
        raise pytest.UsageError("--gpu only compiles: add --compile-only")
    from terrazzo.lowering.errors import TargetError

    from benchmarks.pretended_gpu import pretend

    try:
        pretend(gpu)
    except TargetError as error:
        raise pytest.UsageError(str(error)) from error


def recorder(config: pytest.Config, path: Path) -> object:
    """The plug-in of `--record`."""
    import torch

    from tests.gpu import record

    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--record is of one process: leave out -n")
    if not torch.cuda.is_available():
        raise pytest.UsageError("--record is of runs on a GPU: torch sees none")
    commit = config.getoption("commit") or record.commit_of(record.ROOT, path)
    if not commit:
        raise pytest.UsageError("--record needs the commit: this tree has no git, add --commit HEX")
    return record.Recorder(path, {"commit": commit, **record.machine()})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What skips without a GPU has the mark."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With --compile-only, in place of the tests."""
    if not session.config.getoption("compile_only", False):
        return None
    said, failed = compile_cases(session)
    print(said or "nothing to compile")
    session.testsfailed = failed
    return True


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skips every test of this folder without a CUDA GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compiles, in parallel, the kernels of every selected test's `cases`, so that no test waits for a compiler.

    A kernel that fails to compile is left to the tests that need it: their failure carries the compiler's words.
    """
    import torch

    if not torch.cuda.is_available():
        return
    said, _ = compile_cases(request.session)
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and said:
        terminal.write_line(said)


def compile_cases(session: pytest.Session) -> tuple[str, int]:
    """A line about the kernels of all `cases` that had to be compiled ("" for none), and how many failed."""
    from terrazzo.lowering import compile_many, is_ready

    wanted = {}
    for item in session.items:
        for case in (getattr(item, "callspec", None) and item.callspec.params.get("cases")) or ():
            wanted.update({kernel.identity(): kernel for kernel in case.requests()})
    cold = [kernel for kernel in wanted.values() if not is_ready(kernel)]
    start = time.monotonic()
    failed = sum(isinstance(result, Exception) for result in compile_many(cold))
    seconds = time.monotonic() - start
    said = f"compiled {len(cold) - failed} of {len(wanted)} kernels in {seconds:.0f} s, {failed} failed"
    return said if cold else "", failed


@pytest.fixture
def nothing_compiles(gpu, compiled, monkeypatch) -> None:
    """Every kernel is compiled up front for its bucket: an M that asks for another one is a bug."""
    from terrazzo.lowering import kernels

    original = kernels.compile_request

    def ready_only(request, count=True):
        if kernels.find_compiled(request) is None:
            raise AssertionError(f"{request} was compiled on the way: a new M must never compile")
        return original(request, count)

    monkeypatch.setattr("terrazzo.lowering.kernels.compile_request", ready_only)
