"""A model's folder as transformers reads it: configs, tokenizers, and one kind of error for whatever is wrong there.

Files of a folder are data. Their code runs where the caller says `trust_remote_code=True`, and nowhere else: nobody is
asked on standard input. transformers and its parsers raise what they like, Rust's panics among it; `explained` makes
one error of that, which names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError, TerrazzoError, ToolchainError
from terrazzo.nn import claims
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

TRUST = "trust_remote_code"
READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".spm", ".py")
"""Ends of names that transformers may open for a config, a tokenizer or a template."""
OWN_CODE = (
    f"is described by Python code of its folder, which only runs with {TRUST}=True, or --trust-remote-code",
    "read that code first, or get the model in a form that transformers knows",
)


@contextmanager
def explained(argument: str, value: object, constraint: str, remedy: str) -> Iterator[None]:
    """Whatever is raised inside becomes an ArgumentError of this argument, with the beginning of what it said.

    Errors of ours go on, and so do those that end a program.
    """
    try:
        yield
    except TerrazzoError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, as pyo3 has it
            raise
        if TRUST in str(error):
            constraint, remedy = OWN_CODE
        else:
            constraint = f"{constraint} ({said(error)})"
        raise ArgumentError(argument, str(value), constraint, remedy) from error


def said(error: BaseException) -> str:
    """The kind of an error and the beginning of its text, in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_trust(trust_remote_code: object) -> None:
    """Raise ArgumentError for what is neither True nor False."""
    if type(trust_remote_code) is not bool:
        raise ArgumentError(TRUST, trust_remote_code, "must be True or False", "leave it out: no code is run")


def check_files(folder: Path) -> None:
    """Refuse what transformers would wait for or fill the memory with: files that are none, or too large.

    Raises:
        ArgumentError: names the file: a folder, pipe, socket or device, a link to nothing, more than MOST_JSON bytes.
    """
    places = (folder, folder / "additional_chat_templates")
    with explained("path", folder, "cannot be listed", "pass a folder that can be read"):
        found = [Path(entry.path) for place in places if place.is_dir() for entry in os.scandir(place)]
    for file in sorted(file for file in found if file.suffix in READ):
        try:
            state = file.stat()
        except OSError as error:
            raise ArgumentError("path", str(file), f"cannot be read ({error.strerror})", "get it again") from None
        if not S_ISREG(state.st_mode):
            raise ArgumentError(
                "path", str(file), "is no file (a folder, pipe or device)", "remove it, or get it again"
            )
        if state.st_size > files.MOST_JSON:
            constraint = f"has {state.st_size} bytes, and at most {files.MOST_JSON} are read"
            raise ArgumentError("path", str(file), constraint, "get it again")


def config_of(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """transformers' config of a folder.

    Raises:
        ArgumentError: no config.json, one that is damaged, or one that needs the folder's code.
    """
    from transformers import AutoConfig

    file = folder / "config.json"
    if not os.path.lexists(file):
        raise ArgumentError("source", str(folder), "is no folder with a config.json", files.remedy_of(folder))
    check_files(folder)
    claims.check_plain(files.read_object(file))
    remedy = "get the folder again; a model_type that it does not know may need a newer transformers"
    with explained("source", file, "cannot be read", remedy):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def tokenizer_of(folder: str | Path | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """transformers' tokenizer of a folder.

    Raises:
        ArgumentError: no folder, none in it that can be read, or one that needs the folder's code.
        ToolchainError: transformers is not installed.
    """
    remedy = "pass tokenizer=transformers.AutoTokenizer.from_pretrained(...)"
    if not folder or not weights.path_of(folder).is_dir():
        raise ArgumentError("tokenizer", None, "is needed: the model does not know a folder that has one", remedy)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        reason = f"a folder's tokenizer needs transformers ({error}); pip install 'terrazzo[transformers]'"
        raise ToolchainError(reason) from error
    check_files(Path(folder))
    with explained("tokenizer", folder, "has no tokenizer that can be read", remedy):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Token numbers of a text; `special` adds those that the tokenizer puts around every text.

    Raises:
        ArgumentError: whatever the tokenizer makes of its own files only now.
    """
    remedy = "get the tokenizer's files again, or pass tokenizer="
    with explained("tokenizer", _name(tokenizer), "cannot read this text", remedy):
        return list(tokenizer.encode(text, add_special_tokens=special))


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """What tokens stand for, without special ones; errors of `tokens_of`."""
    remedy = "get the tokenizer's files again, or pass tokenizer="
    with explained("tokenizer", _name(tokenizer), "cannot write these tokens", remedy):
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__


def generation_config_of(folder: Path) -> GenerationConfig | None:
    """transformers' generation config of a folder, None where there is none.

    Raises:
        ArgumentError: names the file, which cannot be read.
    """
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not os.path.lexists(file):
        return None
    remedy = "get it again, or remove it: the tokenizer names end tokens too"
    check_files(folder)
    files.read_object(file, remedy)
    with explained("source", file, "cannot be read", remedy):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
