"""Compiling in another environment: who is asked, what is refused, and that kernels are the same ones."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lowering_tools import DRIVE, HERE, needs_compiler, request_for, run_python
from terrazzo.lowering import KernelRequest, compile_many, compile_request, compilers, environment_report, worker
from terrazzo.lowering.errors import CompileError, ToolchainError
from terrazzo.lowering.settings import COMPILER
from terrazzo.lowering.toolchain import package_version, toolchain

ROOT = HERE.parents[1]
HONEST = {"terrazzo": package_version("terrazzo"), "problem": "", "toolchain": toolchain().as_dict(), "missing": []}


@pytest.fixture(autouse=True)
def nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(compilers.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    compilers._probe.cache_clear()
    yield
    while worker._idle:
        worker._idle.pop().kill()
    compilers._probe.cache_clear()


@pytest.fixture
def interpreter(tmp_path):
    """Function that makes a program which answers as told, whatever it is asked."""

    def make(said: str | dict, code: int = 0, name: str = "python") -> str:
        text = said if isinstance(said, str) else json.dumps(said)
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\necho its own words >&2\nexit {code}\n")
        program.chmod(0o755)
        return str(program)

    return make


def test_without_a_name_this_environment_compiles():
    found = compilers.compiler()
    assert (found.python, found.toolchain) == (None, toolchain()) and compilers.toolchain() == toolchain()
    assert compilers.compiler_report()["python"] is None


def test_versions_of_the_named_environment_make_the_key(interpreter, monkeypatch):
    other = {**HONEST["toolchain"], "nvcc": "V99"}
    monkeypatch.setenv(compilers.VARIABLE, interpreter({**HONEST, "toolchain": other}))
    assert compilers.toolchain().nvcc == "V99"
    request = request_for("scale")
    assert request.cache_key(compilers.toolchain()) != request.cache_key(toolchain())
    monkeypatch.setenv(compilers.VARIABLE, "")  # this environment, whatever is written down
    assert compilers.toolchain() == toolchain()


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("", 3, "has no terrazzo that works: its own words"),
        ("", 0, "does not answer as terrazzo does"),
        ("5", 0, "does not answer as terrazzo does"),
        ("[" * 100_000, 0, "does not answer as terrazzo does"),
        ({**HONEST, "toolchain": {"nvcc": "V1"}}, 0, "does not answer as terrazzo does"),
        ({**HONEST, "terrazzo": "0.0.9"}, 0, r"has terrazzo 0\.0\.9, this is"),
        ({**HONEST, "problem": "nvcc --version fails"}, 0, "nvcc --version fails"),
        ({**HONEST, "missing": ["tilelang"]}, 0, "cannot compile .*tilelang missing"),
    ],
)
def test_an_environment_that_cannot_compile_is_named(interpreter, cache_dir, monkeypatch, said, code, words):
    python = interpreter(said, code)
    monkeypatch.setenv(compilers.VARIABLE, python)
    for call in (compile_request, lambda request: compile_many([request])):
        with pytest.raises(ToolchainError, match=words) as found:
            call(request_for("scale"))
        assert python in str(found.value)


@pytest.mark.parametrize("name", ["python3", "./python", "/nowhere/python", "/tmp"])
def test_only_an_absolute_path_of_a_program_is_run(cache_dir, monkeypatch, tmp_path, name):
    (tmp_path / "python").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(compilers.VARIABLE, name)
    with pytest.raises(ToolchainError, match="no absolute path|does not exist or is no program"):
        compile_request(request_for("scale"))
    assert not (tmp_path / "ran").exists()


def test_a_name_is_written_down_checked_and_taken_back(interpreter, tmp_path, monkeypatch):
    python = interpreter(HONEST)
    assert compilers.set_compiler(python).python == python
    assert COMPILER.file() == tmp_path / "config" / "terrazzo" / "config.json"
    assert COMPILER.find() == (python, str(COMPILER.file()))
    with pytest.raises(ToolchainError, match="has no terrazzo that works"):
        compilers.set_compiler(interpreter("", 1, "broken"))
    assert COMPILER.find()[0] == python  # as it was
    monkeypatch.setenv(compilers.VARIABLE, "/first")
    assert COMPILER.find() == ("/first", compilers.VARIABLE)
    monkeypatch.delenv(compilers.VARIABLE)
    assert compilers.set_compiler(None) is None and COMPILER.find() is None
    assert not list((tmp_path / "config" / "terrazzo").iterdir())


@pytest.mark.parametrize("text", ["", "5", "{", '{"compiler": 5}', '{"compiler": ""}', "[" * 10_000, "\0"])
def test_a_damaged_configuration_is_an_error(text):
    file = COMPILER.file()
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ToolchainError, match="config"):
        compilers.compiler()
    assert compilers.compiler_report()["problem"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_configuration_that_others_may_write_is_not_followed(interpreter, what):
    compilers.set_compiler(interpreter(HONEST))
    file = COMPILER.file()
    (file if what == "file" else file.parent).chmod(0o666 if what == "file" else 0o777)
    with pytest.raises(ToolchainError, match="others than this user may write it"):
        compilers.compiler()


def test_information_shows_the_compiler_and_what_is_wrong_with_it(interpreter, cache_dir, monkeypatch):
    monkeypatch.setenv(compilers.VARIABLE, interpreter(HONEST))
    report = environment_report()
    assert report["compiler"]["named_by"] == compilers.VARIABLE and report["compiler"]["problem"] is None
    assert report["compiler"]["toolchain"] == HONEST["toolchain"]
    monkeypatch.setenv(compilers.VARIABLE, "/nowhere/python")
    missing = {row["what"]: row["remedy"] for row in environment_report()["missing"]}
    assert "does not exist" in missing[f"the compiler that {compilers.VARIABLE} names"]


def test_modules_of_this_process_do_not_reach_another_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/process")
    monkeypatch.setenv("PYTHONHOME", "/of/this/process")
    assert not [name for name in compilers.clean_environment() if name.startswith("PYTHON")]


# --- with a compiler: this environment, called by its interpreter's name, is another one to this process ---

FAULTS = """
import os
def says_pid(target, n=0): raise RuntimeError(f"pid {os.getpid()}")
def dies(target): os._exit(7)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch, cache_dir):
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(compilers.VARIABLE, sys.executable)
    return lambda name, **params: KernelRequest(name, f"faults:{name}", params, "sm_80")


