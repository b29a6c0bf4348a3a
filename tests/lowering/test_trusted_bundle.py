"""Whose code a bundle is, that it says what it is, and that a process which loaded it strictly compiles nothing."""

import os
import pwd
import re
import shutil
import stat
import sys

import pytest
from fake_kernels import (
    GEMM,
    OTHER,
    SCALE,
    fake_bundle,
    fake_entry,
    manifest_of,
    needs_root,
    rehash,
    swap,
    write_manifest_of,
)
from lowering_tools import needs_compiler, request_for, run_python
from terrazzo.lowering import cache, environment, folders, kernels, load_bundle, write_bundle
from terrazzo.lowering.errors import ArgumentError, BundleError, CacheError

LEVELS = ["", "manifest.json", "kernels", "kernels/*", "kernels/*/kernel.so", "kernels/*/report.json"]


@pytest.fixture
def bundle(cache_dir, tmp_path):
    return fake_bundle(tmp_path / "bundle", SCALE, GEMM)


def place_in(bundle, level):
    return next(bundle.glob(level)) if level else bundle


def load(bundle, **options):
    return load_bundle(bundle, "sm_80", **options)


def folder_of(bundle, request):
    return bundle / "kernels" / request.identity()


@needs_root
@pytest.mark.parametrize("level", LEVELS)
def test_another_users_bundle_is_refused_unless_its_owner_is_named(bundle, level):
    os.chown(place_in(bundle, level), OTHER, -1)
    said = rf"another user's code: .* belongs to user {OTHER}, neither .* root; .*chown -R root.*cp -r.*owner=\.\.\."
    with pytest.raises(BundleError, match=said):
        load(bundle)
    assert not kernels.is_ready(request_for("scale", n=8)) and not kernels._bundled
    assert len(load(bundle, owner=OTHER).requests) == 2
    with pytest.raises(BundleError, match=said):
        load(bundle, owner=OTHER + 1)


@needs_root
def test_an_owner_may_be_named_by_name(bundle):
    nobody = pwd.getpwnam("nobody")
    os.chown(bundle, nobody.pw_uid, -1)
    assert len(load(bundle, owner="nobody").requests) == 2


@pytest.mark.parametrize("owner", ["no such user", -1, 2**40, 1.5, True, b"root", ["root"]])
def test_an_owner_that_is_no_user_is_refused(bundle, owner):
    with pytest.raises(ArgumentError, match="owner = .*: must be a user's name or number"):
        load(bundle, owner=owner)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("level", LEVELS)
def test_a_bundle_that_others_may_write_is_refused(bundle, level, mode):
    place_in(bundle, level).chmod(mode)
    with pytest.raises(BundleError, match=rf"may be written by others, its mode is {mode:04o}; .*chmod -R go-w"):
        load(bundle)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_others_may_read_a_bundle_and_not_write_it(cache_dir, tmp_path, umask):
    before = os.umask(umask)
    try:
        bundle = fake_bundle(tmp_path / "bundle", SCALE)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode): path.is_dir() for path in (bundle, *bundle.rglob("*"))}
    assert modes == {0o755: True, 0o644: False} and not (bundle / ".lock").exists()


@pytest.mark.parametrize("level", LEVELS[1:])
def test_links_in_a_bundle_are_refused(bundle, tmp_path, level):
    place = place_in(bundle, level)
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    with pytest.raises(BundleError, match="is a link, or one is on the way to it, where a plain file must be"):
        load(bundle)


def test_a_link_to_a_bundle_is_a_bundle(bundle, tmp_path):
    (tmp_path / "current").symlink_to(bundle)
    assert len(load(tmp_path / "current").requests) == 2


@pytest.mark.parametrize("level", ["manifest.json", "kernels/*/kernel.so", "kernels/*/report.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a socket"])
def test_what_is_no_plain_file_is_not_opened(bundle, level, kind):
    place = place_in(bundle, level)
    place.unlink()
    if kind == "a folder":
        place.mkdir(0o755)
    elif kind == "a pipe":
        os.mkfifo(place)
    else:
        os.mknod(place, stat.S_IFSOCK | 0o644)
    with pytest.raises(BundleError, match=f"is {kind}"):
        load(bundle)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "kernels/../../secret", "kernels//x", "./x", "", ".", "..", "a\0b", "a\\..\\b"]
)
def test_paths_that_leave_the_bundle_are_refused(bundle, tmp_path, name):
    (tmp_path / "secret").write_text("x")
    manifest = manifest_of(bundle)
    manifest["files"][name] = folders.sha256(b"x")
    write_manifest_of(bundle, manifest)
    with pytest.raises(BundleError, match="is no path inside the folder"):
        load(bundle)


