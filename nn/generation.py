"""Decoding loops: a prompt for each sequence in, new tokens out, one CUDA graph for each step.

The step is captured once for all its replays: embedding, layers, head, and the lengths that grow on the device.
Torch operators after it choose a token. The host reads the tokens of a step while the next one runs, and with
them whether a sequence's logits were finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from terrazzo.lowering import graphs, replacing
from terrazzo.lowering.errors import ArgumentError, TerrazzoError
from terrazzo.nn.config_fields import check_length
from terrazzo.nn.decoder import Decoder, positions_of
from terrazzo.ops import launching
from terrazzo.ops.attention.kv_cache import Batch, KVCache

if TYPE_CHECKING:
    from terrazzo.nn.parallel import TensorParallel
    from transformers.generation import LogitsProcessor

__all__ = ["CausalModel", "NotFiniteError", "Sampling", "generate"]
FAILED = -2
"""In the place of a token whose logits were not finite."""
LEAST, MOST = 1e-30, 1e30
"""Temperatures by which float32 logits can be divided."""


def __dir__() -> list[str]:
    return sorted(__all__)


Listener = Callable[[list[int | None]], bool | Collection[int] | None]
"""Called with a step's token of each sequence, None for those that have ended."""


class CausalModel(Protocol):
    """What `generate` needs of a model.

    Attributes:
        max_positions: tokens that a sequence may have; None, or no such attribute, for any number.
    """

    @property
    def decoder(self) -> Decoder:
        """Embedding, layers and norm."""

    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Logits [T, vocabulary] of hidden states [T, hidden]."""

    def new_cache(self, sequences: int, tokens: int) -> KVCache:
        """A cache for so many sequences of at most `tokens` tokens each."""


class NotFiniteError(TerrazzoError, ArithmeticError):
    """Logits of some sequences were NaN or infinite, which ended these; the others were generated to their ends.

    Attributes:
        rows: numbers of the failed sequences. results: what the call would have returned, where failed sequences end
            before the token that could not be chosen.
    """

    def __init__(
        self,
        rows: Sequence[int],
        results: list[torch.Tensor] | list[str] | torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rows, self.results, self.dtype = list(rows), results, dtype
        remedy = "look for NaN in the checkpoint"
        if dtype == torch.float16:
            remedy = "load the model with dtype=torch.bfloat16: float16 ends at 65504"
        super().__init__(
            f"logits of sequences {self.rows} are not finite, so no token could be chosen for them; {remedy}; what was "
            "generated is in `results` of this error"
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.rows, self.results, self.dtype)


def finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [B]: whether tokens can be chosen by logits [B, vocabulary], some of which may be -inf."""
    return logits.amax(-1).abs() < math.inf  # isfinite is two kernels more


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: tokens among which is chosen, 0 for all. top_p: share of probability that the most likely tokens keep.
        seed: of the generator; None draws from torch's own.
        min_p: least probability, as a share of the most likely token's; 0 for none.
        repetition_penalty: divides positive logits of tokens that the text or its prompt has, and multiplies negative
            ones; 1 for none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        checks = (
            ("top_k", lambda x: x >= 0 and type(x) is int, "must be a whole number from 0 on", "pass 0 for all tokens"),
            ("top_p", lambda x: 0 < x <= 1, "must be in (0, 1]", "pass 1.0 for all tokens"),
            ("min_p", lambda x: 0 <= x <= 1, "must be in [0, 1]", "pass 0 for all tokens"),
            ("repetition_penalty", lambda x: 1e-3 <= x <= 1e3, "must be in [0.001, 1000]", "pass 1.0 for none"),
        )
        for name, fine, constraint, remedy in checks:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not fine(value):
                raise ArgumentError(name, value, constraint, remedy)
        if self.seed is not None and (type(self.seed) is not int or not -(1 << 63) <= self.seed < 1 << 64):
            raise ArgumentError("seed", self.seed, "must be an integer of 64 bits", "pass seed=0, or None for any")

    def processors(self) -> list[LogitsProcessor]:
        """transformers' logits processors in its own order."""
        given: list[tuple[str, float]] = []
        if self.repetition_penalty != 1.0:
            given.append(("RepetitionPenaltyLogitsProcessor", float(self.repetition_penalty)))
        if self.temperature:
            warpers = (
                ("TemperatureLogitsWarper", float(self.temperature), 1.0), ("TopKLogitsWarper", self.top_k, 0),
                ("TopPLogitsWarper", float(self.top_p), 1.0), ("MinPLogitsWarper", float(self.min_p), 0.0),
            )  # fmt: skip
            given += [(name, value) for name, value, idle in warpers if value != idle]
        if not given:
            return []
        from transformers.generation import logits_process

        return [getattr(logits_process, name)(value) for name, value in given]

    def chooser(self, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        """tokens int64 [B] of logits [B, vocabulary] after tokens int64 [B, T], which a repetition penalty reads."""
        processors = self.processors()
        if not self.temperature and not processors:
            return lambda logits, text: logits.argmax(-1)
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

        def choose(logits: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
            scores = logits.float()
            scores = scores.masked_fill(~finite(scores)[:, None], 0)  # a row that fails must not end the others
            for process in processors:
                scores = process(text, scores)
            if not self.temperature:
                return scores.argmax(-1)
            shares = scores.softmax(-1)
            with graphs.lock if shares.is_cuda else nullcontext():
                return torch.multinomial(shares, 1, generator=generator)[:, 0]

        return choose


def check_temperature(value: object) -> None:
    """Raise ArgumentError unless logits can be divided by it, or it is 0."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or LEAST <= value <= MOST)
    if not fine:
        constraint = f"must be 0, or a number in {LEAST}..{MOST}"
        raise ArgumentError("temperature", value, constraint, "pass 0 for greedy decoding")


class DecodeStep:
    """Logits of one more token of each sequence; on a GPU one CUDA graph, from the second step on where each layer's
    own kernel is there.

    Args:
        model: whose `decoder` and `lm_head` run. batch: of `KVCache.extend({...: 1}, reserve=...)`.
        positions: whether the caller writes them to `positions` before each step; else they count tokens.
        head: False gives hidden states in the place of logits.
    """

    def __init__(self, model: CausalModel, batch: Batch, *, positions: bool = False, head: bool = True) -> None:
        self.model, self.batch, self.head = model, batch, head
        with torch.inference_mode(False):  # so that they can be written to outside of it
            self.tokens = torch.zeros(len(batch.sequences), dtype=torch.int64, device=batch.lengths.device)
            self.positions = torch.zeros_like(self.tokens) if positions else None
        self.graph: graphs.Graph | None = None
        self.replays = 0
        self._logits: torch.Tensor | None = None
        self._begun = self._settled = False

    def __call__(self) -> torch.Tensor:
        """[B, vocabulary] of `tokens`, which the caller has written; valid until the next call."""
        if self._begun:
            self.batch.advance(lengths=False)
        if self.graph is not None and self.graph.stream != launching.current_stream(self.tokens):
            self.graph, self._settled = None, False  # its workspaces are those of the stream that it was captured for
        if self.graph is None:
            if self._settled and self.tokens.is_cuda:
                self._capture()
            else:  # a step without a graph compiles and loads what a graph may only launch, and keeps
                settled = replacing.wait(0)
                self._logits = self._run(first=not self._begun)
                self._settled = settled and replacing.wait(0)
        if self.graph is not None:
            self.graph.replay()
            self.replays += 1
        self._begun = True
        return self._logits

    def _run(self, first: bool) -> torch.Tensor:
        if not first:
            self.batch.lengths.add_(1)
        positions = positions_of(self.batch) if self.positions is None else self.positions
        h = self.model.decoder(self.tokens, positions, self.batch)
        return self.model.lm_head(h) if self.head else h

    def _capture(self) -> None:
        self.graph = graphs.Graph(lambda: self._run(first=False), self.tokens.device)
        self._logits = self.graph.made


def checked_prompts(prompts: object, vocabulary: int) -> list[torch.Tensor]:
    """One integer vector for each sequence."""
    remedy = "pass a list of token numbers for each sequence"
    if isinstance(prompts, torch.Tensor) and prompts.dim() < 2:
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | Mapping):
        raise ArgumentError("prompts", type(prompts).__name__, "must be sequences of tokens", remedy)
    found = []
    for prompt in prompts:
        try:
            tokens = torch.as_tensor(prompt)
            seen = f"{tokens.dtype} {list(tokens.shape)}"
            whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
            if tokens.dim() != 1 or not len(tokens) or not whole:
                raise ArgumentError("prompts", seen, "each must be a vector of at least one token number", remedy)
            tokens = tokens.to(torch.int64)  # at first: few operators take unsigned ones
            least, most = int(tokens.min()), int(tokens.max())
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError("prompts", type(prompt).__name__, "must hold token numbers", remedy) from None
        if least < 0 or most >= vocabulary:
            seen = least if least < 0 else most
            constraint = f"tokens must be 0..{vocabulary - 1}"
            raise ArgumentError("prompts", seen, constraint, "use the tokenizer of this model")
        found.append(tokens)
    if not found:
        raise ArgumentError("prompts", [], "must hold at least one sequence", remedy)
    return found


def end_tokens(given: int | Iterable[int] | torch.Tensor | None) -> list[int]:
    """Tokens that end a sequence."""
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    found = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(type(token) is int and -(1 << 63) <= token < 1 << 63 for token in found):
        raise ArgumentError("eos_token_id", given, "must be a token number, or several", "pass tokenizer.eos_token_id")
    return found


@torch.no_grad()
def generate(
    model: CausalModel,
    prompts: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    on_tokens: Listener | None = None,
    cache: KVCache | None = None,
) -> list[torch.Tensor]:
    """New tokens of each prompt, int64 vectors on the CPU, an end token included.

    Args:
        model: a decoder with its head, as `terrazzo.load` makes one.
        prompts: integers [T] of each sequence, its token numbers, of any lengths; nothing is padded.
        max_new_tokens: of each sequence.
        sampling: how tokens are chosen; None is greedy.
        eos_token_id: token, or tokens, that end a sequence. None: all sequences get max_new_tokens.
        on_tokens: called in order with each step's token of each sequence, None for each that has ended; a step
            later than the device. Returning True ends the loop, returning a list of sequences' numbers ends these.
        cache: where keys and values go; None makes one of the needed size. Its sequences are freed again.

    Raises:
        ArgumentError: prompts that are no tokens of the model, or with what is generated too long for it, numbers out
            of range.
        CacheFullError: `cache` has too little room.
        NotFiniteError: logits of some sequences are NaN or infinite, once the others have ended.
    """
    if not hasattr(getattr(model, "decoder", None), "embed_tokens"):
        remedy = "pass a model of terrazzo.load"
        raise ArgumentError("model", type(model).__name__, "must have a decoder and a lm_head", remedy)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be at least 1", "pass a number of tokens")
    table = model.decoder.embed_tokens.weight
    found = checked_prompts(prompts, len(table))
    ends = end_tokens(eos_token_id)
    check_length(max(map(len, found)), max_new_tokens, getattr(model, "max_positions", None))
    longest = max(map(len, found)) + max_new_tokens
    held = model.new_cache(len(found), longest) if cache is None else cache
    sequences: list[int] = []
    try:
        for _ in found:
            sequences.append(held.new())
        first = held.extend({s: len(p) for s, p in zip(sequences, found)})
        tokens = torch.cat(found).to(table.device)
        h = model.decoder(tokens, positions_of(first), first)
        logits = model.lm_head(h[first.starts[1:].long() - 1])
        sampling = _agreed(sampling or Sampling(), getattr(model, "ranks", None), table.device)
        loop = _Loop(model, held, sequences, sampling, ends, max_new_tokens, on_tokens)
        if sampling.repetition_penalty != 1.0:
            loop.text = _texts(found, max_new_tokens).to(table.device)
        made = loop.run(logits)
    finally:
        for sequence in sequences:
            held.free(sequence)
    if loop.failed:
        raise NotFiniteError(sorted(loop.failed), made, table.dtype)
    return made


def _texts(prompts: list[torch.Tensor], new: int) -> torch.Tensor:
    """int64 [B, longest + new]: prompts, and room for new tokens. Behind a shorter one its first token comes again,
    which says nothing new of what the text has."""
    width = max(map(len, prompts))
    rows = [torch.cat([p, p[:1].expand(width - len(p) + new)]) for p in prompts]
    return torch.stack(rows)


def _agreed(sampling: Sampling, ranks: TensorParallel | None, device: torch.device) -> Sampling:
    """With one seed on all ranks, which must draw the same tokens."""
    if ranks is None or not sampling.temperature or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=ranks.agreed(int(torch.randint(1 << 62, ())), device))


class _Loop:
    """Steps after a prefill."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        sequences: list[int],
        sampling: Sampling,
        ends: list[int],
        most: int,
        on_tokens: Listener | None,
    ) -> None:
        device = model.decoder.embed_tokens.weight.device
        self.model, self.cache, self.sequences = model, cache, sequences
        self.choose = sampling.chooser(device)
        self.end_tokens, self.ends = frozenset(ends), torch.tensor(ends, dtype=torch.int64, device=device)
        self.most, self.on_tokens = most, on_tokens
        self.ended = torch.zeros(len(sequences), dtype=torch.bool, device=device)
        self.made = torch.full((most, len(sequences)), -1, dtype=torch.int64, device=device)
        self.shown = torch.empty(self.made.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.events: list[torch.cuda.Event | None] = []
        self.text: torch.Tensor | None = None
        self.kept: dict[int, int] = {}  # sequences that the listener has ended, and how many tokens they keep
        self.failed: set[int] = set()

    def run(self, logits: torch.Tensor) -> list[torch.Tensor]:
        self.note(logits, 0)
        step, count = None, self.most
        for at in range(1, self.most):
            if step is None:
                batch = self.cache.extend(dict.fromkeys(self.sequences, 1), reserve=self.most - 2)
                step = DecodeStep(self.model, batch)
            torch.clamp_min(self.made[at - 1], 0, out=step.tokens)
            self.note(step(), at)
            if self.see(at - 1):  # the device is at work on step `at` meanwhile, which is not wanted then
                count = at
                break
        else:
            self.see(self.most - 1)
        rows = [row[: self.kept.get(at, count)] for at, row in enumerate(self.shown[:count].T)]
        return [row[row >= 0].clone() for row in rows]

    def see(self, at: int) -> bool:
        """Hand on the tokens of step `at`; whether it was the last one that is wanted."""
        if self.events[at] is not None:
            self.events[at].synchronize()
        row = [-1 if number in self.kept else token for number, token in enumerate(self.shown[at].tolist())]
        self.failed |= {number for number, token in enumerate(row) if token == FAILED}
        said = None if self.on_tokens is None else self.on_tokens([t if t >= 0 else None for t in row])
        if isinstance(said, list | tuple | set) and said:
            self.kept |= {number: at + 1 for number in said if number not in self.kept}
            self.ended[list(said)] = True
        over = (t < 0 or t in self.end_tokens or number in self.kept for number, t in enumerate(row))
        return said is True or all(over)

    def note(self, logits: torch.Tensor, at: int) -> None:
        """Choose the tokens of step `at`, and send them to the host."""
        text = None if self.text is None else self.text[:, : self.text.shape[1] - self.most + at]
        chosen = torch.where(finite(logits), self.choose(logits, text), FAILED)
        self.made[at] = chosen.masked_fill_(self.ended, -1)
        if text is not None:
            self.text[:, text.shape[1]] = chosen.clamp_min(0)
        self.ended |= chosen < 0
        if len(self.ends):
            self.ended |= torch.isin(chosen, self.ends)
        self.shown[at].copy_(self.made[at], non_blocking=True)
        event = None
        if logits.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.events.append(event)