def pid_of(outcome: BaseException) -> str:
    return str(outcome).rpartition("pid ")[2].split()[0]


@needs_compiler
def test_processes_outlive_a_kernel_and_errors_are_the_compilers(faults):
    seen = set()
    for n in range(2):
        with pytest.raises(CompileError, match="RuntimeError: pid") as found:
            compile_request(faults("says_pid", n=n))
        seen.add(pid_of(found.value))
    seen.update(pid_of(outcome) for outcome in compile_many([faults("says_pid", n=n) for n in (2, 3)], workers=1))
    assert len(seen) == 1 and len(worker._idle) == 1
    with pytest.raises(CompileError, match="died with exit status 7"):
        compile_request(faults("dies"))
    with pytest.raises(CompileError, match="RuntimeError: pid") as found:
        compile_request(faults("says_pid", n=4))
    assert pid_of(found.value) not in seen


@needs_compiler
@pytest.mark.compiles
def test_a_kernel_of_another_environment_is_found_by_this_one(cache_dir, monkeypatch):
    request = request_for("scale")
    monkeypatch.setenv(compilers.VARIABLE, sys.executable)
    seen = []
    (folder,) = compile_many([request], progress=lambda *said: seen.append(said))
    assert folder.parent.parent.parent == cache_dir and seen == [(1, 1, request, folder)]
    monkeypatch.delenv(compilers.VARIABLE)
    assert compile_request(request) == folder


