"""Files of weights: one safetensors file each, of the tensors, with the plain fields and a version in its metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import tensor_files, weights
from terrazzo.ops.weights import BROKEN, described, device_name, path_of, tensor_fields

if TYPE_CHECKING:
    import torch

Weight = TypeVar("Weight")


def save(weight: Any, path: str | Path, version: str) -> None:
    """Write one safetensors file: the tensors, and version and plain fields in its metadata. Atomic.

    Raises:
        ArgumentError: the file cannot be written.
    """
    tensors = tensor_fields(weight)
    facts = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    facts = {name: value for name, value in facts.items() if name not in tensors and value is not None}
    path = path_of(path)
    if not path.name:
        raise ArgumentError("path", str(path), "names no file", "name a file in a folder that exists and is yours")
    tensor_files.write_tensors(path, tensors, {"format": "pt", "version": version, "weight": json.dumps(facts)})


def load(make: Callable[..., Weight], path: str | Path, device: str | int | torch.device, *versions: str) -> Weight:
    """Read a file that `save` wrote in one of `versions`: `make` is called with its tensors and plain fields.

    Raises:
        ArgumentError: it is no such file, or a device that is not there.
    """
    from safetensors import SafetensorError, safe_open

    path, to = path_of(path), weights.device_of(device)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no file")  # a pipe would be waited for
        with safe_open(path, framework="pt", device=device_name(to)) as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, *BROKEN) as error:
        raise ArgumentError(
            "path", str(path), f"must be a readable safetensors file ({error})", "write it with PackedWeight.save"
        ) from None
    if meta.get("version") not in versions:
        wanted = " or ".join(map(repr, versions))
        raise ArgumentError(
            "path",
            str(path),
            f"its metadata must name version {wanted}, it names {meta.get('version')!r}",
            "a checkpoint layer is read with load_layer; a packed weight of another version is packed again",
        )
    return made_of(make, tensors, lambda: json.loads(meta["weight"]), "path", str(path))


def made_of(
    make: Callable[..., Weight], tensors: Mapping[str, Any], facts: Callable[[], Any], argument: str, value: Any
) -> Weight:
    """What a class makes of tensors and plain fields of a file.

    Args:
        facts: gives the fields. argument, value: of errors about them.

    Raises:
        ArgumentError: they are not those of the class.
    """
    try:
        made = make(**tensors, **facts())
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        said = f"its tensors and metadata are not those that save writes ({type(error).__name__}: {error})"
        raise ArgumentError(argument, value, said, "save the weight again") from None
    _check_kinds(made)
    return made


def _check_kinds(made: Any) -> None:
    """Raise ArgumentError for fields that a file gives another kind than the class states: `"bias": 5`."""
    import torch

    kinds = {"torch.Tensor": torch.Tensor, "str": str, "bool": bool, "float": (int, float)}
    for field in dataclasses.fields(made):
        stated, value = str(field.type), getattr(made, field.name)
        kind = kinds.get(stated.removesuffix(" | None"))
        if kind is None or (value is None and stated.endswith(" | None")):
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            seen = value if isinstance(value, (bool, int, float)) else described(value)
            raise ArgumentError(field.name, seen, f"must be {stated} in the file", "save the weight again")
