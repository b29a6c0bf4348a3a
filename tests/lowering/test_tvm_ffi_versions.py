"""Kernels made beside one tvm-ffi launch beside every other one that an engine may bring."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from lowering_tools import HERE, needs_compiler, request_for
from terrazzo.lowering import compile_request, compilers, write_bundle
from terrazzo.lowering.errors import ToolchainError
from terrazzo.lowering.toolchain import COMPILES_WITH, Toolchain, package_folder

pytestmark = [needs_compiler, pytest.mark.compiles]
# The lowest that terrazzo installs with, those that engines pin, and the newest.
VERSIONS = ("0.1.9", "0.1.10", "0.1.11", "0.1.12", "0.1.15.post2")
# What a kernel may ask of tvm-ffi: these C symbols are in all of the versions, with these signatures.
SYMBOLS = {"TVMFFIEnvGetStream", "TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts"}
# program, target, kinds of the driver's parameters, bits of an element, scalars of a launch
PROGRAMS = [("scale", "sm_80", "ppfi", 32, (5, 1.5)), ("tma_copy", "sm_90a", "tt", 16, ())]


@pytest.mark.parametrize(("program", "target"), [("scale", "sm_80"), ("tma_copy", "sm_90a")])
def test_a_kernel_asks_tvm_ffi_for_its_stable_c_symbols_only(compiled, program, target):
    library = compiled(request_for(program, target)) / "kernel.so"
    said = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[-1].partition("@")[0] for line in said.splitlines()}
    assert {name for name in needed if "TVM" in name or "tvm" in name} <= SYMBOLS
    assert not {name for name in needed if name.startswith("cu")}  # the driver is looked for at the first launch


@pytest.fixture(scope="session")
def tvm_ffi_of(tmp_path_factory):
    """Function that installs one version of tvm-ffi into a folder of its own, once, and returns the folder."""
    made: dict[str, Path] = {}

    def install(version: str) -> Path:
        if version not in made:
            folder = tmp_path_factory.mktemp(f"tvm-ffi-{version}")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--target",
            ]
            command += [str(folder), f"apache-tvm-ffi=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"apache-tvm-ffi {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            made[version] = folder
        return made[version]

    return install


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the engine's import", "ours"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_bundle_loads_and_launches_beside_each_tvm_ffi(compiled, drive, tvm_ffi_of, tmp_path, version, first):
    """Launches go to a driver that takes notes; an engine in the process imports tvm-ffi before terrazzo or after."""
    before = "import tvm_ffi" if first == "the engine's import" else "import terrazzo.lowering"
    for program, target, kinds, bits, scalars in PROGRAMS:
        request = request_for(program, target)
        bundle = write_bundle(tmp_path / program, [request])
        code = f"""
import torch
from lowering_tools import request_for
from terrazzo.lowering import get_kernel, load_bundle
load_bundle({str(bundle)!r}, {target!r})
launch = get_kernel(request_for({program!r}, {target!r}))._function
assert tvm_ffi.__version__ == {version!r}, tvm_ffi.__version__
with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0x77):
    launch(tensor(0x10000, (128, 256), {bits}), tensor(0x20000, (128, 256), {bits}), *{scalars})
try:
    launch(torch.zeros(128, 256), torch.zeros(128, 256), *{scalars})
    raise AssertionError("tensors of the CPU were taken")
except RuntimeError as error:
    assert "main input" in str(error), error
