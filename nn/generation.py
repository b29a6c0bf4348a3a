"""Decoding loops: a prompt for each sequence in, new tokens out, one CUDA graph for each step.

The step is captured once for all its replays: embedding, layers, head, and the lengths that grow on the device.
Choosing a token is torch operators behind it. The host reads the tokens of a step while the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from terrazzo.lowering import graphs, replacing
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.config_fields import check_length
from terrazzo.nn.decoder import Decoder, positions_of
from terrazzo.ops import launching
from terrazzo.ops.attention.kv_cache import Batch, KVCache

__all__ = ["CausalModel", "Sampling", "generate"]


def __dir__() -> list[str]:
    return sorted(__all__)


class CausalModel(Protocol):
    """What `generate` needs of a model.

    Attributes:
        decoder: embedding, layers and norm.
        max_positions: tokens that a sequence may have; None, or no such attribute, for any number.
    """

    decoder: Decoder

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocabulary] of hidden states [T, hidden]."""

    def new_cache(self, sequences: int, tokens: int) -> KVCache:
        """A cache for so many sequences of at most `tokens` tokens each."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: tokens among which is chosen, 0 for all. top_p: share of probability that the most likely tokens keep.
        seed: of the generator; None draws from torch's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", lambda x: x >= 0, "must be at least 0", "pass 0 for greedy decoding"),
            ("top_k", lambda x: x >= 0 and type(x) is int, "must be a whole number from 0 on", "pass 0 for all tokens"),
            ("top_p", lambda x: 0 < x <= 1, "must be in (0, 1]", "pass 1.0 for all tokens"),
        )
        for name, fine, constraint, remedy in checks:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not fine(value):
                raise ArgumentError(name, value, constraint, remedy)
        if self.seed is not None and (type(self.seed) is not int or not -(1 << 63) <= self.seed < 1 << 64):
            raise ArgumentError("seed", self.seed, "must be an integer of 64 bits", "pass seed=0, or None for any")

    def processors(self) -> list[Any]:
        """transformers' logits processors in its own order."""
        if not self.temperature or (self.temperature == 1.0 and not self.top_k and self.top_p == 1.0):
            return []
        from transformers.generation import logits_process as made

        found: list[Any] = []
        if self.temperature != 1.0:
            found.append(made.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(made.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            found.append(made.TopPLogitsWarper(self.top_p))
        return found

    def chooser(self, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """tokens int64 [B] of logits [B, vocabulary]."""
        if not self.temperature:
            return lambda logits: logits.argmax(-1)
        processors = self.processors()
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

        def choose(logits: torch.Tensor) -> torch.Tensor:
            scores = logits.float()
            for process in processors:
                scores = process(None, scores)
            shares = scores.softmax(-1)
            with graphs.lock if shares.is_cuda else nullcontext():
                return torch.multinomial(shares, 1, generator=generator)[:, 0]

        return choose


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


def checked_prompts(prompts: Any, vocabulary: int) -> list[torch.Tensor]:
    """One integer vector for each sequence."""
    given = [prompts] if isinstance(prompts, torch.Tensor) and prompts.dim() == 1 else prompts
    remedy = "pass a list of token numbers for each sequence"
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise ArgumentError("prompts", type(prompts).__name__, "must be sequences of tokens", remedy)
    found = []
    for prompt in given:
        try:
            tokens = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError("prompts", type(prompt).__name__, "must hold token numbers", remedy) from None
        if tokens.dim() != 1 or not len(tokens) or tokens.is_floating_point() or tokens.is_complex():
            seen = f"{tokens.dtype} {list(tokens.shape)}"
            raise ArgumentError("prompts", seen, "each must be a vector of at least one token number", remedy)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocabulary:
            seen = least if least < 0 else most
            constraint = f"tokens must be 0..{vocabulary - 1}"
            raise ArgumentError("prompts", seen, constraint, "use the tokenizer of this model")
        found.append(tokens.to(torch.int64))
    if not found:
        raise ArgumentError("prompts", [], "must hold at least one sequence", remedy)
    return found


def _ends(given: Any) -> list[int]:
    """Tokens that end a sequence."""
    found = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(type(token) is int for token in found):
        raise ArgumentError("eos_token_id", given, "must be a token number, or several", "pass tokenizer.eos_token_id")
    return found


@torch.no_grad()
def generate(
    model: CausalModel,
    prompts: Sequence[Any] | torch.Tensor,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    on_tokens: Callable[[list[int | None]], Any] | None = None,
    cache: KVCache | None = None,
) -> list[torch.Tensor]:
    """New tokens of each prompt, int64 vectors on the CPU, an end token included.

    Args:
        model: a decoder with its head, as `terrazzo.load` makes one.
        prompts: integers [T] of each sequence, its token numbers, of any lengths; nothing is padded.
        max_new_tokens: of each sequence.
        sampling: how tokens are chosen; None is greedy.
        eos_token_id: token, or tokens, that end a sequence. None: all sequences get max_new_tokens.
        on_tokens: called in order with each step's token of each sequence, None for those that have ended; a step
            behind the device. Returning True ends the loop.
        cache: where keys and values go; None makes one of the needed size. Its sequences are freed again.

    Raises:
        ArgumentError: prompts that are no tokens of the model, or with what is generated too long for it, numbers out
            of range.
        CacheFullError: `cache` has too little room.
    """
    if not hasattr(getattr(model, "decoder", None), "embed_tokens"):
        remedy = "pass a model of terrazzo.load"
        raise ArgumentError("model", type(model).__name__, "must have a decoder and a lm_head", remedy)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be at least 1", "pass a number of tokens")
    table = model.decoder.embed_tokens.weight
    found = checked_prompts(prompts, len(table))
    ends = _ends(eos_token_id)
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
        return loop.run(logits)
    finally:
        for sequence in sequences:
            held.free(sequence)


def _agreed(sampling: Sampling, ranks: Any, device: torch.device) -> Sampling:
    """With one seed on all ranks, which must draw the same tokens."""
    if ranks is None or not sampling.temperature or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=ranks.agreed(int(torch.randint(1 << 62, ())), device))


class _Loop:
    """Steps behind a prefill."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        sequences: list[int],
        sampling: Sampling,
        ends: list[int],
        most: int,
        on_tokens: Callable[[list[int | None]], Any] | None,
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

    def run(self, logits: torch.Tensor) -> list[torch.Tensor]:
        self.note(logits, 0)
        step, count = None, self.most
        for at in range(1, self.most):
            if step is None:
                batch = self.cache.extend(dict.fromkeys(self.sequences, 1), reserve=self.most - 2)
                step = DecodeStep(self.model, batch)
            step.tokens.copy_(self.made[at - 1].clamp_min(0))
            self.note(step(), at)
            if self.see(at - 1):  # the device is at work on step `at` meanwhile, which is not wanted then
                count = at
                break
        else:
            self.see(self.most - 1)
        return [row[row >= 0].clone() for row in self.shown[:count].T]

    def see(self, at: int) -> bool:
        """Hand on the tokens of step `at`; whether it was the last one that is wanted."""
        if self.events[at] is not None:
            self.events[at].synchronize()
        row = self.shown[at].tolist()
        stop = self.on_tokens is not None and self.on_tokens([t if t >= 0 else None for t in row]) is True
        return stop or all(token < 0 or token in self.end_tokens for token in row)

    def note(self, logits: torch.Tensor, at: int) -> None:
        """Choose the tokens of step `at`, and send them to the host."""
        chosen = self.choose(logits)
        self.made[at] = torch.where(self.ended, -1, chosen)
        if len(self.ends):
            self.ended |= torch.isin(chosen, self.ends)
        self.shown[at].copy_(self.made[at], non_blocking=True)
        event = None
        if logits.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.events.append(event)