@needs_compiler
def test_after_a_fork_in_a_compilation_the_child_compiles_in_a_process_of_its_own(tmp_path, cache_dir):
    """The lowering lock, and whatever TVM held, belong to a thread that the child does not have."""
    (tmp_path / "slow.py").write_text("import time\ndef waits(target): time.sleep(600)\ndef fails(target): 1 / 0\n")
    code = """
import os, sys, threading, time
from terrazzo.lowering import KernelRequest, compiler, get_kernel
from terrazzo.lowering.errors import CompileError
threading.Thread(target=get_kernel, args=[KernelRequest("waits", "slow:waits", {}, "sm_80")], daemon=True).start()
while not compiler.in_use():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    try:
        get_kernel(KernelRequest("fails", "slow:fails", {}, "sm_80"))
    except CompileError as error:
        os._exit(0 if "ZeroDivisionError" in str(error) else 2)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
    done = run_python(code, tmp_path, TERRAZZO_CACHE_DIR=str(cache_dir))
    assert done.stdout.strip() == "0", done.stderr


# --- two real environments ---

LEFT_OUT = (
    "tilelang",
    "tvm",
    "tvm_ffi",
    "apache_tvm",
    "z3",
    "torch_c_dlpack_ext",
    "terrazzo",
    "__editable__",
    "_virtualenv",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """Interpreter of an environment with tvm-ffi 0.1.10 as vLLM 0.26 pins it, no tilelang, and terrazzo.

    Everything else is what is installed here, by links.
    """
    home = tmp_path_factory.mktemp("engine") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    for folder in (entry for entry in sys.path if entry.endswith("site-packages")):
        for entry in Path(folder).iterdir():
            if not entry.name.startswith(LEFT_OUT) and entry.suffix != ".pth" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    done = subprocess.run([*command, "apache-tvm-ffi==0.1.10"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"apache-tvm-ffi 0.1.10 cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    (packages / "terrazzo").symlink_to(ROOT / "terrazzo")
    meta = Path(importlib.metadata.distribution("terrazzo")._path)
    shutil.copytree(meta, packages / meta.name)
    return home / "bin" / "python"


@needs_compiler
@pytest.mark.slow
def test_a_process_with_an_engines_pins_compiles_in_the_other_environment_and_launches(
    engine, cache_dir, fake_driver, tmp_path
):
    code = f"""
import importlib.util, sys
sys.path.append({str(HERE)!r})
import tvm_ffi  # as xgrammar does
assert tvm_ffi.__version__ == "0.1.10" and importlib.util.find_spec("tilelang") is None
from lowering_tools import request_for
from terrazzo.lowering import compile_many, get_kernel, worker
show = lambda done, total, *_: print(done, total)
compile_many([request_for("scale"), request_for("gemm")], workers=1, progress=show)
kernel = get_kernel(request_for("tma_copy", "sm_90a"))  # cold: the same process compiles it
assert len(worker._idle) == 1
FOLDER = str(kernel.folder)
{DRIVE}
launch(tensor(0x10000, (128, 256), 16), tensor(0x20000, (128, 256), 16))
"""
    (tmp_path / "log").touch()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "TERRAZZO_CACHE_DIR": str(cache_dir),
        "FAKE_DRIVER_LOG": str(tmp_path / "log"),
        "FAKE_DRIVER_PARAMS": "tt",
        "LD_LIBRARY_PATH": str(fake_driver),
    }
    cold = [
        engine,
        "-c",
        f"import sys; sys.path.append({str(HERE)!r})\nfrom terrazzo.lowering import get_kernel\n"
        "from lowering_tools import request_for\nget_kernel(request_for('scale'))",
    ]
    done = subprocess.run(cold, env=environment, capture_output=True, text=True, check=False)
    for way in ("tilelang", "terrazzo[compile]", "load a bundle", compilers.VARIABLE):
        assert way in done.stderr.strip().splitlines()[-1], done.stderr
    environment[compilers.VARIABLE] = sys.executable
    done = subprocess.run([engine, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "2", "2", "2"]
    assert json.loads((tmp_path / "log").read_text().splitlines()[-1])["call"] == "launch"
