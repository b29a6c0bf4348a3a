"""Wheels of ready kernels: a distribution for each architecture, `terrazzo-kernels-sm90`, which pip installs beside us.

    terrazzo_kernels_sm90/manifest.json          versions, target, driver, identities of kernels, sha256 of every file
    terrazzo_kernels_sm90/requests.json          identity -> request
    terrazzo_kernels_sm90/kernels/<identity>/    kernel.so, report.json
    entry point  [terrazzo.kernels]  sm_90a = terrazzo_kernels_sm90

A wheel holds data. It is found by its entry point, and nothing of it is imported. A kernel is looked for by identity,
so that one of other sources is never taken for it. Rights of the folder are a bundle's (docs/trust.md).

The first call of a process waits for what is read here, so that is little. The manifest has no requests, and digests of
sources, which spare a terrazzo with the very same files the parsing of them. A kernel's bytes are compared with the
manifest, and the identity in them with the request's, when it is loaded: a process launches few of some thousand.

A wheel that cannot be used is left out with a warning that names it and the remedy: for another terrazzo or machine,
one that others may write, a damaged manifest, a driver that is too old.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.lowering import folders, sources
from terrazzo.lowering.bundled import BundledKernel, versions
from terrazzo.lowering.environment import driver_version, is_older
from terrazzo.lowering.folders import DistrustError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import package_version

GROUP = "terrazzo.kernels"
FORMAT = "terrazzo-wheel-2"
FILES = (folders.LIBRARY, "report.json")
"""Of every kernel; its CUDA text stays with those who compile."""
REQUESTS = "requests.json"
"""Identity -> request of every kernel, read where a kernel is not found, to say why."""


class KernelWheelWarning(UserWarning):
    """An installed wheel of kernels is left out; the text says which one, why, and what to do."""


@dataclass
class KernelWheel:
    """An installed wheel whose manifest was read.

    Attributes:
        name, version: of the distribution. path: its folder. target: architecture.
        kernels: their identities. files: path inside -> sha256.
        driver: the oldest CUDA version that a driver must support.
    """

    name: str
    version: str
    path: Path
    target: str
    kernels: frozenset[str] = field(repr=False)
    files: dict[str, str] = field(repr=False)
    driver: str


@dataclass
class Installed:
    """The wheels of this environment: those that can be used, and of the others name -> why not, and the remedy."""

    wheels: list[KernelWheel]
    refused: dict[str, str]


def installed() -> Installed:
    """Wheels of kernels that are installed here, whose manifests were read and compared with this terrazzo."""
    found = Installed([], {})
    for point in _entry_points():
        name, version = point.dist.name, point.dist.version
        path = Path(os.fspath(point.dist.locate_file(point.value)))
        try:
            found.wheels.append(_read(name, version, path, point.name))
        except ValueError as error:
            found.refused[name] = f"{name} {version} is left out: {error}"
    return found


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    """Those of kernels, of packages with a name and a version; the first package of a name counts.

    importlib's own way fails as a whole where one package of any kind has a damaged file.
    """
    known = set()
    for package in importlib.metadata.distributions():
        try:
            if GROUP not in (package.read_text("entry_points.txt") or ""):
                continue
            name, points = package.metadata["Name"], list(package.entry_points)
            whole = isinstance(name, str) and isinstance(package.version, str) and name not in known
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # of its parsers, which check nothing
            continue
        if whole:
            known.add(name)
            yield from (point for point in points if point.group == GROUP)


def _read(name: str, version: str, path: Path, arch: str) -> KernelWheel:
    """The wheel in a folder; ValueError, with the remedy, where it cannot be used."""
    own = package_version("terrazzo")
    install = f"pip install --force-reinstall {name}=={own}"
    if version != own:
        raise ValueError(f"it has kernels of terrazzo {version}, this is {own}; run `{install}`, or uninstall it")
    try:
        with folders.Folder(path) as folder:
            manifest = folders.open_manifest(folder)
    except DistrustError as error:
        raise ValueError(
            f"it could hold another user's code: {error}; run `chmod -R go-w {path}`, or `{install}`"
        ) from error
    except ValueError as error:
        raise ValueError(f"{error}; run `{install}`") from error
    try:
        for field_, expected in {"format": FORMAT, **versions()}.items():
            if manifest.get(field_) != expected:
                raise ValueError(f"its {field_} is {str(manifest.get(field_))[:100]}, here it must be {expected}")
        kernels = frozenset(manifest["kernels"])
        inside = [f"kernels/{identity}/{file}" for identity in kernels for file in FILES]
        folders.require_listed(manifest, [REQUESTS, *inside])
        target, driver = manifest["target"], manifest["driver"]
        if not re.fullmatch(r"\d{1,3}\.\d{1,2}", driver, re.ASCII):
            raise ValueError(f"{folders.MANIFEST} has no driver, but {str(driver)[:100]}")
        if target != arch:
            raise ValueError(f"its kernels are for {str(target)[:100]}, its name says {arch}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folders.MANIFEST} is damaged: no {error}; run `{install}`") from error
    except ValueError as error:
        raise ValueError(f"{error}; run `{install}`") from error
    seen = driver_version()
    if seen is not None and is_older(seen, driver):
        raise ValueError(
            f"it needs a driver for CUDA {driver} or newer, the one here is for CUDA {seen}; update the driver"
        )
    sources.learn(manifest.get("sources"))
    return KernelWheel(name, version, path, target, kernels, manifest["files"], driver)


class _State:
    """What this process has found, and said."""

    def __init__(self) -> None:
        self.found: Installed | None = None
        self.by_request: dict[str, KernelWheel] | None = None
        self.said: set[str] = set()


_state = _State()
_lock = threading.RLock()


def forget() -> None:
    """Look for wheels again at the next question."""
    global _state
    _state = _State()


def find(request: KernelRequest) -> BundledKernel | None:
    """The kernel of a request in an installed wheel, or None. The wheels are read at the first question."""
    with _lock:
        found = _installed()
        if not found.wheels:
            return None
        identity = request.identity()
        for wheel in found.wheels:
            if identity in wheel.kernels:
                library = f"kernels/{identity}/{folders.LIBRARY}"
                digest, holder = wheel.files[library], f"wheel {wheel.name} in"
                return BundledKernel(request, wheel.path, library, digest, folders.owners(), holder, _again(wheel))
        _look_at_sources(request)
        return None


def refusals() -> list[str]:
    """What was said of the wheels that are left out."""
    return list(_state.found.refused.values()) if _state.found else []


def _installed() -> Installed:
    if _state.found is None:
        _state.found = installed()
        for name, text in _state.found.refused.items():
            _warn(name, text)
    return _state.found


def _look_at_sources(request: KernelRequest) -> None:
    """Say so where a wheel has this request, compiled from other sources than this terrazzo's."""
    if _state.by_request is None:
        wheels = _state.found.wheels if _state.found else ()
        _state.by_request = {_text(known): wheel for wheel in wheels for known in _requests(wheel)}
    wheel = _state.by_request.get(_text(request.as_dict()))
    if wheel is not None:
        said = (
            f"{wheel.name} {wheel.version} was made from other sources than this terrazzo's, and {request} is left out"
        )
        _warn(wheel.name, f"{said}; {_again(wheel)}, or make one with `terrazzo compile --wheel`")


def _requests(wheel: KernelWheel) -> Collection[Mapping[str, Any]]:
    """What a wheel's kernels were made from; none where its file of them is not what the manifest says."""
    try:
        with folders.Folder(wheel.path) as folder:
            known = folders.parse_json(folders.read_listed(folder, {"files": wheel.files}, REQUESTS))
    except ValueError as error:
        _warn(wheel.name, f"{wheel.name} {wheel.version} cannot say what it holds: {error}; {_again(wheel)}")
        return ()
    return known.values() if isinstance(known, dict) else ()


def _warn(name: str, text: str) -> None:
    """Once for each wheel."""
    if name not in _state.said:
        _state.said.add(name)
        warnings.warn(text, KernelWheelWarning, stacklevel=2)


def _again(wheel: KernelWheel) -> str:
    return f"run `pip install --force-reinstall {wheel.name}=={wheel.version}`"


def _text(request: Mapping[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)
