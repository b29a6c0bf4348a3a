"""Entries and bundles whose code is a few bytes: what guards native code is the same for code that cannot run."""

import json
import os
from pathlib import Path

import pytest
from lowering_tools import request_for
from terrazzo.lowering import KernelReport, cache, folders, kernels, write_bundle
from terrazzo.lowering.compilers import toolchain

REPORT = KernelReport(40, 0, 1024, 0, 0, 0, {"HMMA.16816.F32": 8}, ["HMMA.16816.F32"])
SCALE, GEMM = request_for("scale"), request_for("gemm")
OTHER = 12345  # a user of no rights here

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def key_of(request):
    return request.cache_key(toolchain())


def find(request):
    """What a launch finds in the cache."""
    return kernels.find_compiled(request)


def fake_entry(request) -> Path:
    """An entry of the current cache; its code names the request."""

    def build(folder):
        (folder / "kernel.so").write_text(str(request))
        (folder / "kernel.cu").write_text("// text")
        (folder / "report.json").write_text(json.dumps(REPORT.as_dict()))

    return cache.get_or_build(key_of(request), kernels._meta(request, toolchain()), build)


def fake_bundle(path, *requests) -> Path:
    for request in requests:
        fake_entry(request)
    return write_bundle(path, requests, {"w4a16_wgmma": "identity-1"})


def manifest_of(folder) -> dict:
    return json.loads((folder / folders.MANIFEST).read_text())


def write_manifest_of(folder, manifest) -> None:
    (folder / folders.MANIFEST).write_text(json.dumps(manifest))


def rehash(folder, top=None) -> None:
    """Let the manifest of `top` (default: the folder itself) have the sha256 of what lies in a folder now."""
    top = top or folder
    manifest = manifest_of(top)
    for name in manifest["files"]:
        manifest["files"][name] = folders.sha256((top / name).read_bytes())
    write_manifest_of(top, manifest)


def swap(left: Path, right: Path) -> None:
    left.rename(left.with_name("between"))
    right.rename(left)
    left.with_name("between").rename(right)