def test_no_handle_of_a_folder_on_the_way_stays_open(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    with folders.Folder(tmp_path) as folder:
        before = os.listdir("/proc/self/fd")
        assert folder.read("a/b/file") == b"x"
        with pytest.raises(ValueError, match="cannot be read"):
            folder.read("a/b/other")
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["../bundle/kernels/x", "..", "x/../../y"])
def test_kernels_lie_inside_the_bundle(bundle, name):
    manifest = manifest_of(bundle)
    kernel = manifest["kernels"][0]
    for file in folders.FILES:
        old = f"kernels/{kernel['identity']}/{file}"
        manifest["files"][f"kernels/{name}/{file}"] = manifest["files"].pop(old)
    kernel["identity"] = name
    write_manifest_of(bundle, manifest)
    with pytest.raises(BundleError, match="is no path inside the folder"):
        load(bundle)


def test_sizes_are_bounded(bundle):
    os.truncate(next(bundle.glob("kernels/*/kernel.cu")), folders.FILE_BYTES + 1)
    with pytest.raises(BundleError, match=r"kernel\.cu is longer than"):
        load(bundle)
    os.truncate(bundle / "manifest.json", folders.MANIFEST_BYTES + 1)
    with pytest.raises(BundleError, match=r"manifest\.json is longer than"):
        load(bundle)


@pytest.mark.parametrize("what", ["folders", "code", "requests", "identities"])
def test_kernels_in_each_others_place_are_found_out(bundle, what):
    """With sha256 that match, as if the bundle had been written so."""
    left, right = folder_of(bundle, SCALE), folder_of(bundle, GEMM)
    manifest = manifest_of(bundle)
    if what == "folders":
        swap(left, right)
    elif what == "code":
        swap(left / "kernel.so", right / "kernel.so")
    else:
        one, other = manifest["kernels"]
        field = {"requests": "request", "identities": "identity"}[what]
        one[field], other[field] = other[field], one[field]
        write_manifest_of(bundle, manifest)
    rehash(bundle)
    with pytest.raises(BundleError, match=r"by its own mark, wanted is|in the place of another of its kernels"):
        load(bundle)


def test_a_kernel_of_another_request_is_not_launched(bundle):
    """A request that the bundle's own manifest could not be compared with when it was loaded."""
    load(bundle)
    kernels._bundled[GEMM.identity()] = kernels._bundled[SCALE.identity()]
    for call in (kernels.get_kernel, kernels.is_ready, kernels.find_compiled):
        with pytest.raises(BundleError, match=rf"has kernel {re.escape(str(SCALE))} in the place of test\.gemm"):
            call(GEMM)


def test_a_builder_that_only_the_bundle_names_is_not_imported(bundle, tmp_path, monkeypatch):
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "stranger" / "inner.py").write_text("def build(target): ...")
    monkeypatch.syspath_prepend(tmp_path)
    manifest = manifest_of(bundle)
    manifest["kernels"][0]["request"]["entry"] = "stranger.inner:build"
    write_manifest_of(bundle, manifest)
    assert len(load(bundle).requests) == 2 and "stranger" not in sys.modules


def test_code_that_changed_since_it_was_loaded_is_not_run(bundle, tmp_path):
    load(bundle)
    library = folder_of(bundle, SCALE) / "kernel.so"
    library.write_bytes(library.read_bytes() + b"more")
    with pytest.raises(BundleError, match=rf"bundle {bundle} changed since it was loaded, kernel test\.scale.*load it"):
        kernels.get_kernel(SCALE)
    rehash(bundle)  # a manifest that agrees with it changes nothing
    with pytest.raises(BundleError, match="changed since it was loaded"):
        kernels.get_kernel(SCALE)
    library.unlink()
    with pytest.raises(BundleError, match="changed since it was loaded, kernel .*cannot be read"):
        kernels.get_kernel(SCALE)
    shutil.rmtree(bundle)
    with pytest.raises(BundleError, match="changed since it was loaded, kernel .*cannot be opened"):
        kernels.get_kernel(SCALE)


@needs_compiler
@pytest.mark.compiles
def test_a_bundle_that_is_cut_short_or_removed_ends_no_process(compiled, tmp_path):
    bundle = write_bundle(tmp_path / "bundle", [SCALE])
    code = f"""
import os, shutil, sys
import torch
from lowering_tools import request_for
from terrazzo.lowering import get_kernel, load_bundle
from terrazzo.lowering.errors import ArgumentError
load_bundle({str(bundle)!r}, strict=True)
kernel = get_kernel(request_for("scale"))
os.truncate(kernel.folder / "kernel.so", 0)
shutil.rmtree({str(bundle)!r})
try:
    kernel(torch.zeros(4, 256), torch.zeros(4, 256), 1, 2.0)
except ArgumentError as error:
    print("alive")
"""
    done = run_python(code, TERRAZZO_CACHE_DIR="/dev/null/none", HOME="/dev/null/none")
    assert done.returncode == 0 and done.stdout.split() == ["alive"], done.stderr


