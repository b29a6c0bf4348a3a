"""Wheels of ready kernels: found by entry point, never imported, compared before they run, refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
from fake_kernels import GEMM, SCALE, fake_entry, manifest_of, rehash, swap, write_manifest_of
from lowering_tools import needs_compiler, request_for, run_python
from terrazzo.cli import main
from terrazzo.lowering import folders, kernels, wheels
from terrazzo.lowering.errors import ArgumentError, BundleError, ToolchainError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import package_version
from terrazzo.lowering.wheel_file import distribution, write_wheel
from terrazzo.lowering.wheels import KernelWheelWarning

VERSION = package_version("terrazzo")
MODULE = "terrazzo_kernels_sm80"


def unpack(file: Path, site: Path) -> Path:
    """What installing it does; the folder of the kernels."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(site)
    return site / MODULE


@pytest.fixture
def file(cache_dir, tmp_path) -> Path:
    for request in (SCALE, GEMM):
        fake_entry(request)
    return write_wheel(tmp_path / "dist", [SCALE, GEMM], {"w4a16_wgmma": "identity-1"})


@pytest.fixture
def wheel(file, tmp_path, monkeypatch) -> Path:
    """The folder of an installed wheel, in a process that has not looked for any and whose cache is empty."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    kernels.forget_kernels()
    yield unpack(file, tmp_path / "site")
    kernels.forget_kernels()


def refusal(match: str) -> None:
    """A wheel is left out, once, with words that match; its kernels are not found."""
    kernels.forget_kernels()
    with pytest.warns(KernelWheelWarning, match=match):
        assert kernels.find_compiled(SCALE) is None
    assert [it for it in wheels.refusals() if "terrazzo-kernels-sm80" in it]


def test_its_name_says_the_architecture():
    assert [distribution(arch) for arch in ("sm_80", "sm_90a")] == ["terrazzo-kernels-sm80", "terrazzo-kernels-sm90"]


def test_the_file_is_a_wheel_of_this_version_that_needs_it(file):
    assert file.name.startswith(f"{MODULE}-{VERSION}-py3-none-linux_")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        info = f"{MODULE}-{VERSION}.dist-info"
        assert f"Requires-Dist: terrazzo (=={VERSION})" in archive.read(f"{info}/METADATA").decode()
        record = [line.split(",") for line in archive.read(f"{info}/RECORD").decode().splitlines()]
    assert sorted(name for name, *_ in record) == sorted(names)
    assert not [name for name in names if name.endswith("kernel.cu")] and len(names) == 2 * 2 + 7


def test_equal_kernels_make_an_equal_file(file, tmp_path):
    assert (
        write_wheel(tmp_path / "again", [SCALE, GEMM], {"w4a16_wgmma": "identity-1"}).read_bytes() == file.read_bytes()
    )


def test_what_killed_writers_left_is_removed(file):
    left = file.with_name(f".{file.name}.abcdefgh")
    left.mkdir()
    (left / ".lock").touch()
    (left / file.name).write_bytes(b"half")
    write_wheel(file.parent, [SCALE])
    assert list(file.parent.iterdir()) == [file]


FOREIGN = {
    "no UTF-8": b"[terrazzo.kernels]\n\xff = x\n",
    "no pair": b"[other]\nneither name nor value\n",
    "no entry": b"[other]\na = \n",
    "odd names": b"[terrazzo.kernels]\na = /etc\nb = ../..\nc = a b c\n = \nd = "
    + b"x" * 5000
    + b"\n\xc3\xa9 = \x00\n",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_packages_with_damaged_entry_points_are_left_out(wheel, kind, capsys):
    """One foreign package hides no kernel and fails no command."""
    info = wheel.parent / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(FOREIGN[kind])
    kernels.forget_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWheelWarning)
        assert kernels.find_compiled(SCALE).parent.parent == wheel
    assert main(["info"]) == 0 and "terrazzo-kernels-sm80" in capsys.readouterr().out
    assert set(wheels.installed().refused) <= {"foreign"}


def test_packages_with_odd_metadata_are_left_out(wheel):
    for name, text in {"nameless": b"Metadata-Version: 2.1\n", "bytes": b"\xff\xfe\x00"}.items():
        info = wheel.parent / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_bytes(text)
        (info / "entry_points.txt").write_text("[terrazzo.kernels]\nsm_80 = nowhere\n")
    kernels.forget_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWheelWarning)
        assert kernels.find_compiled(SCALE).parent.parent == wheel


def test_kernels_are_found_by_the_entry_point_and_nothing_is_imported(wheel):
    assert kernels.is_ready(SCALE) and kernels.find_compiled(GEMM).parent == wheel / "kernels"
    assert not kernels.is_ready(request_for("gemm", target="sm_86")) and MODULE not in sys.modules
    assert kernels._find_bundled(SCALE).code().startswith(str(SCALE).encode())


def test_the_command_line_names_wheels_and_why_one_is_left_out(wheel, capsys):
    rows = lambda: (main(["info", "--json"]), capsys.readouterr().out)[1]
    assert json.loads(rows())["wheels"] == [f"terrazzo-kernels-sm80 {VERSION}, 2 kernels for sm_80"]
    wheel.chmod(0o777)
    assert "chmod -R go-w" in json.loads(rows())["wheels"][0]


def test_pip_installs_it(file, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*command, str(tmp_path / "site"), str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = """
from terrazzo.lowering import wheels
found = wheels.installed()
print([(it.name, it.version, len(it.kernels)) for it in found.wheels], found.refused)
"""
    said = run_python(code, tmp_path / "site").stdout.strip()
    assert said == f"[('terrazzo-kernels-sm80', '{VERSION}', 2)] {{}}"


def test_a_wheel_for_another_version_is_refused_by_name_with_the_remedy(wheel):
    old = wheel.with_name(f"{MODULE}-0.0.7.dist-info")
    wheel.with_name(f"{MODULE}-{VERSION}.dist-info").rename(old)
    metadata = (old / "METADATA").read_text()
    (old / "METADATA").write_text(metadata.replace(f"Version: {VERSION}", "Version: 0.0.7"))
    refusal(f"terrazzo-kernels-sm80 0.0.7 .*of terrazzo 0.0.7, this is {VERSION}; .*terrazzo-kernels-sm80=={VERSION}")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    (
        ("machine", "vax", "its machine is vax, here it must be .*pip install --force-reinstall"),
        ("format", "terrazzo-wheel-0", "its format is terrazzo-wheel-0"),
        ("target", "sm_86", "its kernels are for sm_86, its name says sm_80"),
        ("kernels", 3, "is damaged: no .*pip install"),
        ("kernels", [{"identity": "0" * 64}], "is damaged: no .*pip install"),
        ("kernels", ["0" * 64], "has no sha256 of kernels/0000"),
        ("files", {}, "has no sha256 of requests.json"),
        ("driver", "new", "has no driver, but new"),
    ),
)
def test_a_manifest_of_something_else_is_refused(wheel, field, value, match):
    write_manifest_of(wheel, manifest_of(wheel) | {field: value})
    refusal(match)


def test_a_wheel_that_others_may_write_is_refused_with_the_remedy(wheel):
    wheel.chmod(0o777)
    refusal(f"others, its mode is 0777.*chmod -R go-w {wheel}")


def test_a_damaged_or_absent_manifest_is_refused(wheel):
    (wheel / folders.MANIFEST).write_text("{")
    refusal("is damaged: .*pip install --force-reinstall terrazzo-kernels-sm80")
    (wheel / folders.MANIFEST).unlink()
    refusal("cannot be read: No such file")


def test_an_older_driver_is_refused_with_both_versions(wheel, monkeypatch):
    monkeypatch.setattr(wheels, "driver_version", lambda: "11.8")
    refusal("needs a driver for CUDA 1.* the one here is for CUDA 11.8")


def library(wheel: Path, request) -> Path:
    return wheel / "kernels" / request.identity() / "kernel.so"


def test_code_that_is_not_what_the_manifest_says_does_not_run(wheel):
    at = library(wheel, SCALE)
    at.write_bytes(at.read_bytes().replace(b"scale", b"evil!", 1))
    with pytest.raises(
        BundleError, match="wheel terrazzo-kernels-sm80 .*kernel.so has sha256 .*pip install --force-re"
    ):
        kernels.get_kernel(SCALE)


def test_kernels_in_each_others_place_are_found_out(wheel):
    swap(library(wheel, SCALE), library(wheel, GEMM))
    rehash(wheel)
    with pytest.raises(BundleError, match=f"kernel {request_text(SCALE)}.*pip install"):
        kernels.get_kernel(SCALE)


def request_text(request) -> str:
    return str(request).replace("(", r"\(").replace(")", r"\)")


def test_requests_that_are_not_what_the_manifest_says_are_not_believed(wheel):
    at = wheel / wheels.REQUESTS
    at.write_text(at.read_text().replace("scale", "other"))
    assert kernels.is_ready(SCALE)  # which asks for none
    with pytest.warns(KernelWheelWarning, match="cannot say what it holds: .*requests.json has sha256 .*pip install"):
        assert kernels.find_compiled(request_for("gemm", target="sm_86")) is None


def test_a_wheel_of_other_sources_says_so_once(wheel):
    manifest = manifest_of(wheel)
    for there in list(manifest["kernels"]):
        other = "0" * 8 + there[8:]
        shutil.move(wheel / "kernels" / there, wheel / "kernels" / other)
        manifest = json.loads(json.dumps(manifest).replace(there, other))
        (wheel / wheels.REQUESTS).write_text((wheel / wheels.REQUESTS).read_text().replace(there, other))
    write_manifest_of(wheel, manifest)
    rehash(wheel)
    match = "made from other sources than this terrazzo's, .*test.scale.*left out"
    with pytest.warns(KernelWheelWarning, match=match) as said:
        assert kernels.find_compiled(SCALE) is None and kernels.find_compiled(GEMM) is None
    assert len(said) == 1


def test_without_a_compiler_the_error_says_why_the_wheel_was_left_out(wheel, monkeypatch):
    wheel.chmod(0o777)

    def none(request, count=True):
        raise ToolchainError("cannot compile: nvcc missing")

    monkeypatch.setattr(kernels, "compile_request", none)
    with pytest.warns(KernelWheelWarning), pytest.raises(ToolchainError, match="nvcc missing; .*chmod -R go-w"):
        kernels.get_kernel(SCALE)


def test_a_wheel_spares_the_parsing_of_sources(cache_dir, tmp_path):
    request = KernelRequest("norm", "terrazzo.ops.norm.program:build", {"k": 64}, "sm_80")
    fake_entry(request)
    unpack(write_wheel(tmp_path / "dist", [request]), tmp_path / "site")
    code = f"""
