"""Compiling in the background, by a process of its own: who is told, and what of kernels that do not compile."""

from __future__ import annotations

import os
import threading

import pytest
from lowering_tools import needs_compiler, request_for
from terrazzo.lowering import KernelRequest, is_ready, replacing
from terrazzo.lowering.replacing import Replacements


@needs_compiler
def test_a_kernel_is_ready_when_its_callers_are_told(cache_dir):
    told, request, background = [], request_for("scale", n=384), Replacements()
    for caller in range(2):
        background.when_ready(
            request, lambda caller=caller: told.append((caller, is_ready(request), threading.get_ident()))
        )
    assert background.wait(120)
    assert sorted(told)[0][:2] == (0, True) and sorted(told)[1][:2] == (1, True)
    assert threading.get_ident() not in {thread for *_, thread in told}
    background.when_ready(request, lambda: told.append("at once"))
    assert told[-1] == "at once" and background.wait(0)
    background._pool.close()


@needs_compiler
def test_a_kernel_that_does_not_compile_is_given_up(tmp_path, monkeypatch, cache_dir):
    (tmp_path / "faulty.py").write_text("def build(target): raise RuntimeError('no such instruction')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told, background = [], Replacements()
    with pytest.warns(RuntimeWarning, match="slower kernel goes on"):
        background.when_ready(KernelRequest("faulty", "faulty:build", {}, "sm_80"), lambda: told.append(1))
        assert background.wait(120)
    background.when_ready(KernelRequest("faulty", "faulty:build", {}, "sm_80"), lambda: told.append(1))
    assert background.wait(0) and not told
    background._pool.close()


def test_a_child_process_does_not_wait_for_threads_of_its_parent():
    before = replacing._replacements
    before._waiting[request_for("scale")] = []
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if replacing.wait(0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and not replacing.wait(0)
    finally:
        before._waiting.clear()