def test_a_strict_bundle_compiles_nothing_and_names_what_it_lacks(cache_dir, tmp_path, monkeypatch):
    bundle = fake_bundle(tmp_path / "bundle", SCALE)
    fake_entry(GEMM)
    assert kernels.is_ready(GEMM)
    load(bundle, strict=True)
    monkeypatch.setattr(kernels, "compile_request", lambda request, count: pytest.fail(f"compiles {request}"))
    said = rf"kernel {re.escape(str(GEMM))} is in no loaded bundle, and {bundle} was loaded with strict=True"
    with pytest.raises(BundleError, match=said):
        kernels.get_kernel(GEMM)
    assert kernels.is_ready(SCALE) and not kernels.is_ready(GEMM)
    assert kernels.find_compiled(GEMM) is not None  # `compile_many` and `write_bundle` go on
    load(fake_bundle(tmp_path / "second", GEMM))
    assert kernels.is_ready(GEMM)
    with pytest.raises(BundleError, match=f"and {bundle} was loaded with strict=True"):
        kernels.get_kernel(request_for("scale", n=8))
    kernels.forget_kernels()
    assert not kernels._strict


def test_a_bundle_that_is_refused_is_not_strict(bundle):
    with pytest.raises(BundleError, match="wanted is sm_90a"):
        load_bundle(bundle, "sm_90a", strict=True)
    assert not kernels._strict and not kernels._bundled


@pytest.mark.parametrize(
    ("toolkit", "ptx", "needed"),
    [
        ("13.0", False, "13.0"), ("13.2", False, "13.0"), ("13.2", True, "13.2"), ("12.8", False, "12.0"),
        ("12.8", True, "12.8"), ("11.8", True, "12.0"), ("unknown", False, "12.0"), (None, True, "12.0"),
    ],
)  # fmt: skip
def test_the_driver_that_a_toolkits_code_needs(toolkit, ptx, needed):
    assert environment.driver_needed(toolkit, ptx) == needed


def test_versions_are_compared_as_numbers():
    assert environment.is_older("12.8", "13.0") and environment.is_older("9.2", "12.0")
    assert environment.is_older("12.8", "12.10") and not environment.is_older("13.0", "13.0")


@pytest.mark.parametrize("seen", ["12.9", "13.0", "13.4", "14.0", None])
def test_an_older_driver_is_refused_with_both_versions(bundle, monkeypatch, seen):
    write_manifest_of(bundle, {**manifest_of(bundle), "driver": "13.0"})
    monkeypatch.setattr("terrazzo.lowering.bundle.driver_version", lambda: seen)
    if seen != "12.9":
        assert load(bundle).driver == "13.0"
        return
    with pytest.raises(BundleError, match=r"needs a driver for CUDA 13\.0 or newer, the driver here is for CUDA 12\.9"):
        load(bundle)


def test_a_bundle_says_the_driver_of_the_toolkit_that_made_it(bundle, tmp_path):
    toolkit = manifest_of(bundle)["toolchain"]["toolkit"]
    assert manifest_of(bundle)["driver"] == load(bundle).driver == environment.driver_needed(toolkit)
    ptx = fake_bundle(tmp_path / "ptx", SCALE, request_for("gemm", flags=("ptx=compute_80",)))
    assert load(ptx).driver == environment.driver_needed(toolkit, ptx=True)


@pytest.mark.parametrize("driver", [None, 13.0, "13", "a.b", "13.0.1", "13.0\n", "١٣.٠"])
def test_a_driver_that_is_no_version_is_refused(bundle, driver):
    write_manifest_of(bundle, {**manifest_of(bundle), "driver": driver})
    with pytest.raises(BundleError, match=r"manifest\.json has no driver"):
        load(bundle)


def test_saves_that_were_killed_are_swept_and_others_are_not(cache_dir, tmp_path):
    names = (".bundle.abcdefgh", ".bundle.old.abcdefgh", ".other.abcdefgh", ".bundle.abc", "bundle.abcdefgh")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    (tmp_path / ".bundle.01234567").symlink_to(tmp_path / ".other.abcdefgh")
    with folders.private_folder(tmp_path, ".bundle") as live, folders.private_folder(tmp_path, ".bundle.old") as other:
        fake_bundle(tmp_path / "bundle", SCALE)
        left = {path.name for path in tmp_path.iterdir()} - {"cache", "bundle"}
        assert left == {*names[2:], ".bundle.01234567", live.name, other.name}


def test_what_is_bundled_is_what_was_verified(cache_dir, tmp_path, monkeypatch):
    fake_entry(SCALE)
    find = kernels.compile_request

    def then_damaged(request):
        entry = find(request)
        (entry / "kernel.so").write_bytes(b"other")
        return entry

    monkeypatch.setattr("terrazzo.lowering.bundle.compile_request", then_damaged)
    with pytest.raises(CacheError, match="changed while it was read: kernel.so has sha256"):
        write_bundle(tmp_path / "bundle", [SCALE])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_old_bundles_are_refused_by_their_format(bundle):
    write_manifest_of(bundle, {**manifest_of(bundle), "format": "terrazzo-bundle-1"})
    with pytest.raises(BundleError, match=r"format 'terrazzo-bundle-1', expected 'terrazzo-bundle-2'; make it again"):
        load(bundle)


def test_a_cache_is_not_needed_to_load_a_bundle(bundle, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", "/dev/null/none")
    assert load(bundle).requests and kernels.is_ready(SCALE) and cache.cache_root().name == "none"
