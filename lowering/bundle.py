"""Bundles: folders of kernels compiled ahead of time, for processes that have torch and tvm-ffi but no compiler.

    <bundle>/manifest.json             versions, target, driver, layout identities, kernels, sha256 of every file
    <bundle>/kernels/<identity>/       kernel.so, kernel.cu, report.json

A bundle holds kernels of one target. It is written beside its final place and renamed, or exchanged with the one that
is there, so that the path never leads nowhere. Loading verifies every byte and refuses, by name, another target,
another terrazzo, another machine, other layouts, an older driver and kernels that this terrazzo would build from other
sources.

A bundle is native code. Its folders and files must belong to root, to this process's user or to one that the caller
names, nobody else may write them, and none of them may be a link. What a launch loads later is what was verified.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.lowering import cache, folders
from terrazzo.lowering.bundled import BundledKernel, versions
from terrazzo.lowering.compilers import toolchain
from terrazzo.lowering.environment import driver_needed, driver_version, is_older
from terrazzo.lowering.errors import ArgumentError, BundleError, CacheError, TargetError
from terrazzo.lowering.folders import DistrustError
from terrazzo.lowering.kernels import compile_request, register_bundled
from terrazzo.lowering.report import KernelReport
from terrazzo.lowering.request import KernelRequest, check_requests
from terrazzo.lowering.targets import Target

FORMAT = "terrazzo-bundle-2"
_KEPT = "bundle"  # what is being replaced, in a folder of `_replace_in_two_steps`
_AGAIN = "make it again with `terrazzo compile`"


@dataclass(frozen=True)
class Bundle:
    """A verified bundle whose kernels `get_kernel` finds.

    Attributes:
        path: the folder.
        target: what its kernels run on.
        layouts: name -> identity of every packed layout that its kernels read.
        requests: the kernels.
        reports: request -> KernelReport.
        driver: the oldest CUDA version that a driver must support to run them, "13.0".
    """

    path: Path
    target: Target
    layouts: Mapping[str, str]
    requests: tuple[KernelRequest, ...]
    reports: Mapping[KernelRequest, KernelReport]
    driver: str
    __hash__ = None  # it holds dicts


def write_bundle(
    path: str | os.PathLike[str],
    requests: Sequence[KernelRequest],
    layouts: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Path:
    """Write a bundle of kernels, compiling those that are not in the cache (`compile_many` before is faster).

    Others may read it: its folders have mode 0755, its files 0644.

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
    if os.path.exists(path) and not (replace and os.path.isfile(path / folders.MANIFEST)):
        raise BundleError(
            f"{path} exists already; remove it, choose another folder or pass replace=True to replace a bundle"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.sweep(path.parent, re.escape(f".{path.name}"))
        _settle(path)
        with folders.private_folder(path.parent, f".{path.name}") as private:
            fill(private, targets[0], requests, layouts, FORMAT)
            if path.exists():
                _replace(private, path)
            elif not folders.publish_folder(private, path):
                raise BundleError(f"{path} was made by another process meanwhile; remove it or choose another folder")
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error}; make room there or choose another folder") from error
    return path


