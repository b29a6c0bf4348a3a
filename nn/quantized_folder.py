"""The folder that `quantize_folder` writes: what it was begun with, and which of its files are whole and of that run.

terrazzo_quantize.json has the settings of the run, the sha256 of each file that the model is read from, and of each
layer that is written. A stopped run goes on only with equal settings and an equal source, and keeps only equal layers.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import tensor_files
from terrazzo.ops.checkpoints import files

SETTINGS = "terrazzo_quantize.json"
FORM = 2
"""Of SETTINGS: the first one had no digests."""
_NEW = "name a new folder"
_THREADS = 4
Noted = str | list["Noted"] | dict[str, "Noted"]


def digest_of(value: object) -> Noted:
    """What is noted of an option: equal ones have equal notes, tensors by all their values."""
    if isinstance(value, torch.Tensor):
        data = value.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
        kind = f"{value.dtype} {list(value.shape)} "
        return kind + hashlib.sha256(data).hexdigest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return digest_of({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(name): digest_of(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [digest_of(each) for each in value]
    return str(value)


def read_files(checkpoint: files.TensorFiles) -> dict[str, Path]:
    """Name -> place of all that a float model is read from: tensors, which of them lie where, config, generation."""
    places = set(checkpoint.places.values())
    places |= {checkpoint.folder / name for name in ("config.json", "generation_config.json")}
    places |= set(checkpoint.folder.glob("*.safetensors.index.json"))
    return {path.relative_to(checkpoint.folder).as_posix(): path for path in sorted(places) if path.is_file()}


class QuantizedFolder:
    """A folder in the making, of one process at a time: a context manager.

    Args:
        path: folder to write, empty or begun by an equal run. settings: JSON values that decide what is written.
        source, read: the model's folder, and `read_files` of it.
        verify: read all files of the source again, also those whose size and times are those of the stopped run.

    Raises:
        ArgumentError: names `out`, a folder that cannot be written, that holds something else, that another process
            writes, or that a run with other settings began. Names `source`, whose files are others than those.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], source: str | Path, read: Mapping[str, Path], verify: bool
    ) -> None:
        self.path, self.source, self.read = path, source, read
        self.files: dict[str, dict[str, Any]] = {}
        self.kept: set[str] = set()
        with tensor_files.named("out", path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._begin(settings, verify)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> QuantizedFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is not None and not self.files:  # nothing was made: a next run may have other settings
            with suppress(OSError):
                (self.path / SETTINGS).unlink()
        os.close(self._lock)

    def _begin(self, settings: Mapping[str, Any], verify: bool) -> None:
        with tensor_files.named("out", self.path):
            self._alone()
            held = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        begun = (self.path / SETTINGS).is_file()
        if held and not begun:
            raise ArgumentError("out", str(self.path), f"is not empty: it has {held[0]!r}", _NEW)
        noted = self._noted(settings) if begun else {}
        self.seen = self._seen()
        digests = self._same(noted, verify) if begun else self._digests(self.read)
        self.noted = {"form": FORM, "settings": dict(settings), "source": digests}
        self.files = noted.get("files", {})
        if not noted.get("done"):
            self._note()

    def _alone(self) -> None:
        """Keep other processes out, and remove what killed ones left; where there are no locks, neither."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it, or name another folder"
            raise ArgumentError("out", str(self.path), "is being written by another process", remedy) from None
        except OSError:
            return
        for entry in list(self.path.iterdir()):
            if tensor_files.SCRATCH.fullmatch(entry.name):
                with suppress(OSError):
                    entry.unlink()

    def _noted(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """SETTINGS of the run that began the folder, whose settings are equal."""
        try:
            noted = files.read_object(self.path / SETTINGS)
        except ArgumentError as error:
            raise ArgumentError("out", str(self.path), f"its {SETTINGS} {error.constraint}", _NEW) from None
        if noted.get("form") != FORM:
            constraint = f"was begun by another version, whose {SETTINGS} is of form {noted.get('form', 1)!r}"
            raise ArgumentError("out", str(self.path), f"{constraint}, and this one's is {FORM}", _NEW)
        before = noted.get("settings")
        good = isinstance(before, dict) and _are_digests(noted.get("source")) and _are_files(noted.get("files"))
        if not good:
            raise ArgumentError("out", str(self.path), f"its {SETTINGS} is damaged", _NEW)
        other = [name for name, value in settings.items() if before.get(name) != value]
        if other:
            name, was = other[0], before.get(other[0])
            constraint = f"was begun with other settings: {name} was {was!r} and is {settings[name]!r}"
            remedy = f"{_NEW}, or ask for the same"
            if other == ["write"] and was is None:  # as versions did that wrote nothing else
                remedy = f"{_NEW}, or write 'packed' (--write packed), which goes on with it"
            raise ArgumentError("out", str(self.path), constraint, remedy)
        return noted

    def _seen(self) -> dict[str, list[int]]:
        """Size and times of the source's files: contents that change change them. The time of the last change of a
        file's entry cannot be set."""
        with self._reading():
            found = {name: path.stat() for name, path in self.read.items()}
        return {name: [it.st_size, it.st_mtime_ns, it.st_ctime_ns, it.st_ino] for name, it in found.items()}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            constraint = f"cannot be read ({error.strerror or error}: {error.filename})"
            raise ArgumentError("source", str(self.source), constraint, "get the folder again") from None

    def _digests(self, names: Iterable[str]) -> dict[str, str]:
        names = list(names)
        with self._reading(), ThreadPoolExecutor(_THREADS) as pool:
            return dict(zip(names, pool.map(tensor_files.digest_of, [self.read[name] for name in names])))

    def _same(self, noted: Mapping[str, Any], verify: bool) -> dict[str, str]:
        """Digests of the source's files, which are those of the stopped run."""
        before, times = noted["source"], noted.get("seen")
        known = times if isinstance(times, dict) and not verify else {}
        other = sorted(set(before) ^ set(self.read))
        if not other:
            fresh = [name for name in before if known.get(name) != self.seen[name]]
            found = self._digests(fresh)
            other = [name for name in fresh if found[name] != before[name]]
        if other:
            constraint = f"is another model than the one that {self.path} was begun with: {other[0]} differs"
            more = f", and {len(other) - 1} more files" if len(other) > 1 else ""
            raise ArgumentError("source", str(self.source), constraint + more, f"{_NEW} for this one")
        return before

    def _unchanged(self) -> None:
        """Raise ArgumentError if a file of the source has changed since the run began."""
        now = self._seen()
        changed = [name for name in now if now[name] != self.seen[name]]
        if changed:
            remedy = "start again: what was finished before is kept if the source is the same"
            raise ArgumentError("source", str(self.source), f"its {changed[0]} was changed while it was read", remedy)

    def _note(self, done: bool = False) -> None:
        """Write SETTINGS; a finished folder has nothing of this machine in it."""
        more = {"done": True} if done else {"seen": self.seen}
        data = self.noted | {"files": self.files} | more
        self.write_json(SETTINGS, data)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        tensor_files.write_bytes(self.path / name, (json.dumps(data, indent=1) + "\n").encode(), "out")

    def held(self, name: str) -> tuple[list[str], dict[str, float]] | None:
        """(names of tensors, errors) of a layer's file that is as it was written, or None; others are warned of."""
        from safetensors import SafetensorError, safe_open

        path = self.path / name
        if name not in self.files or not path.is_file():
            return None
        with suppress(SafetensorError, OSError):
            if tensor_files.digest_of(path) == self.files[name]["sha256"]:
                with safe_open(path, framework="pt") as file:
                    self.kept.add(name)
                    return list(file.keys()), self.files[name]["errors"]
        said = f"{path} is not what was written: it was altered or damaged, and is made again"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return None

    def write(
        self, name: str, state: Mapping[str, torch.Tensor], errors: Mapping[str, float]
    ) -> tuple[list[str], dict[str, float]]:
        """Write tensors to a file that appears whole, and note it; see `held`."""
        self._unchanged()
        digest = tensor_files.write_tensors(self.path / name, state, {"format": "pt"}, "out")
        self.files[name] = {"sha256": digest, "errors": dict(errors)}
        self.kept.add(name)
        self._note()
        return list(state), dict(errors)

    def finish(self) -> None:
        """Note that all is written."""
        self._unchanged()
        self.files = {name: self.files[name] for name in sorted(self.kept)}
        self._note(done=True)


def _are_digests(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _are_files(value: object) -> bool:
    """Whether a value says of files their sha256 and errors."""
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        return False
    kinds = [(each.get("sha256"), each.get("errors")) for each in value.values()]
    return all(
        isinstance(digest, str) and isinstance(errors, dict) and all(type(e) in (float, int) for e in errors.values())
        for digest, errors in kinds
    )
