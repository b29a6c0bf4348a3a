"""Text in, text out: prompts to tokens, the loop of `generation`, and tokens back to text while they come."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import foreign, generation, templates

if TYPE_CHECKING:
    from rich.progress import Progress
    from terrazzo.nn.generation import CausalModel
    from transformers import PreTrainedTokenizerBase

Stream = Callable[[int, str], bool | None]
"""Called with the number of a prompt and the next piece of its text. Returning True ends generation."""
Prompt = str | Sequence[Mapping[str, str]]
"""A text, or with `chat` messages."""
ELSEWHERE = {
    "max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "stop_strings": "stop", "stop_token_ids": "stop",
    "do_sample": "temperature", "streamer": "stream", "on_tokens": "stream", "messages": "prompts", "prompt": "prompts",
    "generator": "seed", "eos_token_id": "model.generation_config.eos_token_id",
    **dict.fromkeys(("kv", "quantize", "device", "dtype", "tensor_parallel"), "load={...}"),
}  # fmt: skip
"""Names that others give to arguments of `generate`."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode the bytes of a character to that has not come as a whole."""


class Pieces:
    """The text of one sequence, token by token, cut where no character is broken.

    The newest tokens are decoded after the tokens of the last piece: what a token stands for depends on the one before
    it (spaces of SentencePiece), and a character can take several tokens.

    Args:
        decode: text of token numbers.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.tokens: list[int] = []
        self.start = self.told = 0

    def push(self, token: int) -> str:
        """What this token makes sure of the text; "" while a character is unfinished."""
        self.tokens.append(token)
        known, text = self.decode(self.tokens[self.start : self.told]), self.decode(self.tokens[self.start :])
        if len(text) <= len(known) or text.endswith(UNFINISHED):
            return ""
        self.start, self.told = self.told, len(self.tokens)
        return text[len(known) :]

    def rest(self) -> str:
        """What is left when no further token comes."""
        known, text = self.decode(self.tokens[self.start : self.told]), self.decode(self.tokens[self.start :])
        self.start = self.told = len(self.tokens)
        return text[len(known) :]


class Cut:
    """A text that ends before the first of some strings, piece by piece; what may be the beginning of one waits.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.waiting, self.ended = stops, "", False

    def push(self, piece: str) -> str:
        """What this piece makes sure of the text, "" after its end."""
        if self.ended:
            return ""
        text = self.waiting + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:  # of several the one that is whole first, as if letters came one by one
            self.waiting, self.ended = "", True
            return text[: min(found)[1]]
        sizes = range(min(len(text), max(map(len, self.stops), default=1) - 1), 0, -1)
        kept = next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)
        self.waiting = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """What has waited, when no further piece comes."""
        text, self.waiting = self.waiting, ""
        return text


