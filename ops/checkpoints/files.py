"""The files of a checkpoint: which tensors there are, in which file, and what is wrong with those that cannot be read.

What is read comes from others: an index names files of its own folder only, JSON is bounded, and whatever a file holds,
callers see an ArgumentError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering import data_files
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.shards import Cut

MOST_JSON = 256 << 20
"""Bytes of a JSON file that is read."""
DEEPEST = 64
"""Levels of lists and objects in one."""
LONGEST_NAME = 1000


class TensorFiles:
    """Names, shapes and places of all tensors of a safetensors file or folder. Opens files lazily and keeps them open.

    Args:
        path: a .safetensors file, an index (*.safetensors.index.json), or a folder with an index or *.safetensors.

    Attributes:
        folder: of the files and of their config.
        places: tensor -> the file that is read: where there is an index, the one that it names.
        lost: tensor -> why it cannot be read, and what to do: a shard that is missing or damaged; one that does not
            hold what the index says; two files that hold it; a shard that holds what the index does not name.
        unread: names of files of the folder that the index does not name.

    Raises:
        ArgumentError: nothing readable there, or an index that names files outside of its folder.
    """

    def __init__(self, path: str | Path) -> None:
        path = weights.path_of(path)
        try:
            exists, is_file = path.exists(), path.is_file()
        except OSError as error:
            raise ArgumentError("path", str(path)[:200], f"cannot be read ({error.strerror})", "pass another") from None
        if not exists:
            remedy = "download it first (huggingface_hub.snapshot_download), and pass its folder"
            raise ArgumentError("path", str(path)[:200], "is no file or folder of this machine", remedy)
        self._handles: dict[tuple[Path, str], Any] = {}
        self.folder = path.parent if is_file else path
        self.places: dict[str, Path] = {}
        self.lost: dict[str, str] = {}
        self.unread: list[str] = []
        if is_file and path.name.endswith(".index.json"):
            self._by_index(path)
        elif is_file:
            self.places = dict.fromkeys(self._names(path), path)
        elif (index := _index_of(path)) is not None:
            self._by_index(index)
        else:
            self._by_name()
        for name in [name for name in (*self.places, *self.lost) if len(name) > LONGEST_NAME]:
            constraint = f"has the tensor {name[:50]!r}..., whose name is longer than {LONGEST_NAME} characters"
            raise ArgumentError("path", str(path), constraint, "the checkpoint is damaged: get it again")

    def _by_name(self) -> None:
        """Every *.safetensors of the folder; a tensor that two of them hold is lost."""
        found = [member(self.folder, file.name) for file in sorted(self.folder.glob("*.safetensors"))]
        if not any(found):
            raise ArgumentError("path", str(self.folder), "holds no .safetensors file", remedy_of(self.folder))
        for file in filter(None, found):
            for name in self._names(file):
                if name in self.places:
                    other = self.places[name].name
                    self.lost[name] = (
                        f"{other} and {file.name} both hold {name!r}, and no index says which counts: get the index"
                    )
                self.places.setdefault(name, file)
        for name in self.lost:
            del self.places[name]

    def _by_index(self, index: Path) -> None:
        wanted = _weight_map(index)
        held: dict[str, set[str]] = {}
        broken: dict[str, ArgumentError] = {}
        for shard in sorted(set(wanted.values())):
            file = member(self.folder, shard, index)
            try:
                if file is None:
                    raise ArgumentError("path", shard, "is not there", "get it again, into the folder of its index")
                held[shard] = set(self._names(file))
            except ArgumentError as error:
                broken[shard] = error
        if not held:
            reasons = [f"{shard} {error.constraint}" for shard, error in broken.items()] or ["it names none"]
            constraint = f"no file that it names can be read: {reasons[0]}"
            raise ArgumentError("path", str(index), constraint, "download the folder again")
        for name, shard in wanted.items():
            if shard in broken:
                self.lost[name] = f"{shard} {broken[shard].constraint}: {broken[shard].remedy}"
            elif name not in held[shard]:
                self.lost[name] = f"the index maps {name!r} to {shard}, which does not hold it: get both again"
            else:
                self.places[name] = self.folder / shard
        for shard, names in held.items():
            for name in sorted(names - set(wanted)):
                self.lost[name] = f"{shard} holds {name!r}, which the index does not name: get the index again"
        listed = {self.folder / shard for shard in wanted.values()}
        self.unread = [file.name for file in sorted(self.folder.glob("*.safetensors")) if file not in listed]

    def _names(self, file: Path) -> list[str]:
        return list(self._open(file, "cpu").keys())

    def _open(self, file: Path, device: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if (file, device) not in self._handles:
            try:
                self._handles[file, device] = safe_open(file, framework="pt", device=device)
            except (SafetensorError, OSError, *weights.BROKEN) as error:
                raise ArgumentError(
                    "path", str(file), f"must be a readable safetensors file ({error})", "download the file again"
                ) from None
        return self._handles[file, device]

    def names(self) -> list[str]:
        """Every tensor that a file holds or the index names."""
        return [*self.places, *self.lost]

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """One tensor, loaded onto a device.

        Raises:
            ArgumentError: there is none of that name, its file does not hold it, or torch does not know its dtype.
        """
        return self._read(name, device, lambda file: file.get_tensor(name))

    def part(self, name: str, cut: Cut, device: torch.device | str = "cpu") -> torch.Tensor:
        """What a cut takes of one tensor: no other bytes are read. Errors of `tensor`."""
        return self._read(name, device, lambda file: cut.of(file.get_slice(name)))

    def _read(self, name: str, device: torch.device | str, get: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        from safetensors import SafetensorError

        self._check_held(name)
        to = weights.device_of(device)
        direct = to.type in ("cpu", "cuda")
        try:
            found = get(self._open(self.places[name], weights.device_name(to) if direct else "cpu"))
        except (SafetensorError, *weights.BROKEN) as error:
            constraint = f"{self.places[name].name} does not give it: {error}"
            raise ArgumentError(name, "unreadable", constraint, "get the file again") from None
        return found if direct else found.to(to)

    def _check_held(self, name: object) -> None:
        """Raise ArgumentError for a tensor that no file holds."""
        if name not in self.places:
            seen = name if isinstance(name, str) else type(name).__name__
            reason = self.lost.get(name, "no file of the checkpoint holds it") if isinstance(name, str) else "no name"
            raise ArgumentError("name", seen, reason, "get the missing shard, or the checkpoint again")

    def describe(self, name: str) -> tuple[str, list[int]]:
        """(safetensors dtype such as "F16", shape) without loading."""
        self._check_held(name)
        view = self._open(self.places[name], "cpu").get_slice(name)
        return view.get_dtype(), view.get_shape()


def remedy_of(path: Path) -> str:
    """What to do about a path that is no folder of a model in safetensors files, by what is there."""
    own = path.parent if path.is_file() else path
    if path.suffix == ".gguf" or any(own.glob("*.gguf")):
        return "GGUF's formats are not read: get the model in safetensors files, in 16 bits, AWQ or GPTQ"
    if (own / "adapter_config.json").is_file():
        return "merge the adapter into its model (merge_and_unload of peft), save that, and pass its folder"
    if any(next(own.glob(f"*.{suffix}"), None) for suffix in ("bin", "pt", "pth")):
        return "convert its pickles: transformers' save_pretrained writes safetensors files"
    if path.is_file():
        return "pass the folder of the file, with its config.json"
    return "download it first (huggingface_hub.snapshot_download), and pass its folder"


def member(folder: Path, name: str, index: Path | None = None) -> Path | None:
    """A file of a folder, None if nothing of that name is there.

    Links may lead to other files of the folder, and from a Hugging Face cache's snapshot to its blobs.

    Raises:
        ArgumentError: the name, or a link of that name, leaves the folder; the index is blamed if there is one. What is
            there is no file, but a folder, a pipe or a link to nothing.
    """
    parts = re.split(r"[/\\]", name)
    where = str(folder / "?") if index is None else str(index)
    if not name or "\0" in name or ".." in parts or parts[0].endswith(":") or not parts[0]:
        constraint = f"must name files of its own folder, without '..': {name[:80]!r} is none"
        raise ArgumentError("path", where, constraint, "this checkpoint is not to be trusted: get it elsewhere")
    file = folder / name
    try:
        real, root = file.resolve(), folder.resolve()
        if not real.is_file():
            if not os.path.lexists(file):
                return None
            raise ValueError("it is a folder, a pipe or a link to nothing")
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is too long, no permission
        raise ArgumentError("path", str(file)[:200], f"cannot be read ({error})", "download it again") from None
    blob = real.parent.name == "blobs" and "--" in real.parent.parent.name
    if not real.is_relative_to(root) and not blob:
        constraint = f"is a link that leaves its folder, to {str(real)[:200]}"
        raise ArgumentError("path", str(file), constraint, "pass the folder that holds the file, or copy the file")
    return file


def read_object(path: Path, remedy: str = "download the file again") -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        remedy: of the error.

    Raises:
        ArgumentError: no JSON, no object, more than MOST_JSON bytes, or more than DEEPEST levels.
    """
    try:
        data = data_files.read_json(path, "path", remedy, MOST_JSON)
    except ArgumentError as error:
        raise ArgumentError("path", str(path), f"must hold JSON, but {error.constraint}", remedy) from None
    if not isinstance(data, dict):
        raise ArgumentError("path", str(path), "must hold a JSON object", remedy)
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return data
    raise ArgumentError("path", str(path), f"must hold JSON of at most {DEEPEST} levels", remedy)


def _index_of(folder: Path) -> Path | None:
    """The index of a folder; ArgumentError where there are several and none is the usual one."""
    own = member(folder, "model.safetensors.index.json")
    if own is not None:
        return own
    found = [file for file in sorted(folder.glob("*.safetensors.index.json")) if member(folder, file.name)]
    if len(found) > 1:
        constraint = f"has {len(found)} indices: {', '.join(file.name for file in found[:4])}"
        raise ArgumentError("path", str(folder), constraint, "pass the path of one index")
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, str]:
    """tensor -> name of the file that holds it."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        raise ArgumentError("path", str(index), "must map names of tensors to files (weight_map)", "download it again")
    return found
