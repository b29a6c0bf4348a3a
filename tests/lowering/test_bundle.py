"""Bundles: what a process without a compiler can trust, and what it refuses by name."""

import errno
import json
import os
import platform
import shutil

import pytest
from lowering_tools import needs_compiler, request_for, run_python
from terrazzo.lowering import Kernel, Target, folders, kernels, load_bundle, sources, write_bundle
from terrazzo.lowering.errors import ArgumentError, BundleError, CacheError
from terrazzo.lowering.toolchain import package_version

pytestmark = [needs_compiler, pytest.mark.compiles]
LAYOUTS = {"w4a16_wgmma": "identity-1"}
REQUESTS = [("scale", {}), ("gemm", {})]


@pytest.fixture(scope="session")
def original(tmp_path_factory, shared_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERRAZZO_CACHE_DIR", str(shared_cache))
        return write_bundle(
            tmp_path_factory.mktemp("bundles") / "original", [request_for(name, **p) for name, p in REQUESTS], LAYOUTS
        )


@pytest.fixture
def bundle(original, tmp_path, monkeypatch):
    """A copy to damage, in a process state that has no kernels yet and an empty cache."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "empty"))
    return shutil.copytree(original, tmp_path / "bundle")


def edit_manifest(bundle, **changes):
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_kernels_come_from_the_bundle(bundle, tmp_path):
    request = request_for("gemm")
    assert not kernels.is_ready(request)
    loaded = load_bundle(bundle, "sm_80", LAYOUTS)
    assert (
        loaded.target == Target.parse("sm_80")
        and loaded.layouts == LAYOUTS
        and set(loaded.requests) == {request_for("scale"), request}
    )
    assert loaded.reports[request].registers > 0
    assert kernels.is_ready(request) and kernels.get_kernel(request).folder.parent == bundle / "kernels"
    assert not (tmp_path / "empty").exists()


def test_a_relative_bundle_and_its_reports_survive_a_chdir(bundle, monkeypatch):
    monkeypatch.chdir(bundle.parent)
    assert load_bundle("bundle").path == bundle
    monkeypatch.chdir("/")
    kernel = kernels.get_kernel(request_for("scale"))
    assert kernel.report.registers > 0 and "main_kernel" in kernel.source


def test_a_kernel_that_cannot_be_loaded_is_named(bundle, tmp_path):
    library = bundle / "kernels" / request_for("scale").identity() / "kernel.so"
    library.write_bytes(b"of another machine")
    folders.mark_library(library, request_for("scale").identity())
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    edit_manifest(bundle, files={**files, library.relative_to(bundle).as_posix(): folders.sha256(library.read_bytes())})
    load_bundle(bundle)
    with pytest.raises(BundleError, match=f"{library}, kernel test.scale.*cannot be loaded here: .*; make the bundle"):
        kernels.get_kernel(request_for("scale"))
    with pytest.raises(CacheError, match=f"cannot be loaded here: .*; remove {tmp_path}, and the kernel is compiled"):
        Kernel("absent", tmp_path)


def test_a_process_without_tilelang_tvm_or_compiler_runs_it(bundle, tmp_path):
    code = f"""
import sys
class OnlyTorchAndTvmFfi:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tilelang", "tvm", "filelock"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, OnlyTorchAndTvmFfi())
import torch
from lowering_tools import request_for
from terrazzo.lowering import get_kernel, load_bundle
from terrazzo.lowering.errors import ArgumentError, ToolchainError
load_bundle({str(bundle)!r})
kernel = get_kernel(request_for("scale"))
try:
    kernel(torch.zeros(4, 256), torch.zeros(4, 256), 1, 2.0)
except ArgumentError as error:
    print("refused:", error.constraint)
print("loaded", sorted(name for name in ("tilelang", "tvm") if name in sys.modules))
try:
    get_kernel(request_for("scale", n=64))
except ToolchainError as error:
    print(error)
"""
    done = run_python(code, PATH="/nowhere", CUDA_HOME="/nowhere", TERRAZZO_CACHE_DIR=str(tmp_path / "none"))
    lines = done.stdout.splitlines()
    assert lines and lines[0].startswith("refused:") and "expected cuda" in lines[0], done.stderr
    assert lines[1] == "loaded []" and "nvcc" in lines[2] and "bundle" in lines[2]


@pytest.mark.skipif(package_version("apache-tvm") is None, reason="apache-tvm is not installed")
def test_apache_tvms_runtime_launches_its_kernels(bundle, drive):
    """As far as a CPU goes: the host code checks tensors of TVM, and hands a driver that only takes notes machine code
    and the arguments that it gets without TVM, too."""
    folder = bundle / "kernels" / request_for("scale").identity()
    calls = """
x, y = (tensor(at, (7, 256), 32) for at in (0x1000, 0x2000))
launch(x, y, 5, 1.5)
"""
    refused = """
import numpy, tvm
assert "tilelang" not in tvm.__file__
launch = tvm.runtime.load_module(str(Path(FOLDER) / "kernel.so"))["main"]
on_cpu = tvm.runtime.tensor(numpy.zeros((7, 256), "float32"))
for first, said in (on_cpu, "device_type"), (tensor(0x1000, (7, 128), 32), "shape[1]"):
    try:
        launch(first, tensor(0x2000, (7, 256), 32), 5, 1.5)
        raise AssertionError(said)
    except RuntimeError as error:
        assert said in str(error), error
"""
    apart = drive(folder, "ppfi", calls)
    together = drive(folder, "ppfi", refused + calls, before="import tvm.runtime")
    assert [note["call"] for note in apart] == ["load", "function", "launch"] and apart[0]["elf"] == 1
    assert together == apart, together


@pytest.mark.skipif(package_version("apache-tvm") is None, reason="apache-tvm is not installed")
def test_a_process_that_has_imported_apache_tvm_finds_them(bundle):
    code = f"""
import tvm
from lowering_tools import request_for
from terrazzo.lowering import get_kernel, load_bundle
load_bundle({str(bundle)!r})
print(get_kernel(request_for("scale")), "tilelang" in tvm.__file__)
"""
    done = run_python(code)
    assert done.stdout.strip() == "Kernel('test.scale() for sm_80', cold) False", done.stderr


def test_tilelang_does_not_load_after_apache_tvm():
    """Why the library keeps them apart. If this passes one day, docs/tile-programs.md says too much."""
    if package_version("apache-tvm") is None:
        pytest.skip("apache-tvm is not installed")
    done = run_python("import tvm\nimport tilelang", PYTHONPATH="", TVM_LIBRARY_PATH="")
    assert done.returncode and "undefined symbol" in done.stderr, done.stderr[-500:]


def test_tampering_is_found(bundle):
    victim = next(bundle.glob("kernels/*/kernel.so"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(BundleError, match=r"kernel\.so has sha256"):
        load_bundle(bundle)


def test_missing_parts_are_found(bundle):
    next(bundle.glob("kernels/*/report.json")).unlink()
    with pytest.raises(BundleError, match=r"report\.json cannot be read"):
        load_bundle(bundle)
    (bundle / "manifest.json").unlink()
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read"):
        load_bundle(bundle)
    shutil.rmtree(bundle)
    with pytest.raises(BundleError, match=r"cannot be opened: No such file or directory"):
        load_bundle(bundle)


def kernel_of(bundle, **changes):
    """The manifest's kernels, the first of them changed."""
    first, *others = json.loads((bundle / "manifest.json").read_text())["kernels"]
    return [{**first, **changes}, *others]


@pytest.mark.parametrize("damage", [lambda so: so.unlink(), lambda so: so.write_bytes(b"garbage")])
def test_files_that_the_manifest_leaves_out_are_not_trusted(bundle, damage):
    damage(next(bundle.glob("kernels/*/kernel.so")))
    edit_manifest(bundle, files={})
    with pytest.raises(BundleError, match=r"has no sha256 of kernels/\w{64}/kernel\.so"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(
            (name, value, f"has no {name}")
            for name in ("target", "driver", "layouts", "kernels")
            for value in (None, 5)
        ),
        ("target", "sm_1", "is not supported"),
        ("kernels", [5], "without identity or request"),
        ("kernels", {"identity": 5}, "without identity or request"),
        ("kernels", {"identity": "zz"}, "no sha256 of kernels/zz/kernel.so"),
        ("kernels", {"request": 5}, "is no kernel request"),
        ("kernels", {"request": {"name": "a"}}, "is no kernel request"),
        ("terrazzo", None, "made with terrazzo None"),
        ("machine", None, "made with machine None"),
        ("files", {"a": 5}, "is damaged"),
    ],
)
def test_what_a_manifest_lacks_is_named(bundle, name, value, words):
    edit_manifest(bundle, **{name: kernel_of(bundle, **value) if name == "kernels" and type(value) is dict else value})
    with pytest.raises(BundleError, match=words):
        load_bundle(bundle)