from terrazzo.lowering import kernels, sources
from terrazzo.lowering.request import KernelRequest
request = KernelRequest.from_dict({request.as_dict()!r})
assert kernels.find_compiled(request).parent.parent.name == {MODULE!r}
assert sources._read.cache_info().currsize == 0
"""
    ran = run_python(code, tmp_path / "site", TERRAZZO_CACHE_DIR=str(tmp_path / "empty"))
    assert ran.returncode == 0, ran.stderr


def test_a_wheel_holds_kernels_of_one_target(cache_dir, tmp_path):
    with pytest.raises(ArgumentError, match="a wheel holds kernels of exactly one target; write one wheel for each"):
        write_wheel(tmp_path, [SCALE, request_for("scale", target="sm_86")])


@needs_compiler
@pytest.mark.compiles
def test_an_environment_with_the_wheel_needs_no_compiler(shared_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(shared_cache))
    unpack(write_wheel(tmp_path / "dist", [request_for("scale"), request_for("gemm")]), tmp_path / "site")
    code = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tilelang", "tvm", "filelock"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Without())
import torch
from lowering_tools import request_for
from terrazzo.lowering import get_kernel
from terrazzo.lowering.errors import ArgumentError, ToolchainError
kernel = get_kernel(request_for("scale"))
print(kernel, kernel.report.registers > 0)
try:
    kernel(torch.zeros(4, 256), torch.zeros(4, 256), 1, 2.0)
except ArgumentError as error:
    print("refused:", error.constraint)
try:
    get_kernel(request_for("scale", n=64))
except ToolchainError as error:
    print(error)
"""
    nowhere = dict(PATH="/nowhere", CUDA_HOME="/nowhere", TERRAZZO_CACHE_DIR=str(tmp_path / "none"))
    done = run_python(code, tmp_path / "site", **nowhere)
    lines = done.stdout.splitlines()
    assert lines and lines[0] == "Kernel('test.scale() for sm_80', cold) True", done.stderr
    assert lines[1].startswith("refused:") and "expected cuda" in lines[1] and "nvcc" in lines[2]