def fill(
    private: Path,
    target: str,
    requests: Sequence[KernelRequest],
    layouts: Mapping[str, str],
    form: str,
    names: Sequence[str] = folders.FILES,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write kernels, files `names` of each, into a folder, and last a manifest of format `form`; `more` goes first."""
    kernels, drivers = [], []
    for request in dict.fromkeys(requests):
        folder = private / "kernels" / request.identity()
        folder.mkdir(parents=True)
        entry = compile_request(request)
        try:
            manifest, files = cache.read_entry(entry, {"identity": request.identity()})
        except ValueError as error:
            raise CacheError(f"{entry} changed while it was read: {error}; try again") from error
        for name in names:
            (folder / name).write_bytes(files[name])
        drivers.append(driver_needed(manifest["toolchain"]["toolkit"], request.ptx is not None))
        kernels.append({"identity": request.identity(), "request": request.as_dict()})
    newest = max(drivers, key=lambda version: tuple(map(int, version.split("."))))
    meta = {"format": form, **versions(), "target": target, "driver": newest, "layouts": layouts, "kernels": kernels}
    folders.write_manifest(private, {**meta, "toolchain": toolchain().as_dict(), **(more or {})}, 0o644)


def _replace(private: Path, path: Path) -> None:
    """Put a complete folder in the place of a bundle, whose own then is that folder's, or is removed."""
    if folders.exchange(private, path):
        if private.is_symlink():  # the path of a bundle may be one
            private.unlink()
    else:
        _replace_in_two_steps(private, path)
    (path / folders.LOCK).unlink(missing_ok=True)
    folders.flush(path.parent)


def _replace_in_two_steps(private: Path, path: Path) -> None:
    """For file systems that exchange nothing: the bundle comes back if this fails, at the next use if it is killed."""
    old, handle = folders.locked_folder(path.parent, f".{path.name}.old")
    try:
        os.rename(path, old / _KEPT)
        try:
            os.rename(private, path)
        except BaseException:
            os.rename(old / _KEPT, path)  # if this fails too, the next use does it
            raise
        os.rename(old / _KEPT, old / "replaced")
    finally:
        if not os.path.lexists(old / _KEPT):
            shutil.rmtree(old, ignore_errors=True)
        os.close(handle)


def _settle(path: Path) -> None:
    """Bring back the bundle that a killed `_replace_in_two_steps` moved away, and remove what it left."""

    def bring_back(old: Path) -> None:
        if os.path.lexists(old / _KEPT) and not os.path.lexists(path):
            os.rename(old / _KEPT, path)

    folders.sweep(path.parent, re.escape(f".{path.name}.old"), bring_back)


def load_bundle(
    path: str | os.PathLike[str],
    target: Target | str | None = None,
    layouts: Mapping[str, str] | None = None,
    strict: bool = False,
    owner: int | str | None = None,
) -> Bundle:
    """Verify a bundle and let `get_kernel` find its kernels. Needs neither tilelang nor a compiler nor a TVM.

    Args:
        path: folder made by `write_bundle`.
        target: what the kernels must have been made for; None means the current device, if there is one.
        layouts: name -> identity of this installation's packed layouts; those that the bundle names must be equal.
        strict: from now on no launch in this process compiles or takes a kernel from the cache: one that no loaded
            bundle has is a BundleError that names it. `compile_request` and `compile_many` still compile.
        owner: a user, by name or number, who may own the bundle beside root and this process's user. The bundle's code
            runs in this process: name only whom you would let run any code here.

    Raises:
        ArgumentError: no path, layouts that are no names, or an owner that is no user.
        BundleError: the bundle is incomplete or altered, may hold another user's code, or needs a newer driver; it was
            made for another target, terrazzo, machine or layout; or from other sources than this installation would
            build its kernels from.
    """
    installed, (bundle, kernels) = _names(layouts), _verified(path, owner)
    path, made_for = bundle.path, bundle.target
    wanted = _wanted_target(target)
    if wanted is not None and made_for.arch != wanted.arch:
        raise BundleError(
            f"bundle {path} is for {made_for.arch}, wanted is {wanted.arch} ({wanted.name}); "
            f"compile one for {wanted.arch}"
        )
    for name, identity in bundle.layouts.items():
        own = installed.get(name, identity)
        if own != identity:
            raise BundleError(
                f"bundle {path} reads layout {name} = {identity}, this installation packs {own}; make it again"
            )
    _check_driver(path, bundle.driver)
    _check_sources(path, kernels)
    register_bundled(kernels, path if strict else None)
    return bundle


def read_bundle(path: str | os.PathLike[str], owner: int | str | None = None) -> Bundle:
    """Verify a bundle and say what it holds, whatever it was made for; nothing is loaded and no driver is asked.

    Args:
        path, owner: see `load_bundle`.

    Raises:
        ArgumentError: no path, or an owner that is no user.
        BundleError: the bundle is incomplete or altered, may hold another user's code, or was made by another version
            of terrazzo.
    """
    return _verified(path, owner)[0]


def _verified(path: str | os.PathLike[str], owner: int | str | None) -> tuple[Bundle, dict[str, BundledKernel]]:
    """A bundle of which every byte was verified, and its kernels by identity."""
    path, trusted = _folder(path), _trusted(owner)
    if not os.path.exists(path):
        with contextlib.suppress(OSError):
            _settle(path)
    try:
        made_for, reads, kernels, reports, driver = _read_whole(path, trusted)
    except DistrustError as error:
        raise BundleError(
            f"bundle {path} could hold another user's code: {error}; have root own it (chown -R root, chmod -R go-w), "
            "copy it to a folder of your own (cp -r) if you trust where it comes from, or name its owner: "
            "load_bundle(..., owner=...)"
        ) from error
    except ValueError as error:
        raise BundleError(f"bundle {path} cannot be trusted: {error}; {_AGAIN}") from error
    return Bundle(path, made_for, reads, tuple(reports), reports, driver), kernels


def _read_whole(path: Path, trusted: Collection[int]) -> tuple[Any, ...]:
    """As `_read`; a bundle that is replaced while it is read is read again."""
    while True:
        with folders.Folder(path, trusted) as folder:
            try:
                return _read(path, folder)
            except (ValueError, BundleError):
                if not folder.replaced():
                    raise


def _read(
    path: Path, folder: folders.Folder
) -> tuple[Target, dict[str, str], dict[str, BundledKernel], dict[KernelRequest, KernelReport], str]:
    """Target, layouts, kernels by identity, reports and driver of a bundle, every byte of it verified.

    Raises:
        BundleError: it is of another format, terrazzo or machine.
        ValueError: what it lacks, or what is wrong with it.
    """
    manifest = folders.open_manifest(folder)
    if manifest.get("format") != FORMAT:
        raise BundleError(
            f"{path} is no bundle of this terrazzo: format {_short(manifest.get('format'))}, expected {FORMAT!r}; "
            f"{_AGAIN}"
        )
    for name, own in versions().items():
        if manifest.get(name) != own:
            seen = manifest.get(name, "unknown")
            seen = seen[:100] if isinstance(seen, str) else _short(seen)
            raise BundleError(f"bundle {path} was made with {name} {seen}, this is {own}; {_AGAIN}")
    for name, kind in (("target", str), ("driver", str), ("layouts", dict), ("kernels", list)):
        if not isinstance(manifest.get(name), kind):
            raise ValueError(f"{folders.MANIFEST} has no {name}")
    if not re.fullmatch(r"\d{1,3}\.\d{1,2}", manifest["driver"], re.ASCII):
        raise ValueError(f"{folders.MANIFEST} has no driver, but {_short(manifest['driver'])}")
    if not all(isinstance(identity, str) for identity in manifest["layouts"].values()):
        raise ValueError(f"{folders.MANIFEST} has layouts without identity")
    kernels: dict[str, BundledKernel] = {}
    for kernel in manifest["kernels"]:
        if not isinstance(kernel, dict) or not isinstance(kernel.get("identity"), str) or "request" not in kernel:
            raise ValueError(f"{folders.MANIFEST} has a kernel without identity or request")
        name = f"kernels/{kernel['identity']}"
        folders.require_listed(manifest, [f"{name}/{file}" for file in folders.FILES])
        library = f"{name}/{folders.LIBRARY}"
        try:
            request = KernelRequest.from_dict(kernel["request"])
        except ArgumentError as error:
            raise ValueError(f"{folders.MANIFEST}: {str(error)[:500]}") from error
        kernels[kernel["identity"]] = BundledKernel(request, path, library, manifest["files"][library], folder.trusted)
    reports: dict[KernelRequest, KernelReport] = {}

    def look(name: str, contents: bytes) -> None:
        above, _, file = name.rpartition("/")
        identity = above.removeprefix("kernels/")
        if identity in kernels and above != identity:
            if file == folders.LIBRARY:
                folders.require_mark(contents, identity)
            elif file == "report.json":
                reports[kernels[identity].request] = KernelReport.parse(contents, name)

    folders.verify_files(folder, manifest, look)
    return Target.parse(manifest["target"]), manifest["layouts"], kernels, reports, manifest["driver"]


def _check_driver(path: Path, needed: str) -> None:
    """Refuse a driver that cannot load the bundle's machine code; without one, nothing can be launched anyway."""
    seen = driver_version()
    if seen is not None and is_older(seen, needed):
        raise BundleError(
            f"bundle {path} needs a driver for CUDA {needed} or newer, the driver here is for CUDA {seen}; update the "
            f"driver, or compile the bundle with a toolkit of CUDA {seen.partition('.')[0]}"
        )


def _check_sources(path: Path, kernels: Mapping[str, BundledKernel]) -> None:
    """Refuse kernels that this installation would build from other sources: `get_kernel` would never find them."""
    for identity, kernel in kernels.items():
        request = kernel.request
        if not _may_be_looked_up(request.entry.partition(":")[0]):
            continue
        try:
            own = request.identity()
        except (ValueError, SyntaxError, OSError, RecursionError) as error:
            raise BundleError(f"bundle {path} has {request}, whose builder is not installed here: {error}") from error
        if own != identity and own in kernels:
            raise BundleError(f"bundle {path} has {request} in the place of another of its kernels; {_AGAIN}")
        if own != identity:
            raise BundleError(
                f"bundle {path} was made from other terrazzo sources: this installation builds {request} from other "
                f"text; {_AGAIN}"
            )


def _may_be_looked_up(module: str) -> bool:
    """Whether finding a builder's module imports nothing that only the bundle names: a package above it is imported.

    `get_kernel` compares the others, which the caller then asks for.
    """
    top, dot, _ = module.partition(".")
    return not dot or top == "terrazzo" or top in sys.modules


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _trusted(owner: int | str | None) -> Collection[int]:
    """Users who may own a bundle."""
    if owner is None:
        return folders.owners()
    with contextlib.suppress(KeyError):  # no such user
        if isinstance(owner, str):
            return folders.owners(pwd.getpwnam(owner).pw_uid)
        if type(owner) is int and 0 <= owner < 2**32:
            return folders.owners(owner)
    raise ArgumentError("owner", owner, "must be a user's name or number", "look at the bundle's owner with `ls -ln`")


def _folder(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError("path", path, "must be the path of a folder", "name the bundle's folder")
    return Path(path).absolute()


def _names(layouts: Mapping[str, str] | None) -> dict[str, str]:
    """name -> identity of layouts, as a caller gave them."""
    found = {} if layouts is None else layouts
    if not isinstance(found, Mapping) or not all(isinstance(it, str) for pair in found.items() for it in pair):
        raise ArgumentError("layouts", layouts, "must map names to identities", "write {'w4a16_wgmma': its identity}")
    return dict(found)


def _wanted_target(target: Target | str | None) -> Target | None:
    if target is not None:
        return Target.parse(target)
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return Target.detect()
    except TargetError as error:
        raise BundleError(f"bundles run on no such device: {error}") from error