def generate(
    model: str | Path | CausalModel,
    prompts: Prompt | Iterable[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat: bool = False,
    stream: bool | Stream = False,
    progress: bool | None = None,
    load: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **unknown: object,
) -> list[str]:
    """The text that a model writes after each prompt.

    Prompts may differ in length: nothing is padded. A sequence ends at an end token of the model's generation config,
    of its config.json where that has none, or else of the tokenizer; at a string of `stop`; or after max_new_tokens.

    Args:
        model: of `terrazzo.load`, or a folder for it.
        prompts: a text, or a list of texts; with `chat` also lists of messages {"role": ..., "content": ...}.
        temperature: 0 takes the most likely token. top_k: 0 for all. top_p: share of probability that is kept.
        min_p: least probability, as a share of the most likely token's. repetition_penalty: 1 for none; divides
            positive logits of tokens that prompt and text have, and multiplies negative ones.
        seed: of sampling; None draws from torch's generator.
        stop: a string or several. The text ends before the first one that appears in it; transformers' `stop_strings`
            end at the same token, and keep the string. Of a special token of the tokenizer, the name.
        tokenizer: of transformers; None reads the folder's.
        chat: put each prompt into the tokenizer's chat template, a text as the user's message.
        stream: True prints the text of a single prompt while it comes (of several ranks, the first prints it); or a
            function, see `Stream`. Pieces of a sequence joined are its text: what may begin a string of `stop` waits.
        progress: a bar on stderr; None shows one on a terminal unless text is printed there.
        load: arguments of `terrazzo.load`, where `model` is a folder.
        trust_remote_code: run Python code of the folder that describes its config or tokenizer. False runs none.

    Raises:
        ArgumentError: prompts that are no texts, no tokenizer, numbers out of range, an argument that there is not.
        NotFiniteError: logits of some sequences are NaN or infinite; `results` has the texts, of these up to there.
        ToolchainError: transformers is not installed.
    """
    _check_known(unknown)
    sampling = generation.Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
    texts, stops = _texts(prompts, chat), _stops(stop)
    if not isinstance(stream, bool) and not callable(stream):
        raise ArgumentError("stream", stream, "must be True, False or a function", "pass stream=True to print")
    if stream is True and len(texts) > 1:
        constraint = f"prints one text, and there are {len(texts)} prompts"
        raise ArgumentError("stream", True, constraint, "pass a function of (prompt number, piece)")
    shown = sys.stderr.isatty() and stream is not True if progress is None else bool(progress)
    failed: list[int] = []
    with ExitStack() as stack:
        bar = _bar(stack) if shown else None
        model, tokenizer = _both(model, tokenizer, load, bar, trust_remote_code)
        prints = stream is True and getattr(getattr(model, "ranks", None), "rank", 0) == 0  # all ranks have the text
        told = (lambda at, piece: print(piece, end="", flush=True)) if prints else None if stream is True else stream
        special, stops = _special(tokenizer, stops)
        listener = _Listener(tokenizer, len(texts), told or None, bar, max_new_tokens, stops)
        try:
            generation.generate(
                model, [_tokens(tokenizer, text, chat) for text in texts], max_new_tokens=max_new_tokens,
                sampling=sampling, eos_token_id=_ends(model, tokenizer) + special, on_tokens=listener,
            )  # fmt: skip
        except generation.NotFiniteError as error:
            failed, dtype = error.rows, error.dtype
        found = listener.finish()
    if prints:
        print(flush=True)
    if failed:
        raise generation.NotFiniteError(failed, found, dtype)
    return found


class _Listener:
    """Texts of all sequences, told and counted as their tokens come."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        count: int,
        told: Stream | None,
        bar: Progress | None,
        most: int,
        stops: Sequence[str] = (),
    ) -> None:
        self.pieces = [Pieces(partial(foreign.text_of, tokenizer)) for _ in range(count)]
        self.cuts = [Cut(stops) for _ in range(count)]
        self.texts, self.told, self.bar = [""] * count, told, bar
        self.task = None if bar is None else bar.add_task("generating", total=most * count)

    def __call__(self, row: list[int | None]) -> bool | list[int]:
        """True where the caller wants no more, or the sequences whose texts have just ended."""
        came = [at for at, token in enumerate(row) if token is not None]
        parts = [(at, self.cuts[at].push(self.pieces[at].push(row[at]))) for at in came]
        if self.task is not None:
            self.bar.advance(self.task, len(came))
        return any([self.tell(at, piece) for at, piece in parts]) or [at for at in came if self.cuts[at].ended]

    def tell(self, at: int, piece: str) -> bool:
        self.texts[at] += piece
        return bool(piece) and self.told is not None and self.told(at, piece) is True

    def finish(self) -> list[str]:
        for at, (pieces, cut) in enumerate(zip(self.pieces, self.cuts)):
            self.tell(at, cut.push(pieces.rest()) + cut.rest())
        return self.texts


def _check_known(unknown: Mapping[str, object]) -> None:
    """Refuse arguments that `generate` does not have."""
    if not unknown:
        return
    name, value = next(iter(unknown.items()))
    known = [each for each in inspect.signature(generate).parameters if each != "unknown"]
    near = ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), None)
    remedy = f"it has {', '.join(known)}" if near is None else f"did you mean {near}?"
    raise ArgumentError(name, value, "is no argument of terrazzo.generate", remedy)


def _stops(given: object) -> list[str]:
    found = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(found, list | tuple | set) or not all(isinstance(stop, str) and stop for stop in found):
        raise ArgumentError("stop", given, "must be a string that is not empty, or several", 'pass stop=["\\n\\n"]')
    return list(found)


def _special(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> tuple[list[int], list[str]]:
    """Tokens that are named by strings which decoded text leaves out, and the other strings."""
    known = {str(token): number for token, number in getattr(tokenizer, "get_added_vocab", dict)().items()}
    names = set(map(str, getattr(tokenizer, "all_special_tokens", ()))) & set(known)
    return [known[stop] for stop in stops if stop in names], [stop for stop in stops if stop not in names]


def _texts(given: object, chat: bool) -> list[Prompt]:
    """One text, or with `chat` one list of messages, for each sequence."""
    messages = lambda it: (
        isinstance(it, Sequence)
        and bool(it)
        and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in it)
    )
    found = [given] if isinstance(given, str) or (chat and messages(given)) else given
    wanted = "texts, or lists of messages" if chat else "texts"
    remedy = "pass a text or a list of texts" if chat else "pass texts; tokens go to terrazzo.nn.generation.generate"
    if not isinstance(found, Iterable) or isinstance(found, Mapping | bytes):
        raise ArgumentError("prompts", type(given).__name__, f"must be {wanted}", remedy)
    found = list(found)
    if not found:
        raise ArgumentError("prompts", found, "must hold at least one text", remedy)
    for each in found:
        if not (isinstance(each, str) or (chat and messages(each))):
            raise ArgumentError("prompts", type(each).__name__, f"each must be one of {wanted}", remedy)
    return found


def _tokens(tokenizer: PreTrainedTokenizerBase, text: Prompt, chat: bool) -> list[int]:
    if chat:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        text = templates.chat_text(tokenizer, messages)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        constraint = f"is no text: its character {error.start} is half of a surrogate pair"
        raise ArgumentError("prompts", ascii(text)[:80], constraint, "decode its bytes as UTF-8") from None
    found = foreign.tokens_of(tokenizer, text, special=not chat)
    if not found:
        raise ArgumentError("prompts", text, "is no token for this tokenizer", "pass a text that is not empty")
    return found


def _ends(model: CausalModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End tokens of the generation config; of the tokenizer, where there are none but those of the config's class."""
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = getattr(tokenizer, "eos_token_id", None)
    if stated is None or (own is not None and stated == getattr(model, "assumed_end", None)):
        stated = own
    return generation.end_tokens(stated)


def _both(
    model: str | Path | CausalModel,
    tokenizer: PreTrainedTokenizerBase | None,
    load: Mapping[str, Any] | None,
    bar: Progress | None,
    trust_remote_code: bool,
) -> tuple[CausalModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, read from the folder where they are not given."""
    folder = model if isinstance(model, str | Path) else getattr(model, "name_or_path", None)
    if isinstance(model, str | Path):
        from terrazzo.nn.loading import load as load_model

        options = {"trust_remote_code": trust_remote_code} | dict(load or {})
        if bar is not None and "progress" not in options:
            task = bar.add_task("loading", total=None)
            options["progress"] = lambda done, total: bar.update(task, completed=done, total=total)
        model = load_model(model, **options)
    elif load:
        raise ArgumentError("load", load, "is for folders, and model is loaded already", "pass it to terrazzo.load")
    elif not all(hasattr(model, name) for name in ("decoder", "lm_head", "new_cache")):
        constraint = "must be a model of terrazzo.load or a folder"
        raise ArgumentError("model", type(model).__name__, constraint, "model = terrazzo.load(folder)")
    if tokenizer is None:
        tokenizer = foreign.tokenizer_of(folder, trust_remote_code)
    elif not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        remedy = "pass transformers.AutoTokenizer.from_pretrained(folder)"
        raise ArgumentError("tokenizer", type(tokenizer).__name__, "must encode and decode", remedy)
    return model, tokenizer


def _bar(stack: ExitStack) -> Progress:
    """A bar on stderr, on a terminal gone when the stack is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)  # in a file its last state stays
    return stack.enter_context(Progress(*columns, console=console, transient=console.is_terminal))
