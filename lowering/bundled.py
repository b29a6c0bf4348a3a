"""A kernel that somebody compiled before: of a bundle or of an installed wheel, and what it must be compared with."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from terrazzo.lowering import folders
from terrazzo.lowering.errors import BundleError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import package_version


@dataclass(frozen=True)
class BundledKernel:
    """A kernel of a bundle or a wheel.

    Attributes:
        request: what it was compiled from. bundle: the folder. trusted: users who may own it.
        library, digest: path of kernel.so inside the folder, and the sha256 that its manifest has.
        holder: what has it, in words. remedy: what to do where it is another one now.
    """

    request: KernelRequest
    bundle: Path
    library: str
    digest: str
    trusted: Collection[int]
    holder: str = "bundle"
    remedy: str = "load it again"

    @property
    def folder(self) -> Path:
        return (self.bundle / self.library).parent

    def code(self) -> bytes:
        """kernel.so, compared with the sha256 that the manifest has and with the identity after its code.

        Raises:
            BundleError: it is another one, or gone.
        """
        try:
            with folders.Folder(self.bundle, self.trusted) as folder:
                contents = folders.read_listed(folder, {"files": {self.library: self.digest}}, self.library)
            folders.require_mark(contents, self.request.identity())
        except ValueError as error:
            what = f"{self.holder} {self.bundle} changed since it was loaded, kernel {self.request}"
            raise BundleError(f"{what}: {error}; {self.remedy}") from error
        return contents


def versions() -> dict[str, str]:
    """What must be equal where kernels are made and where they are loaded."""
    return {
        "terrazzo": package_version("terrazzo") or "uninstalled",
        "machine": platform.machine(),  # kernel.so is code of the host
    }
