"""From a tile program to a shared object: what comes out, what the report says, how failures read."""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from lowering_tools import needs_compiler, request_for, run_python
from terrazzo.lowering import (
    Kernel,
    KernelReport,
    KernelRequest,
    cache,
    compile_request,
    compiler,
    get_kernel,
    is_ready,
    launcher,
)
from terrazzo.lowering.errors import ArgumentError, CompileError, ToolchainError
from terrazzo.lowering.toolchain import find_cuda_tool

pytestmark = [needs_compiler, pytest.mark.compiles]
needs_disassembler = pytest.mark.skipif(find_cuda_tool("cuobjdump") is None, reason="no cuobjdump")


@needs_disassembler
@pytest.mark.parametrize(
    ("target", "opcode"),
    [
        ("sm_80", "HMMA.16816.F32"),
        pytest.param("sm_86", "HMMA.16816.F32", marks=pytest.mark.slow),
        pytest.param("sm_89", "HMMA.16816.F32", marks=pytest.mark.slow),
        ("sm_90a", "HGMMA.64x64x16.F32"),
    ],
)
def test_every_target_compiles_to_its_tensor_instruction(compiled, target, opcode):
    folder = compiled(request_for("gemm", target))
    report = KernelReport.read(folder / "report.json")
    assert report.tensor_instructions == [opcode] and report.count("H.*MMA") == report.instructions[opcode] > 0
    assert 0 < report.registers <= 255 and report.spill_stores == report.spill_loads == report.stack == 0
    assert report.smem_dynamic == 16384 and report.note == ""
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {
        "kernel.so",
        "kernel.cu",
        "kernel.cubin",
        "report.json",
    }


@needs_disassembler
def test_instructions_of_a_kernel_compiled_for_a_launch_are_counted_when_asked(cache_dir):
    kernel = get_kernel(request_for("gemm"))
    assert "instructions" not in json.loads((kernel.folder / "report.json").read_text())
    (row,) = cache.list_entries()
    assert row["registers"] == kernel.report.registers and row["tensor_instructions"] == []
    assert kernel.report.tensor_instructions == ["HMMA.16816.F32"] and kernel.report.count("HMMA") > 0


def test_report_without_a_disassembler(compiled, monkeypatch):
    from terrazzo.lowering import report

    folder = compiled(request_for("gemm"))
    monkeypatch.setattr(report, "find_cuda_tool", lambda name: None)
    made = report.make_report(folder / "kernel.cubin", "ptxas info : Used 40 registers, 128 bytes smem", None)
    assert made.registers == 40 and made.smem_static == 128 and made.instructions == {} and "pip install" in made.note


def test_spills_are_reported(compiled, monkeypatch):
    from terrazzo.lowering import report

    monkeypatch.setattr(report, "find_cuda_tool", lambda name: None)
    log = "    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads\nptxas info    : Used 255 registers"
    made = report.make_report(compiled(request_for("gemm")) / "kernel.cubin", log, 0)
    assert (made.stack, made.spill_stores, made.spill_loads, made.registers) == (16, 24, 28, 255)
    two = (
        f"    8 bytes stack frame, 40 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 40 registers\n{log}"
    )
    made = report.make_report(compiled(request_for("gemm")) / "kernel.cubin", two, 0)  # the most of any function
    assert (made.stack, made.spill_stores, made.spill_loads, made.registers) == (16, 40, 28, 255)


