"""Interpreters of other environments that a user has named, in a variable or for all processes in a file."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.lowering.data_files import read_json
from terrazzo.lowering.errors import ArgumentError, ToolchainError

MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Named:
    """What one of them is for.

    Attributes:
        key: in the file, and `terrazzo config KEY`. variable: of the environment, which is asked first.
    """

    key: str
    variable: str

    def file(self) -> Path:
        """Where `keep` writes: $XDG_CONFIG_HOME/terrazzo/config.json, else ~/.config/terrazzo/config.json.

        Raises:
            ToolchainError: there is no home folder to name it from.
        """
        try:
            base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
            return Path(base).expanduser().absolute() / "terrazzo" / "config.json"
        except (RuntimeError, OSError) as error:
            said = f"the configuration has no folder: {error}; set {self.variable}, or HOME"
            raise ToolchainError(said) from error

    def find(self) -> tuple[str, str] | None:
        """(interpreter, what names it), or None: nothing does. An empty variable names none, whatever the file says.

        Raises:
            ToolchainError: a configuration that cannot be read, or is another user's to write.
        """
        named = os.environ.get(self.variable)
        if named is not None:
            return (named, self.variable) if named else None
        try:
            path = self.file()
            found = self._read(path)
        except (ToolchainError, OSError) as error:
            if isinstance(error, _Unfit):
                raise
            return None
        named = found.get(self.key)
        return (named, str(path)) if named is not None else None

    def keep(self, python: str | None) -> None:
        """Write an interpreter into the file, or None: take it out; without any, the file goes.

        Raises:
            ToolchainError: it cannot be written, or is another user's to write.
        """
        file = self.file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            others = {}
            with contextlib.suppress(FileNotFoundError, _Unfit):
                others = {key: value for key, value in self._read(file).items() if key != self.key}
            made = others if python is None else {**others, self.key: python}
            if not made:
                file.unlink(missing_ok=True)
                return
            handle, private = tempfile.mkstemp(dir=file.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    json.dump(made, out)
                os.replace(private, file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(private)
                raise
        except OSError as error:
            raise ToolchainError(f"{file} cannot be written: {error}; set {self.variable} instead") from error

    def _read(self, path: Path) -> dict[str, Any]:
        """What the file holds, which this user alone may write.

        Raises:
            OSError: there is none.
        """
        seen = path.stat(), path.parent.stat()
        remedy = f"remove it, and run `terrazzo config {self.key}` again, or set {self.variable}"
        if any(it.st_uid not in (0, os.getuid()) or it.st_mode & 0o022 for it in seen):
            said = f"{path} names a program to run, and others than this user may write it or its folder"
            raise _Unfit(f"{said}; {remedy}")
        try:
            found = read_json(path, "config.json", remedy, most=MOST_BYTES)
        except ArgumentError as error:
            raise _Unfit(str(error)) from error
        if not isinstance(found, dict) or any(not (isinstance(it, str) and it) for it in found.values()):
            raise _Unfit(f"{path} has no path of an interpreter under {self.key!r}; {remedy}")
        return found


class _Unfit(ToolchainError):
    """A configuration that is there, and cannot be followed."""


COMPILER = Named("compiler", "TERRAZZO_COMPILER")
QUANTIZER = Named("quantizer", "TERRAZZO_QUANTIZER")


def clean_environment() -> dict[str, str]:
    """This process's environment for an interpreter of another one: without what would change its imports."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
