"""Writes wheels of ready kernels, which `wheels.py` finds where they are installed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from terrazzo.lowering import folders
from terrazzo.lowering.bundle import fill
from terrazzo.lowering.errors import ArgumentError, BundleError
from terrazzo.lowering.request import KernelRequest, check_requests
from terrazzo.lowering.sources import digests_of
from terrazzo.lowering.toolchain import package_version
from terrazzo.lowering.wheels import FILES, FORMAT, GROUP, REQUESTS

_EPOCH = (1980, 1, 1, 0, 0, 0)  # of members of the archive: equal kernels make an equal wheel


def distribution(arch: str) -> str:
    """Name of the distribution with kernels of an architecture: sm_90a -> terrazzo-kernels-sm90."""
    return f"terrazzo-kernels-{arch.replace('_', '').rstrip('a')}"


def write_wheel(
    folder: str | os.PathLike[str], requests: Sequence[KernelRequest], layouts: Mapping[str, str] | None = None
) -> Path:
    """Write a wheel of kernels, compiling those that are not in the cache (`compile_many` before is faster).

    Args:
        folder: where the file goes; an older one of the same name is replaced.
        requests: kernels of one target. layouts: name -> identity of the packed layouts that they read.

    Returns:
        The file, "terrazzo_kernels_sm90-0.1.0-py3-none-linux_x86_64.whl".

    Raises:
        ArgumentError: no request, something that is none, or requests for different targets.
        BundleError: the file cannot be written, or this terrazzo is not installed and has no version.
        ToolchainError, CompileError, CacheError: see `compile_request`.
    """
    requests, folder = check_requests(requests), Path(folder).absolute()
    targets = sorted({request.target.arch for request in requests})
    if len(targets) != 1:
        constraint = "a wheel holds kernels of exactly one target"
        raise ArgumentError("requests", targets, constraint, "write one wheel for each target")
    version = package_version("terrazzo")
    if version is None:
        raise BundleError(
            "a wheel of kernels needs terrazzo's version, and it is not installed; run `pip install -e .`"
        )
    name = distribution(targets[0])
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-linux_{os.uname().machine}.whl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(folder, re.escape(f".{path.name}"))
        with folders.private_folder(folder, f".{path.name}") as private:
            content = private / module
            content.mkdir()
            known = {request.identity(): request.as_dict() for request in requests}
            (content / REQUESTS).write_text(json.dumps(known), encoding="utf-8")
            modules = sorted({request.entry.partition(":")[0] for request in requests})
            more = {"kernels": list(known), "sources": digests_of(modules)}
            fill(content, targets[0], requests, dict(layouts or {}), FORMAT, FILES, more)
            (content / "__init__.py").write_text(
                f'"""Kernels of terrazzo {version} for {targets[0]}: data."""\n', encoding="utf-8"
            )
            info = private / f"{module}-{version}.dist-info"
            info.mkdir()
            for file, text in _metadata(name, module, version, targets[0]).items():
                (info / file).write_text(text, encoding="utf-8")
            _zip(private, info / "RECORD", path)
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error}; make room there or choose another folder") from error
    return path


def _metadata(name: str, module: str, version: str, arch: str) -> dict[str, str]:
    """The files of *.dist-info but for RECORD (packaging.python.org, binary distribution format)."""
    about = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Summary: Ready kernels for {arch}",
             "License: Apache-2.0", "Requires-Python: >=3.10", f"Requires-Dist: terrazzo (=={version})")  # fmt: skip
    wheel = ("Wheel-Version: 1.0", f"Generator: terrazzo {version}", "Root-Is-Purelib: false",
             f"Tag: py3-none-linux_{os.uname().machine}")  # fmt: skip
    points = (f"[{GROUP}]", f"{arch} = {module}")
    files = {"METADATA": about, "WHEEL": wheel, "entry_points.txt": points}
    return {file: "\n".join(lines) + "\n" for file, lines in files.items()}


def _zip(private: Path, record: Path, path: Path) -> None:
    """All files below `private` and their RECORD as the archive `path`, which is there as a whole or not."""
    inside = sorted(file for file in private.rglob("*") if file.is_file() and file.name != folders.LOCK)
    lines, out = [], private / path.name
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(member: str, data: bytes) -> None:
            entry = zipfile.ZipInfo(member, _EPOCH)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        for file in inside:
            member, data = file.relative_to(private).as_posix(), file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{member},sha256={digest},{len(data)}")
            add(member, data)
        own = record.relative_to(private).as_posix()
        add(own, "\n".join([*lines, f"{own},,", ""]).encode())
    out.chmod(0o644)
    folders.flush(out)
    os.replace(out, path)
