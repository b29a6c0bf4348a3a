"""What a server's operator may say of our kernels, by an object in the engine's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from terrazzo.lowering.errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """What may be said, as vLLM's `--additional-config '{"terrazzo": {"requantize": true}}'` does.

    Attributes:
        linear, experts: whether layers, and experts, are taken at all.
        requantize: W4A8 on int8: fit scales that kernels cannot hold to integers (one more rounding of the weights).
            Without it such a layer runs in W4A16, with the weights as they are.
        bundle: folder of `terrazzo compile`; its kernels are used, and others compiled.
        strict: nothing is compiled: a kernel that the bundle lacks is an error.
        workers: processes that compile, None for one on each CPU.
        cpu: layers on a CPU too, by the operators' reference: slow, for tests.
    """

    linear: bool = True
    experts: bool = True
    requantize: bool = False
    bundle: str | None = None
    strict: bool = False
    workers: int | None = None
    cpu: bool = False

    @staticmethod
    def of(config: object, name: str = "additional_config") -> Settings:
        """The settings under "terrazzo" in an engine's configuration, which errors call `name`.

        Raises:
            ArgumentError: no object, a name that is none of these, a value of another type.
        """
        given = config.get("terrazzo", {}) if isinstance(config, Mapping) else {}
        name, known = f"{name}.terrazzo", [field.name for field in fields(Settings)]
        if not isinstance(given, Mapping):
            raise ArgumentError(name, given, "must be an object", 'write {"terrazzo": {"requantize": true}}')
        for key, value in given.items():
            if key not in known:
                raise ArgumentError(name, key, f"must have names of {tuple(known)}", "see docs/serving.md")
            kinds = {"bundle": (str, type(None)), "workers": (int, type(None))}.get(key, (bool,))
            if type(value) not in kinds or (key == "workers" and value is not None and value < 1):
                wanted = {"bundle": "a path", "workers": "a number of processes"}.get(key, "true or false")
                raise ArgumentError(f"{name}.{key}", value, f"must be {wanted}", "see docs/serving.md")
        made = Settings(**given)
        if made.strict and made.bundle is None:
            raise ArgumentError(f"{name}.strict", True, "needs a bundle", "name its folder under bundle")
        return made
