"""Parallel compilation: one outcome for each request, whatever happens to a worker."""

import os
import re
import sys
from pathlib import Path

import pytest
import terrazzo
from lowering_tools import needs_compiler, request_for
from terrazzo.lowering import KernelRequest, cache_root, compile_many, is_ready
from terrazzo.lowering.errors import ArgumentError, CompileError, ToolchainError
from terrazzo.lowering.toolchain import toolchain
from terrazzo.lowering.worker import search_path

FAULTS = """
import os, time
def dies(target):
    print("last words", flush=True)
    os._exit(7)
def hangs(target): time.sleep(600)
def sees_gpus(target): raise RuntimeError(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}")
def sees_cache(target): raise RuntimeError(f"TERRAZZO_CACHE_DIR={os.environ['TERRAZZO_CACHE_DIR']!r}")
def talks(target):
    print("noise on stdout", flush=True)
    raise RuntimeError("said")
"""


@pytest.fixture
def faults(tmp_path, monkeypatch, cache_dir):
    """Function that makes a request for a builder that misbehaves before it needs any compiler."""
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: KernelRequest(name, f"faults:{name}", {}, "sm_80")


@needs_compiler
def test_results_stand_in_order_and_faults_cost_one_request(faults):
    good = request_for("scale")
    requests = [faults("dies"), good, faults("talks"), request_for("scale", n=128), good, faults("sees_gpus")]
    seen = []
    results = compile_many(
        requests, workers=2, progress=lambda done, total, request, outcome: seen.append((done, total, request.name))
    )
    assert [isinstance(result, Path) for result in results] == [False, True, False, True, True, False]
    assert (
        "exit status 7" in str(results[0])
        and "said" in str(results[2])
        and "CUDA_VISIBLE_DEVICES=''" in str(results[5])
    )
    assert results[1] == results[4] and is_ready(good) and (results[3] / "kernel.so").is_file()
    assert [(done, total) for done, total, _ in seen] == [(number, 5) for number in range(1, 6)]
    before = os.times().children_user
    assert compile_many([good, good]) == [results[1]] * 2 and os.times().children_user == before  # no process for a hit


@needs_compiler
def test_a_worker_has_the_cache_of_its_parent_after_a_chdir(faults, tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", f"cache-of-{tmp_path.name}")  # a name that no other test has resolved
    monkeypatch.chdir(tmp_path)
    root = cache_root()
    monkeypatch.chdir("/")
    with pytest.raises(CompileError, match=re.escape(f"TERRAZZO_CACHE_DIR={str(root)!r}")):
        raise compile_many([faults("sees_cache")])[0]
    assert root == tmp_path / f"cache-of-{tmp_path.name}"


@needs_compiler
def test_a_hanging_compilation_is_given_up(faults):
    (result,) = compile_many([faults("hangs")], deadline=6.0)
    assert isinstance(result, CompileError) and "took longer than 6 s" in str(result)


def test_no_work_needs_no_compiler(cache_dir, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert compile_many([]) == []
    with pytest.raises(ToolchainError, match="nvcc missing"):
        compile_many([request_for("scale")])


@pytest.mark.parametrize("requests", [None, 5, ["x"]])
def test_what_is_no_request_is_refused(requests):
    with pytest.raises(ArgumentError, match="must be a KernelRequest"):
        compile_many(requests)


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_a_number_of_processes_that_is_none_is_refused(workers):
    with pytest.raises(ArgumentError, match="workers"):
        compile_many([request_for("scale")], workers=workers)


@needs_compiler
def test_a_worker_imports_nothing_from_the_folder_that_it_starts_in(cache_dir, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise ImportError('not the one of the library')")
    (tmp_path / "terrazzo").mkdir()
    (tmp_path / "terrazzo" / "__init__.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    request = request_for("scale")
    assert compile_many([request])[0].name == request.cache_key(toolchain())


def test_a_checkout_stays_on_the_path_and_another_working_directory_does_not(tmp_path, monkeypatch):
    """An editable install may be a line of sys.path: without it a worker in the checkout would find no terrazzo."""
    root = str(Path(terrazzo.__file__).parents[1])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), root, "/elsewhere"])
    monkeypatch.chdir(root)
    assert search_path() == [str(tmp_path), "/elsewhere", root]
    monkeypatch.chdir(tmp_path)
    assert search_path() == [root, "/elsewhere"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert search_path() == [str(tmp_path), root, "/elsewhere"]


def test_a_worker_of_one_checkout_imports_no_other_one(tmp_path, monkeypatch):
    """`python -m pytest` in a second checkout of an environment that has the first one installed as editable."""
    root, other = str(Path(terrazzo.__file__).parents[1]), tmp_path / "other"
    (other / "terrazzo").mkdir(parents=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(root)
    for path in ([root, "/first", str(other)], ["", "/first", str(other)], ["/first", str(other), root]):
        monkeypatch.setattr(sys, "path", path)
        assert search_path() == ["/first", root, str(other)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/first", str(other)])
    assert search_path() == ["/first", root, str(other)]  # the process was started in its checkout, and went on
