"""Bundles: folders of kernels compiled ahead of time, for processes that have torch and tvm-ffi but no compiler.

    <bundle>/manifest.json             versions, target, layout identities, kernels, sha256 of every file
    <bundle>/kernels/<identity>/       kernel.so, kernel.cu, report.json

A bundle holds kernels of one target. It is written beside its final place and renamed; loading verifies every byte and
refuses, by name, another target, another terrazzo, another machine, other layouts and kernels that this terrazzo would
build from other sources.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.lowering import cache
from terrazzo.lowering.errors import ArgumentError, BundleError, TargetError
from terrazzo.lowering.kernels import compile_request, register_bundled
from terrazzo.lowering.report import KernelReport
from terrazzo.lowering.request import KernelRequest, check_requests
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import package_version, toolchain

FORMAT = "terrazzo-bundle-1"


@dataclass(frozen=True)
class Bundle:
    """A verified bundle whose kernels `get_kernel` finds.

    Attributes:
        path: the folder.
        target: what its kernels run on.
        layouts: name -> identity of every packed layout that its kernels read.
        requests: the kernels.
        reports: request -> KernelReport.
    """

    path: Path
    target: Target
    layouts: Mapping[str, str]
    requests: tuple[KernelRequest, ...]
    reports: Mapping[KernelRequest, KernelReport]
    __hash__ = None  # it holds dicts


def write_bundle(
    path: str | os.PathLike,
    requests: Sequence[KernelRequest],
    layouts: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Path:
    """Write a bundle of kernels, compiling those that are not in the cache (`compile_many` before is faster).

    Args:
        path: folder to make.
        requests: kernels of one target.
        layouts: name -> identity of the packed layouts that they read.
        replace: whether a bundle that is there already may be replaced; it stays as it was if that fails.

    Raises:
        ArgumentError: no request, something that is none, or requests for different targets; no path; layouts that
            are no names.
        BundleError: something is there already, or the folder cannot be written.
        ToolchainError, CompileError, CacheError: see `compile_request`.
    """
    path, requests, layouts = _folder(path), check_requests(requests), _names(layouts)
    targets = sorted({request.target.arch for request in requests})
    if len(targets) != 1:
        raise ArgumentError(
            "requests", targets, "a bundle holds kernels of exactly one target", "write one bundle for each target"
        )
    if path.exists() and not (replace and (path / cache.MANIFEST).is_file()):
        raise BundleError(
            f"{path} exists already; remove it, choose another folder or pass replace=True to replace a bundle"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            _fill(private, targets[0], requests, layouts)
            if path.exists():
                _replace(private, path)
            elif not cache.publish_folder(private, path):
                raise BundleError(f"{path} was made by another process meanwhile")
        finally:
            shutil.rmtree(private, ignore_errors=True)
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error}; make room there or choose another folder") from error
    return path


def _fill(private: Path, target: str, requests: Sequence[KernelRequest], layouts: Mapping[str, str]) -> None:
    """Write everything of a bundle into an empty folder, the manifest last."""
    kernels = []
    for request in dict.fromkeys(requests):
        folder = private / "kernels" / request.identity()
        folder.mkdir(parents=True)
        compiled = compile_request(request)
        for name in cache.FILES:
            shutil.copyfile(compiled / name, folder / name)
        kernels.append({"identity": request.identity(), "request": request.as_dict()})
    meta = {"format": FORMAT, **_versions(), "target": target, "layouts": layouts, "kernels": kernels}
    cache.write_manifest(private, {**meta, "toolchain": toolchain().as_dict()})
    private.chmod(0o755)


def _replace(private: Path, path: Path) -> None:
    """Put a complete folder in the place of a bundle, which comes back if that fails."""
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        os.rename(path, old / "bundle")
        os.rename(private, path)
    except BaseException:
        if (old / "bundle").exists():
            os.rename(old / "bundle", path)  # if this fails too, the bundle is kept where it is
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_bundle(path: str | os.PathLike, target: Any = None, layouts: Mapping[str, str] | None = None) -> Bundle:
    """Verify a bundle and let `get_kernel` find its kernels. Needs neither tilelang nor a compiler nor a TVM.

    Args:
        path: folder made by `write_bundle`.
        target: what the kernels must have been made for; None means the current device, if there is one.
        layouts: name -> identity of this installation's packed layouts; those that the bundle names must be equal.

    Raises:
        ArgumentError: no path, or layouts that are no names.
        BundleError: the bundle is incomplete or altered, or made for another target, terrazzo, machine or layout, or
            from other sources than this installation would build its kernels from.
    """
    path, installed = _folder(path), _names(layouts)
    try:
        manifest = cache.read_manifest(path, needed=())
    except ValueError as error:
        raise BundleError(f"bundle {path} cannot be trusted: {error}; make it again with `terrazzo compile`") from error
    if manifest.get("format") != FORMAT:
        raise BundleError(
            f"{path} is no bundle of this terrazzo: format {manifest.get('format')!r}, expected {FORMAT!r}"
        )
    for name, own in _versions().items():
        if manifest.get(name) != own:
            raise BundleError(
                f"bundle {path} was made with {name} {manifest.get(name, 'unknown')}, this is {own}; "
                "make it again with `terrazzo compile`"
            )
    try:
        made_for, reads, kernels = _contents(manifest)
        folders = {identity: path / "kernels" / identity for identity in kernels}
        reports = {kernels[identity]: KernelReport.read(folder / "report.json") for identity, folder in folders.items()}
    except (OSError, ValueError) as error:
        raise BundleError(f"bundle {path} is incomplete: {error}; make it again with `terrazzo compile`") from error
    wanted = _wanted_target(target)
    if wanted is not None and made_for.arch != wanted.arch:
        raise BundleError(
            f"bundle {path} is for {made_for.arch}, wanted is {wanted.arch} ({wanted.name}); "
            f"compile one for {wanted.arch}"
        )
    for name, identity in reads.items():
        own = installed.get(name, identity)
        if own != identity:
            raise BundleError(
                f"bundle {path} reads layout {name} = {identity}, this installation packs {own}; make it again"
            )
    _check_sources(path, kernels)
    register_bundled(folders)
    return Bundle(path, made_for, reads, tuple(reports), reports)


def _contents(manifest: Mapping[str, Any]) -> tuple[Target, dict[str, str], dict[str, KernelRequest]]:
    """Target, layouts, and the kernels by identity; ValueError says which of them a manifest lacks."""
    for name, kind in (("target", str), ("layouts", dict), ("kernels", list)):
        if not isinstance(manifest.get(name), kind):
            raise ValueError(f"{cache.MANIFEST} has no {name}")
    kernels: dict[str, KernelRequest] = {}
    for kernel in manifest["kernels"]:
        if not isinstance(kernel, dict) or not isinstance(kernel.get("identity"), str) or "request" not in kernel:
            raise ValueError(f"{cache.MANIFEST} has a kernel without identity or request")
        cache.require_listed(manifest, [f"kernels/{kernel['identity']}/{name}" for name in cache.FILES])
        kernels[kernel["identity"]] = KernelRequest.from_dict(kernel["request"])
    return Target.parse(manifest["target"]), manifest["layouts"], kernels


def _check_sources(path: Path, kernels: Mapping[str, KernelRequest]) -> None:
    """Refuse kernels that this installation would build from other sources: `get_kernel` would never find them."""
    for identity, request in kernels.items():
        try:
            same = request.identity() == identity
        except ArgumentError as error:
            raise BundleError(f"bundle {path} has {request}, whose builder is not installed here: {error}") from error
        if not same:
            raise BundleError(
                f"bundle {path} was made from other terrazzo sources: this installation builds {request} from other "
                "text; make it again with `terrazzo compile`"
            )


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError("path", path, "must be the path of a folder", "name the bundle's folder")
    return Path(path).absolute()


def _names(layouts: Any) -> dict[str, str]:
    """name -> identity of layouts, as a caller gave them."""
    found = {} if layouts is None else layouts
    if not isinstance(found, Mapping) or not all(isinstance(it, str) for pair in found.items() for it in pair):
        raise ArgumentError("layouts", layouts, "must map names to identities", "write {'w4a16_wgmma': its identity}")
    return dict(found)


def _versions() -> dict[str, str]:
    """What must be equal where a bundle is made and where it is loaded."""
    return {
        "terrazzo": package_version("terrazzo") or "uninstalled",
        "machine": platform.machine(),  # kernel.so is code of the host
    }


def _wanted_target(target: Any) -> Target | None:
    if target is not None:
        return Target.parse(target)
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return Target.detect()
    except TargetError as error:
        raise BundleError(f"bundles run on no such device: {error}") from error
