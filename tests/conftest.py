"""What all tests share."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

try:
    import hypothesis
except ImportError:  # a GPU's host without network: tests/gpu do without
    hypothesis = None

# What uses a GPU where there is one: all of it is one worker's, so that nothing shares the GPU with what is timed.
ON_THE_GPU = ("tests/gpu/", "tests/test_demo.py", "tests/test_examples.py")

# Workers share the cores: idle threads of torch's that spin would take them from each other.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(threads, 1)))

# Each test launches, or compiles, the kernel that it means (tests of kernels that stand in for it turn this on).
os.environ.setdefault("TERRAZZO_BACKGROUND", "0")

# Importing tilelang puts its own TVM on PYTHONPATH; processes that later tests start must not inherit that.
_BEFORE = {name: os.environ.get(name) for name in ("PYTHONPATH", "TVM_LIBRARY_PATH")}


# The same cases every time, unless a seed is given (`make test-slow` draws one and prints it).
if hypothesis is not None:
    hypothesis.settings.register_profile("same", derandomize=True, database=None, print_blob=True)
    hypothesis.settings.register_profile("seeded", derandomize=False, database=None, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a background job; processes that tests stop inherit it
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if hypothesis is not None:
        hypothesis.settings.load_profile("same" if config.getoption("--hypothesis-seed") is None else "seeded")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """For tests marked `random`: 0 in `make test`, that of `--hypothesis-seed` in `make test-slow`."""
    return int(request.config.getoption("--hypothesis-seed", None) or 0)


@pytest.fixture
def tries(request: pytest.FixtureRequest, seed: int) -> Callable[[int], Iterator[random.Random]]:
    """`for random in tries(200)`: an attack, of a generator for each try; $TERRAZZO_ATTACK times as many if it is set.

    A test that takes it is marked `random` and `attack`. Tries are seeded one by one, so that they are alike in every
    number of them. A test that fails says which one it was, and $TERRAZZO_TRY runs that one alone.
    """
    name = request.node.originalname

    def draw(count: int) -> Iterator[random.Random]:
        alone = os.environ.get("TERRAZZO_TRY")
        for number in range(count * int(os.environ.get("TERRAZZO_ATTACK", 1))) if alone is None else (int(alone),):
            request.node.stash[TRY] = f"TERRAZZO_TRY={number} pytest --hypothesis-seed={seed} '{request.node.nodeid}'"
            yield random.Random(f"{seed} {name} {number}")
        del request.node.stash[TRY]

    return draw


TRY = pytest.StashKey[str]()


def pytest_itemcollected(item: pytest.Item) -> None:
    if "tries" in getattr(item, "fixturenames", ()):
        item.add_marker("random")
        item.add_marker("attack")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "call" and report.failed and TRY in item.stash:
        report.sections.append(("This try again", item.stash[TRY]))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a generator of its own is the same on every worker and in every order."""
    number = zlib.crc32(item.name.encode())
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


@pytest.fixture(autouse=True)
def environment_of_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _BEFORE.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.fixture
def oracle():
    """Modules on a CPU compute what the operators' references define, in float64, and not by torch's products."""
    from terrazzo.nn import cpu

    with cpu.exactly():
        yield


@pytest.fixture
def without_records(monkeypatch: pytest.MonkeyPatch):
    """No table of tuned schedules is shipped, none is named; plans of a test do not outlive it."""
    from terrazzo.schedules import records

    monkeypatch.delenv(records.VARIABLE, raising=False)
    monkeypatch.setattr(records, "_shipped", lambda gpu: None)
    records.clear()
    yield
    records.clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `-n`: files that compile come first, so that no worker has a long one left when the others are done."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        compiling = Counter(item.path for item in items if item.get_closest_marker("compiles"))
        items.sort(key=lambda item: -compiling[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """For `-n`: a worker takes whole files, so that its module's fixtures compile once, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "gpu" if nodeid.startswith(ON_THE_GPU) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Files(config, log)
