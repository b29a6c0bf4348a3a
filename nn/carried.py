"""Files of a model's folder that are no weights and no config: tokenizer, chat templates, processors, licenses."""

from __future__ import annotations

from pathlib import Path

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import tensor_files

PATTERNS = (
    "tokenizer*.json", "tokenizer*.model*", "*.tiktoken", "tekken.json", "spiece.model", "sentencepiece*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenization_*.py",
    "chat_template.*", "additional_chat_templates/*.jinja", "*processor_config.json", "LICENSE*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip
"""What a user of a model needs beside its config and weights, by the names that publishers give it."""


def carry(source: str | Path | None, folder: Path, argument: str = "folder") -> list[str]:
    """Copy those files from a model's folder into another one, as bytes: nothing in them is read or run.

    Args:
        source: a folder; anything else has none of them. folder: where they go, in the place of equal names.
        argument: what the caller names `folder` by.

    Returns:
        their names, sorted.

    Raises:
        ArgumentError: one cannot be read or written.
    """
    if source is None or not (root := Path(source)).is_dir() or root.resolve() == folder.resolve():
        return []
    found = sorted({path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file()})
    for path in found:
        there = folder / path.relative_to(root)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArgumentError("source", str(path), f"cannot be read ({error.strerror})", "get it again") from None
        with tensor_files.named(argument, there):
            there.parent.mkdir(exist_ok=True)
        tensor_files.write_bytes(there, data, argument)
    return [path.relative_to(root).as_posix() for path in found]