def test_a_manifest_of_nothing_is_refused(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in ("terrazzo", "machine", "target", "driver", "layouts", "kernels"):
        (bundle / "manifest.json").write_text(json.dumps({key: manifest[key] for key in manifest if key != name}))
        with pytest.raises(BundleError, match=name):
            load_bundle(bundle)


def test_a_report_that_is_none_is_refused(bundle):
    report = next(bundle.glob("kernels/*/report.json"))
    report.write_text('{"registers": 1}')
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    edit_manifest(bundle, files={**files, report.relative_to(bundle).as_posix(): folders.sha256(report.read_bytes())})
    with pytest.raises(BundleError, match=r"report\.json is no report"):
        load_bundle(bundle)


def test_bundles_have_no_hash(bundle):
    with pytest.raises(TypeError, match="unhashable type: 'Bundle'"):
        hash(load_bundle(bundle))


@pytest.mark.parametrize("path", [None, 5, b"/tmp"])
def test_a_bundle_is_named_by_its_path(path):
    with pytest.raises(ArgumentError, match="must be the path of a folder"):
        load_bundle(path)
    with pytest.raises(ArgumentError, match="must be the path of a folder"):
        write_bundle(path, [request_for("scale")])


def test_layouts_are_names(bundle, tmp_path):
    for layouts in (5, {"w4a16_wgmma": 5}):
        with pytest.raises(ArgumentError, match="must map names to identities"):
            load_bundle(bundle, layouts=layouts)
        with pytest.raises(ArgumentError, match="must map names to identities"):
            write_bundle(tmp_path / "new", [request_for("scale")], layouts)


@pytest.mark.parametrize("path", ["/proc/zz", "/dev/null/x"])
def test_a_place_that_cannot_be_written_is_named_as_it_was_given(path):
    with pytest.raises(BundleError, match=f"{path} cannot be written"):
        write_bundle(path, [request_for("scale")])


def test_another_target_is_refused_by_name(bundle):
    with pytest.raises(BundleError, match=r"is for sm_80, wanted is sm_90a \(NVIDIA H200\)"):
        load_bundle(bundle, "sm_90a")


def test_the_current_device_counts(bundle, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Target, "detect", staticmethod(lambda: Target.parse("sm_89")))
    with pytest.raises(BundleError, match="wanted is sm_89"):
        load_bundle(bundle)


def test_another_version_is_refused_by_name(bundle):
    edit_manifest(bundle, terrazzo="0.0.9")
    with pytest.raises(BundleError, match=r"made with terrazzo 0\.0\.9, this is"):
        load_bundle(bundle)
    edit_manifest(bundle, terrazzo=package_version("terrazzo"), machine="ppc64")
    with pytest.raises(BundleError, match=f"made with machine ppc64, this is {platform.machine()}"):
        load_bundle(bundle)
    edit_manifest(bundle, format="terrazzo-bundle-9")
    with pytest.raises(BundleError, match="terrazzo-bundle-9"):
        load_bundle(bundle)


def test_only_kernels_of_other_sources_are_refused(bundle, monkeypatch):
    """Sources count for the kernels that are built from them, whatever else of terrazzo differs."""
    for module in sorted(sources.closure({"terrazzo.lowering.compiler"})):
        with monkeypatch.context() as patch:
            forget(patch)
            patch.setattr(
                sources,
                "_read",
                lambda name, changed=module, read=sources._read: (
                    ("other", read(name)[1]) if name == changed else read(name)
                ),
            )
            with pytest.raises(BundleError, match=r"made from other terrazzo sources: .* builds test\.(scale|gemm)\("):
                load_bundle(bundle)
    with monkeypatch.context() as patch:
        forget(patch)
        patch.setattr(
            sources,
            "_read",
            lambda name, read=sources._read: (
                ("other", read(name)[1]) if name.startswith("terrazzo.ops.") else read(name)
            ),
        )
        assert len(load_bundle(bundle).requests) == len(REQUESTS)


def forget(patch):
    """Digests are taken again, and those taken here are forgotten."""
    patch.setattr("terrazzo.lowering.request.source_digest", sources.source_digest.__wrapped__)


def test_a_builder_that_is_not_installed_is_named(bundle, monkeypatch):
    manifest = json.loads((bundle / "manifest.json").read_text())
    for kernel in manifest["kernels"]:
        kernel["request"]["entry"] = "of_somebody_else:build"
    edit_manifest(bundle, kernels=manifest["kernels"])
    with pytest.raises(BundleError, match=r"builder is not installed here: entry = 'of_somebody_else'"):
        load_bundle(bundle)


def test_another_layout_is_refused_by_name(bundle):
    with pytest.raises(BundleError, match="layout w4a16_wgmma = identity-1, this installation packs identity-2"):
        load_bundle(bundle, layouts={"w4a16_wgmma": "identity-2", "other": "x"})


def test_a_bundle_appears_complete_or_not_at_all(original, compiled, tmp_path):
    with pytest.raises(BundleError, match="exists already"):
        write_bundle(original, [request_for("scale")])
    before = json.loads((original / "manifest.json").read_text())
    replaced = shutil.copytree(original, tmp_path / "bundle")
    write_bundle(replaced, [request_for("scale")], replace=True)
    assert len(load_bundle(replaced).requests) == 1 and json.loads((original / "manifest.json").read_text()) == before
    (tmp_path / "mine").mkdir()
    with pytest.raises(BundleError, match="exists already"):
        write_bundle(tmp_path / "mine", [request_for("scale")], replace=True)
    with pytest.raises(Exception, match="cannot be loaded"):
        write_bundle(tmp_path / "never", [request_for("scale"), request_for("absent")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "mine"]


def test_a_replacement_that_fails_leaves_the_bundle(bundle, compiled, monkeypatch):
    rename = os.rename

    def refuse(source, place):
        if place == bundle and source.name != "bundle":  # the new one; the old one may come back
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, place)

    monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(BundleError, match=f"{bundle} cannot be written: .*Input/output error"):
        write_bundle(bundle, [request_for("scale")], replace=True)
    assert len(load_bundle(bundle).requests) == 2
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_full_disk_is_a_clear_error(compiled, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders, "flush", full)
    with pytest.raises(BundleError, match=f"{tmp_path / 'bundle'} cannot be written: .*No space left"):
        write_bundle(tmp_path / "bundle", [request_for("scale")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("requests", [None, 5, ["x"]])
def test_what_is_no_request_is_refused(tmp_path, requests):
    with pytest.raises(ArgumentError, match="must be a KernelRequest"):
        write_bundle(tmp_path / "bundle", requests)


@pytest.mark.parametrize("requests", [[], [request_for("scale"), request_for("scale", "sm_90a")]])
def test_a_bundle_has_one_target(tmp_path, requests):
    with pytest.raises(ArgumentError, match="exactly one target"):
        write_bundle(tmp_path / "bundle", requests)