"""
        notes = drive(bundle / "kernels" / request.identity(), kinds, code, before, tvm_ffi_of(version))
        assert isinstance(notes, list), notes.stderr
        assert notes[-1]["call"] == "launch" and notes[-1]["stream"] == 0x77, notes
        assert {0x10000, 0x20000} <= set(notes[-1]["params"])


@pytest.fixture
def slimmed(tmp_path, monkeypatch) -> Path:
    """A folder, first on the path, with a tvm-ffi that runs and has no headers."""
    monkeypatch.delitem(sys.modules, "tvm_ffi", raising=False)  # what is imported is found where it was
    real, slim = package_folder("tvm_ffi"), tmp_path / "slim" / "tvm_ffi"
    slim.mkdir(parents=True)
    for part in real.iterdir():
        if part.name != "include":
            (slim / part.name).symlink_to(part)
    monkeypatch.syspath_prepend(slim.parent)
    return slim.parent


def headers(package: Path, version: str) -> None:
    """Headers of tvm-ffi that say nothing but their release."""
    folder = package / "include"
    (folder / "dlpack").mkdir(parents=True)
    (folder / "tvm" / "ffi").mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    lines = [f"#define TVM_FFI_VERSION_{part} {number}" for part, number in numbers]
    (folder / "tvm" / "ffi" / "c_api.h").write_text("\n".join(lines))


def test_a_tvm_ffi_without_headers_leaves_them_to_one_behind_it(cache_dir, slimmed):
    """An engine's environment is often slimmed; its packages stand first on the path."""
    assert package_folder("tvm_ffi") == slimmed / "tvm_ffi"
    assert compilers.header_entry() not in (None, "", str(slimmed)) and not compilers.compiler().missing
    assert (compile_request(request_for("scale")) / "kernel.so").is_file()


def test_a_worker_takes_nothing_but_tvm_ffi_from_behind(cache_dir, slimmed, tmp_path, monkeypatch):
    """The complete one may lie in another environment, whose other packages are of other versions."""
    behind = tmp_path / "behind"
    behind.mkdir()
    real = [entry for entry in sys.path if Path(entry, "tvm_ffi", "include").is_dir()]
    (behind / "tvm_ffi").symlink_to(Path(real[0], "tvm_ffi"))
    for name in ("terrazzo", "torch", "tilelang"):
        (behind / f"{name}.py").write_text(f"raise ImportError('not this {name}')")
    monkeypatch.setattr(compilers, "header_entry", lambda: str(behind))
    request = request_for("scale")
    assert compile_request(request).name == request.cache_key(compilers.toolchain())


@pytest.mark.parametrize(("version", "fits"), [("0.1.12", True), ("0.1.12.post1", True), ("0.1.1", False)])
def test_headers_fit_every_version_of_their_release(tmp_path, version, fits):
    headers(tmp_path, "0.1.12")
    assert compilers._has_headers(tmp_path, version) == fits


@pytest.mark.parametrize("version", [None, "0.2.0"])
def test_headers_that_are_nowhere_are_named_as_missing(slimmed, tmp_path, monkeypatch, version):
    """Or only those of another release than the one that is imported."""
    if version is not None:
        headers(tmp_path / "other" / "tvm_ffi", version)
    real = [entry for entry in sys.path if Path(entry, "tvm_ffi", "include").is_dir()]
    monkeypatch.setattr(sys, "path", [*(e for e in sys.path if e not in real), str(tmp_path / "other")])
    monkeypatch.setattr(compilers.local, "toolchain", lambda: Toolchain("0.1.15", "0.1.12", "13.0", "13.0"))
    assert compilers.header_entry() is None
    with pytest.raises(ToolchainError, match=r"the headers of apache-tvm-ffi missing; .*load a bundle"):
        compilers.compiler().require("a kernel")


def test_the_versions_that_compile_are_those_of_the_packages():
    """COMPILES_WITH repeats what pyproject.toml asks of tilelang, and tilelang of tvm-ffi."""
    needs = importlib.metadata.requires("tilelang")
    (need,) = (need for need in needs if need.startswith("apache-tvm-ffi"))
    lowest, below = (".".join(map(str, bound)) for bound in COMPILES_WITH["apache-tvm-ffi"])
    assert f">={lowest}" in need and f"<{below}" in need
    lowest, below = (".".join(map(str, bound)) for bound in COMPILES_WITH["tilelang"])
    assert f'"tilelang[nvcc]>={lowest},<{below}"' in (HERE.parents[1] / "pyproject.toml").read_text()
