"""Bundles that are replaced while others read them, by processes that are killed at any moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_kernels import GEMM, SCALE, fake_bundle
from terrazzo.lowering import bundle as bundles
from terrazzo.lowering import folders, write_bundle
from terrazzo.lowering.bundle import read_bundle

SIZES = {1, 2}


@pytest.fixture
def bundle(cache_dir, tmp_path) -> Path:
    return fake_bundle(tmp_path / "shelf" / "bundle", SCALE, GEMM)


@pytest.fixture(params=["exchanged", "in two steps"])
def way(request, bundle, monkeypatch) -> str:
    """How a folder takes another one's place here: as the file system can, or as others can."""
    if request.param == "in two steps":
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    elif not folders.exchange(bundle, bundle):
        pytest.skip("this file system exchanges no folders")
    return request.param


def replace(path: Path, number: int) -> None:
    write_bundle(path, [SCALE, GEMM][: 1 + number % 2], replace=True)


def started(work: Callable[[], None]) -> int:
    """The number of a process that does some work, and then ends without a word."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


@contextlib.contextmanager
def each_system_call(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with its number before each call of this process into the system."""
    numbers = itertools.count()

    def noted(frame, event, called):
        if event == "c_call" and getattr(called, "__module__", "") == "posix":
            act(next(numbers))

    sys.setprofile(noted)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_bundle_is_replaced_and_nothing_is_left(bundle, way):
    for number in range(3):
        replace(bundle, number)
        assert len(read_bundle(bundle).requests) == 1 + number % 2
        assert os.listdir(bundle.parent) == ["bundle"] and folders.LOCK not in os.listdir(bundle)


def test_a_link_to_a_bundle_is_replaced_by_one(bundle, way):
    link = bundle.with_name("current")
    link.symlink_to(bundle)
    replace(link, 0)
    assert not link.is_symlink() and len(read_bundle(link).requests) == 1 and len(read_bundle(bundle).requests) == 2
    assert sorted(os.listdir(bundle.parent)) == ["bundle", "current"]


@pytest.mark.parametrize("part", ["replacement", "all of it"])
def test_writers_that_are_killed_leave_a_bundle(bundle, way, part, monkeypatch, tries):
    """It is there before anything is brought back, where the file system exchanges folders."""
    steps, replacement = [], bundles._replace

    def run(act) -> None:
        if part == "all of it":
            with each_system_call(act):
                return replace(bundle, 0)
        with monkeypatch.context() as patch:
            patch.setattr(bundles, "_replace", lambda *paths: traced(act, *paths))
            replace(bundle, 0)

    def traced(act, *paths) -> None:
        with each_system_call(act):
            replacement(*paths)

    replace(bundle, 0)
    run(steps.append)
    killed, absent, left = [], 0, 0
    for random in tries(15):
        last = random.randrange(len(steps))
        child = started(lambda last=last: run(lambda at: at == last and os.kill(os.getpid(), signal.SIGKILL)))
        killed.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL)
        absent += not bundle.exists()
        left += len(os.listdir(bundle.parent)) > 1
        assert len(read_bundle(bundle).requests) == 1
    assert sum(killed) > len(killed) / 2 and left
    assert not absent or way == "in two steps"
    replace(bundle, 1)
    assert os.listdir(bundle.parent) == ["bundle"] and len(read_bundle(bundle).requests) == 2


def test_what_two_steps_left_is_brought_back_and_swept(bundle, monkeypatch):
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    rename = os.rename

    def killed(source, place):
        rename(source, place)
        if Path(source) == bundle:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(os, "rename", killed)
    os.waitpid(started(lambda: replace(bundle, 0)), 0)
    monkeypatch.setattr(os, "rename", rename)
    assert not bundle.exists()
    assert len(read_bundle(bundle).requests) == 2, "by whom reads"
    os.rename(bundle, bundle.with_name("gone"))
    assert not [name for name in os.listdir(bundle.parent) if name.startswith(".bundle.old")]


def test_a_bundle_of_a_writer_that_lives_is_not_brought_back(bundle):
    old, handle = folders.locked_folder(bundle.parent, ".bundle.old")
    os.rename(bundle, old / "bundle")
    with pytest.raises(bundles.BundleError, match="No such file"):
        read_bundle(bundle)
    os.close(handle)
    assert len(read_bundle(bundle).requests) == 2 and os.listdir(bundle.parent) == ["bundle"]


def test_readers_meet_no_gap(bundle, monkeypatch):
    if not folders.exchange(bundle, bundle):
        pytest.skip("this file system exchanges no folders")
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (rename(*paths), time.sleep(0.01)))  # a gap would be met
    child = started(lambda: [replace(bundle, number) for number in range(10_000)])
    try:
        seen, end = [], time.monotonic() + 1.5
        while time.monotonic() < end or (len(set(seen)) < 2 and time.monotonic() < end + 20):
            seen.append(len(read_bundle(bundle).requests))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert set(seen) == SIZES and len(seen) > 20