@needs_disassembler
def test_ptx_stands_beside_the_machine_code(compiled):
    folder = compiled(request_for("gemm", flags=("ptx=compute_80",)))
    listed = subprocess.run(
        [find_cuda_tool("cuobjdump"), "-lelf", "-lptx", folder / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"ELF.*sm_80", listed.stdout) and re.search(r"PTX.*sm_80", listed.stdout)
    assert KernelReport.read(folder / "report.json").tensor_instructions == ["HMMA.16816.F32"]


def test_texts_for_debuggers_are_left_out_unless_a_request_asks(compiled):
    """They are three quarters of a kernel's bytes, which wheels carry and drivers read."""
    plain, asked = (compiled(request_for("scale", flags=flags)) / "kernel.so" for flags in ((), ("-lineinfo",)))
    texts = b".nv_debug_ptx_txt", b".debug_line"
    assert not any(text in plain.read_bytes() for text in texts)
    assert all(text in asked.read_bytes() for text in texts) and asked.stat().st_size > plain.stat().st_size


def test_nvcc_flags_and_pass_configs_reach_the_compiler(compiled):
    slow = KernelRequest("test.flags", "programs:gemm", {}, "sm_80", flags=("-Xptxas", "-O1"))
    plain, slowed = (KernelReport.read(compiled(r) / "report.json") for r in (request_for("gemm"), slow))
    assert slowed != plain
    configs = {"tl.enable_fast_math": True, "tl.ptxas_register_usage_level": 3}
    command = compiler._Nvcc(slow, Path("build"), None).command(configs)
    assert {"--use_fast_math", "--register-usage-level=3", "-O1", "--cubin"} <= set(command)


def test_a_kernel_refuses_wrong_arguments_in_words(compiled):
    torch = pytest.importorskip("torch")
    kernel = Kernel("scale", compiled(request_for("scale")))
    x = torch.zeros(4, 256)
    for arguments, words in [
        ((x, x), "takes 4 arguments"),
        ((x, x, 1, 2.0), "expected cuda"),
        ((torch.zeros(4, 255), x, 1, 2.0), "shape[1] must be 256, 255 was passed"),
        ((x.half(), x, 1, 2.0), "expected float32"),
        ((torch.zeros(256, 4).t(), x, 1, 2.0), "strides[1] must be 1, 4 was passed"),
        ((None, x, 1, 2.0), "non-NULL"),
    ]:
        with pytest.raises(ArgumentError, match=re.escape(words)):
            kernel(*arguments)
    assert not kernel.warm and "cold" in repr(kernel) and kernel.report.registers > 0 and "__global__" in kernel.source


def test_a_cold_kernel_refuses_a_capture(compiled, monkeypatch):
    torch = pytest.importorskip("torch")
    from terrazzo.lowering.errors import CaptureError

    kernel = Kernel("scale", compiled(request_for("scale")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="before the capture"):
        kernel(torch.zeros(4, 256), torch.zeros(4, 256), 1, 2.0)


@pytest.mark.parametrize(
    ("entry", "params", "words"),
    [
        ("programs:absent", {}, "entry 'programs:absent' cannot be loaded"),
        ("programs:scale", {"rows": 3}, "unexpected keyword argument 'rows'"),
        ("programs:broken", {}, "no_such_device_function"),
    ],
)
def test_failures_carry_the_tools_words(cache_dir, entry, params, words):
    with pytest.raises(CompileError, match=re.escape(words)):
        compile_request(KernelRequest("bad", entry, params, "sm_80"))
    assert not list((cache_dir / "v2" / "building").iterdir()) and not list((cache_dir / "v2" / "kernels").iterdir())


def test_missing_compilers_are_named(cache_dir, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    ways = r"nvcc missing.*pip install 'terrazzo\[compile\]'.*load a bundle.*TERRAZZO_COMPILER"
    with pytest.raises(ToolchainError, match=ways):
        compile_request(request_for("scale"))


def test_get_kernel_remembers_and_a_cache_hit_imports_no_compiler(compiled, shared_cache):
    request = request_for("scale")
    compiled(request)
    assert is_ready(request) and get_kernel(request) is get_kernel(request)
    code = """
import sys
from lowering_tools import request_for
from terrazzo.lowering import get_kernel
print(get_kernel(request_for("scale")), sorted({"tilelang", "tvm"} & set(sys.modules)))
"""
    done = run_python(code, TERRAZZO_CACHE_DIR=str(shared_cache))
    assert done.stdout.strip() == "Kernel('test.scale() for sm_80', cold) []", done.stderr


def test_importing_the_floor_imports_no_framework():
    code = """
import importlib, sys
for name in ("kernels", "bundle", "compiler", "launcher", "parallel", "environment"):
    importlib.import_module("terrazzo.lowering." + name)
print(sorted({"torch", "tilelang", "tvm", "tvm_ffi", "numpy"} & set(sys.modules)))
"""
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_apache_tvm_in_the_process_stops_a_compilation(cache_dir):
    code = """
import sys, types
sys.modules["tvm"] = types.ModuleType("tvm")
sys.modules["tvm"].__file__ = "/site-packages/tvm/__init__.py"
from lowering_tools import request_for
from terrazzo.lowering import compile_request
compile_request(request_for("scale"))
"""
    done = run_python(code, TERRAZZO_CACHE_DIR=str(cache_dir))
    assert "ToolchainError: this process has imported apache-tvm" in done.stderr


def test_compiling_leaves_children_and_tilelang_alone(cache_dir):
    """Child processes inherit no TVM of TileLang's, and TileLang still compiles its own kernels its own way."""
    code = """
import os
from lowering_tools import request_for
from terrazzo.lowering import compile_request
before = dict(os.environ)
compile_request(request_for("scale"))
print([name for name in ("PYTHONPATH", "TVM_LIBRARY_PATH") if os.environ.get(name) != before.get(name)])
import programs, tilelang
from tvm.target import Target
target = Target({"kind": "cuda", "arch": "sm_80"})
kernel = tilelang.compile(programs.scale(None), target=target, execution_backend="tvm_ffi")
print("main_kernel" in kernel.get_kernel_source())
"""
    done = run_python(code, TERRAZZO_CACHE_DIR=str(cache_dir), TILELANG_CACHE_DIR=str(cache_dir / "tilelang"))
    assert done.stdout.split()[0] == "[]" and done.stdout.split()[-1] == "True", done.stderr


def test_a_folder_that_cannot_be_written_is_not_the_compilers_fault(tmp_path, monkeypatch):
    module = SimpleNamespace(functions={}, inspect_source=str)
    artifact = SimpleNamespace(kernel_source="", device_mod=module, rt_mod=module)
    nothing = lambda *_: None
    stubs = {"import_tilelang": nothing, "_install_callback": nothing, "_lower": lambda *_: artifact}
    for name, value in {**stubs, "compile_host": nothing, "link_host": nothing, "make_report": nothing}.items():
        monkeypatch.setattr(compiler, name, value)
    with pytest.raises(FileNotFoundError):
        compiler.compile_into(request_for("scale"), tmp_path / "gone")


def test_a_kernel_needs_nothing_of_the_cpp_library(compiled):
    """Where only the static one is installed, each kernel would hold 65 KB of it."""
    text = (compiled(request_for("scale")) / "kernel.so").read_bytes()
    assert not [name for name in (b"libstdc++", b"__cxa_guard", b"__cxa_throw", b"__cxxabiv1") if name in text]


NAMES = ["$(touch ran)", "`touch ran`", 'a "quoted" name', "it's", "back\\slash", "a line\nbreak", "; touch ran"]
NAMES += [os.fsdecode(b"\xff\xfe")]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_of_folders_never_reach_a_shell(tmp_path, monkeypatch, name):
    """nvcc puts every path that it knows into commands for a shell: it is told none of ours."""
    from terrazzo.lowering import report

    place = tmp_path / name
    place.mkdir()
    seen = []

    def tool(command, folder, **_):
        seen.append([*map(str, command), str(folder)])
        for made in (compiler.BINARY, compiler.LIBRARY):
            (folder / made).write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(place)
    module = SimpleNamespace(functions={}, inspect_source=str)
    artifact = SimpleNamespace(kernel_source="", device_mod=module, rt_mod=module)

    def lower(*_):
        compiler._current.get()("", {})
        return artifact

    monkeypatch.setattr(compiler, "_lower", lower)
    for home in (compiler, launcher, report):
        monkeypatch.setattr(home, "run_tool", tool)
    compiler.compile_into(request_for("scale"), place)
    assert len(seen) >= 2 and (place / "kernel.so").is_file()
    assert not [word for command in seen for word in command if name in word or str(tmp_path) in word]


@pytest.mark.slow
def test_a_kernel_compiles_below_a_folder_with_a_strange_name(tmp_path, monkeypatch):
    place = tmp_path / 'a "$(touch ran)" `touch ran`\n\\'
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(place / "cache"))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert (compile_request(request_for("scale")) / "kernel.so").is_file()
    assert not list(tmp_path.rglob("ran"))


def machine_code(folder: Path) -> str:
    """SASS without addresses and encodings."""
    command = [find_cuda_tool("cuobjdump"), "-sass", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.sub(r"/\*[0-9a-fx]+\*/|Fatbin.*|=+|host = .*|compile_size = .*", "", said)


@needs_disassembler
@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
def test_slim_headers_leave_the_machine_code_as_it_is(compiled, tmp_path, monkeypatch, target):
    """A kernel for which they are not enough is compiled with the headers themselves."""
    request = request_for("gemm", target)
    slim = compiled(request)

    def useless(code: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "cuda_fp16.h").write_text("#error nothing here\n")

    monkeypatch.setattr(compiler, "write_slim_headers", useless)
    compiler.compile_into(request, tmp_path)
    assert "MMA" in machine_code(slim) and machine_code(slim) == machine_code(tmp_path)
