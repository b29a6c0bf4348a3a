"""Files that are written for users: whole or not at all, with modes by the umask, and equal bytes for equal contents.

safetensors' own writer orders metadata at random, gives files mode 0600, and leaves its parts where it is killed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    import torch

SCRATCH = re.compile(r"\.[0-9a-f]{16}\.part")
"""Names of files in the making."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""torch's names of dtypes -> those of safetensors."""


@contextmanager
def named(argument: str, path: Path) -> Iterator[None]:
    """What the system says of writing to `path` is an ArgumentError that names it, and what to do."""
    try:
        yield
    except OSError as error:
        one = "a file in a folder that exists and is yours" if argument == "path" else "a folder that can be written"
        remedy = "make room there, and start again" if error.errno in _FULL else f"name {one}"
        constraint = f"cannot be written ({error.strerror or error})"
        raise ArgumentError(argument, str(path), constraint, remedy) from None


@contextmanager
def replacing(path: Path, argument: str = "path") -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends: on the disk, whole.

    Raises:
        ArgumentError: names `argument`: it cannot be written. What was at `path` stays.
    """
    scratch = path.with_name(f".{secrets.token_hex(8)}.part")  # without its name, which may have 255 bytes
    with named(argument, path):
        try:
            with open(scratch, "xb") as file:  # follows no link that somebody put there
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        finally:
            with suppress(OSError):  # it may never have been there, and must not hide the error
                scratch.unlink()


def write_bytes(path: Path, data: bytes, argument: str = "path") -> None:
    """Arguments and errors as `replacing`."""
    with replacing(path, argument) as file:
        file.write(data)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], argument: str = "path"
) -> str:
    """Write a safetensors file; its sha256 in hexadecimal digits. Tensors may lie on any device, and share memory.

    Raises:
        ArgumentError: names `argument`: the file cannot be written. Names a tensor: of a dtype that no file holds.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as safetensors does it
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in order:
        tensor, kind = tensors[name], str(tensors[name].dtype).removeprefix("torch.")
        if kind not in _DTYPES:
            raise ArgumentError(name, kind, "is a dtype that safetensors files do not hold", "write another dtype")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[kind], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head, digest = struct.pack("<Q", len(text)) + text, hashlib.sha256()
    with replacing(path, argument) as file:
        for piece in chain([head], (_bytes(tensors[name]) for name in order)):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return memoryview(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy())


def digest_of(path: Path) -> str:
    """sha256 of a file in hexadecimal digits. OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
