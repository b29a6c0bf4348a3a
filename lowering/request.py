"""What to compile: a picklable description of one kernel, with an identity made of contents only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.sources import source_digest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import Toolchain

Scalar = int | float | str | bool | None


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to compile.

    Args:
        name: short name for reports and errors, for example "w4a16.small_batch".
        entry: "module:function"; the function is called as `build(target=Target, **params)` in the compiling process
            and returns a TileLang prim_func named "main".
        params: arguments of the builder, plain scalars (mapping or pairs; kept as sorted pairs).
        target: anything `Target.parse` accepts. It is narrowed to its architecture's default device: a kernel may
            depend on the architecture only, whatever else it needs of a device (its SM count, say) goes into `params`.
        pass_configs: TileLang pass options with scalar values (mapping or pairs).
        flags: further nvcc flags. "ptx=compute_80" embeds PTX of that virtual architecture next to the machine code, so
            that newer GPUs can translate the kernel when they load it.

    Raises:
        ArgumentError: a name or a flag that is no string; an entry that is not "module:function"; a param that is no
            scalar; a malformed ptx flag.
    """

    name: str
    entry: str
    params: tuple[tuple[str, Scalar], ...]
    target: Target
    pass_configs: tuple[tuple[str, Scalar], ...] = ()
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentError("name", self.name, "must be a string", "for example 'w4a16.small_batch'")
        if not isinstance(self.flags, tuple | list) or not all(isinstance(flag, str) for flag in self.flags):
            raise ArgumentError("flags", self.flags, "must be a tuple of strings", "write one flag as ('-lineinfo',)")
        arch = Target.parse(self.target).arch
        fields = {
            "target": Target.parse(arch),
            "params": _pairs("params", self.params),
            "pass_configs": _pairs("pass_configs", self.pass_configs),
            "flags": tuple(self.flags),
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        if not isinstance(self.entry, str) or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.entry):
            raise ArgumentError(
                "entry", self.entry, "must be 'module:function'", "for example 'terrazzo.ops.w4a16.program:build'"
            )
        for flag in self.flags:
            if flag.startswith("ptx=") and (flag != f"ptx=compute_{arch.removeprefix('sm_')}" or arch.endswith("a")):
                constraint = f"PTX for {arch} must be of its own virtual architecture, and sm_90a has no portable PTX"
                raise ArgumentError("flags", flag, constraint, "use ptx=compute_80 with target sm_80")

    @property
    def ptx(self) -> str | None:
        """Virtual architecture whose PTX is embedded, or None."""
        return next((flag.removeprefix("ptx=") for flag in self.flags if flag.startswith("ptx=")), None)

    def identity(self) -> str:
        """sha256 over everything in this request and over the sources that can affect the code, not the toolchain."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        return _digest({**self.as_dict(), "sources": source_digest(self.entry.partition(":")[0])})

    def cache_key(self, toolchain: Toolchain) -> str:
        """Key of this kernel in the disk cache: the identity, the versions of all tools and the host's platform."""
        return _digest({"identity": self.identity(), "toolchain": toolchain.as_dict()})

    def as_dict(self) -> dict[str, Any]:
        """JSON form; `KernelRequest.from_dict` reads it."""
        return {
            "name": self.name,
            "entry": self.entry,
            "params": dict(self.params),
            "target": self.target.arch,
            "pass_configs": dict(self.pass_configs),
            "flags": list(self.flags),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> KernelRequest:
        """The request of `as_dict`.

        Raises:
            ArgumentError: fields are missing, unknown or of another kind.
        """
        try:
            return KernelRequest(**data)
        except TypeError as error:
            raise ArgumentError(
                "request", data, f"is no kernel request: {error}", "write what as_dict gives"
            ) from error

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.params)}) for {self.target.arch}"


def _pairs(argument: str, given: object) -> tuple[tuple[str, Scalar], ...]:
    constraint, remedy = "must map names to int, float, str, bool or None", "describe structured values by name"
    try:
        pairs = dict(given).items()
    except (TypeError, ValueError) as error:
        raise ArgumentError(argument, given, constraint, remedy) from error
    for key, value in pairs:
        if not isinstance(key, str) or not isinstance(value, Scalar):
            raise ArgumentError(argument, {key: value}, constraint, remedy)
    return tuple(sorted(pairs))


def check_requests(requests: object) -> list[KernelRequest]:
    """The requests of a caller as a list.

    Raises:
        ArgumentError: something else is among them.
    """
    found = list(requests) if isinstance(requests, Iterable) else [requests]
    for one in found:
        if not isinstance(one, KernelRequest):
            raise ArgumentError("requests", one, "must be a KernelRequest", "an operator's kernel_requests makes them")
    return found


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
