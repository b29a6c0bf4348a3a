"""A small engine over pages, in the manner of vLLM's scheduler: chunked prefill, shared prefixes, preemption, aborts.

Its model is one attention layer between a table of embeddings and a table of answers, so that each token depends on
every one before it. What a request says must not depend on how it was served.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from terrazzo.integrations.engines.attention import Kind, Layer, step_of

VOCABULARY = 97


@dataclass(eq=False)
class Request:
    prompt: list[int]
    output: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    aborted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def done(self) -> bool:
        return len(self.tokens) - len(self.prompt) >= self.output or self.aborted

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Model:
    """q, k and v of a token at a position, and the next token of an output row."""

    def __init__(self, kind: Kind, device: str, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        dtype, dim = getattr(torch, kind.dtype), kind.layout.head_dim
        make = lambda *size: torch.randn(*size, generator=rng).to(dtype).to(device)
        self.tables = [make(VOCABULARY, heads, dim) for heads in (kind.heads, kind.kv_heads, kind.kv_heads)]
        self.turns = make(512, 1, dim)
        self.answers = make(VOCABULARY, kind.heads * dim).float()

    def __call__(self, tokens: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
        return [(2 * table[tokens] + 0.5 * self.turns[places]) for table in self.tables]

    def likeliest(self, out: torch.Tensor) -> list[tuple[int, float]]:
        """The next token of each row, and how far the second one is behind, in parts of the largest logit."""
        logits = out.float().flatten(1) @ self.answers.T
        best = logits.topk(2, dim=1)
        gaps = (best.values[:, 0] - best.values[:, 1]) / logits.abs().amax(1)
        return list(zip(best.indices[:, 0].tolist(), gaps.tolist()))


class Engine:
    """Serves requests, each step's new tokens in one batch.

    Args:
        kind: of the layer. pages: how many there are, the first one for padding alone. step_tokens: most of a step.
        sequences: most of a step. share: whether full pages of equal prefixes are shared. padded: decode batches are
            padded to a multiple of four, as captured ones are. speculate: rows of a decode, whose drafts are dropped.
    """

    def __init__(
        self, kind: Kind, pages: int, *, step_tokens: int = 64, sequences: int = 4, share: bool = True,
        padded: bool = False, speculate: int = 0, ragged: bool = False, device: str = "cpu", seed: int = 0,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        size = (pages, kind.kv_heads, kind.page, kind.token_bytes)
        self.cache = torch.zeros(size, dtype=torch.uint8, device=device)
        self.layer = Layer(kind, kind.layout.head_dim**-0.5)
        self.model, self.kind, self.device = Model(kind, device), kind, device
        self.step_tokens, self.sequences, self.share = step_tokens, sequences, share
        self.padded, self.speculate, self.ragged = padded, speculate, ragged
        self.free = list(range(1, pages))
        self.rng = random.Random(seed)
        if shuffle:
            self.rng.shuffle(self.free)
        self.holders: dict[int, int] = {}
        self.known: dict[tuple[int, ...], int] = {}
        self.counts = dict(steps=0, preempted=0, shared=0, aborted=0, chunks=0, mixed=0)

    # -- pages ---------------------------------------------------------------------------------------------------------
    def _take(self) -> int | None:
        if not self.free:
            return None
        page = self.free.pop(0)
        for key in [key for key, held in self.known.items() if held == page]:
            del self.known[key]
        self.holders[page] = 1
        return page

    def _drop(self, request: Request) -> None:
        for page in request.pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)
        request.pages, request.computed = [], 0

    def _reuse(self, request: Request) -> None:
        """Pages of other requests that hold the same first tokens; the last token is always computed."""
        unit = self.kind.page
        for end in range(unit, len(request.tokens), unit) if self.share else ():
            page = self.known.get(tuple(request.tokens[:end]))
            if page is None:
                break
            if self.holders.get(page, 0) == 0:
                self.free.remove(page)
            self.holders[page] = self.holders.get(page, 0) + 1
            request.pages.append(page)
            request.computed = end
            self.counts["shared"] += 1

    def _room(self, request: Request, tokens: int, running: list[Request]) -> bool:
        """Pages for so many tokens, taken from the request that came last where there are none."""
        while len(request.pages) * self.kind.page < tokens:
            page = self._take()
            if page is not None:
                request.pages.append(page)
                continue
            victim = running[-1]
            running.remove(victim)
            self._drop(victim)
            self.waiting.insert(0, victim)
            self.counts["preempted"] += 1
            if victim is request:
                return False
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------
    def serve(self, requests: list[Request], abort: float = 0.0) -> None:
        self.waiting, running = list(requests), []
        while self.waiting or running:
            batch, left = [], self.step_tokens
            for request in list(running):
                if request not in running:
                    continue
                new = min(len(request.tokens) - request.computed, left)
                if new == 1 and self.speculate > 1 and left >= self.speculate:
                    new = self.rng.randrange(1, self.speculate + 1) if self.ragged else self.speculate
                if new and self._room(request, request.computed + new, running):
                    batch.append((request, new))
                    left -= new
            batch = [pair for pair in batch if pair[0] in running]
            while self.waiting and left and len(running) < self.sequences:
                request = self.waiting.pop(0)
                if not request.pages:
                    self._reuse(request)
                new = min(len(request.tokens) - request.computed, left)
                running.append(request)
                if not self._room(request, request.computed + new, running):
                    break
                batch.append((request, new))
                left -= new
            batch = [pair for pair in batch if pair[0] in running]
            batch.sort(key=lambda pair: pair[1] > max(self.speculate, 1))  # decodes first
            self._step(batch)
            for request in [r for r in running if r.done or (abort and self.rng.random() < abort)]:
                request.aborted = not request.done
                self.counts["aborted"] += request.aborted
                running.remove(request)
                self._drop(request)

    def _step(self, batch: list[tuple[Request, int]]) -> None:
        counts = [new for _, new in batch]
        self.counts["steps"] += 1
        self.counts["chunks"] += sum(r.computed + new < len(r.tokens) for r, new in batch)
        self.counts["mixed"] += len({new > max(self.speculate, 1) for new in counts}) == 2
        padding = -len(batch) % 4 if self.padded and len(set(counts)) == 1 and counts[0] <= 8 else 0
        starts = [0]
        for new in counts:
            starts.append(starts[-1] + new)
        starts += starts[-1:] * padding
        room = starts[-1] + padding * counts[0]
        tokens, places, slots = [], [], []
        for request, new in batch:
            known = request.tokens[request.computed : request.computed + new]
            tokens += known + [(known[-1] * 7 + n) % VOCABULARY for n in range(new - len(known))]  # drafts
            for at in range(request.computed, request.computed + new):
                places.append(at)
                slots.append(request.pages[at // self.kind.page] * self.kind.page + at % self.kind.page)
        fill = [0] * (room - len(tokens))
        i32 = dict(dtype=torch.int32, device=self.device)
        q, k, v = self.model(*(torch.tensor(x + fill, device=self.device) for x in (tokens, places)))
        slots = torch.tensor(slots + [-1] * len(fill), dtype=torch.int64, device=self.device)
        lengths = [r.computed + new for r, new in batch] + [0] * padding
        most = max(1, max(len(r.pages) for r, _ in batch))
        table = [r.pages + [0] * (most - len(r.pages)) for r, _ in batch] + [[0] * most] * padding
        self.layer.write(self.cache, k, v, slots)
        step = step_of(
            self.kind, torch.tensor(starts, **i32), starts, torch.tensor(lengths, **i32), torch.tensor(table, **i32),
            max(lengths), room,
        )  # fmt: skip
        out = torch.full_like(q, float("nan"))
        self.layer.attend(step, q, self.cache, out)
        assert bool(out[: starts[len(batch)]].isfinite().all())
        rows = []
        for at, (request, new) in enumerate(batch):
            known = min(new, len(request.tokens) - request.computed)
            rows.append(starts[at] + known - 1)
            request.computed += known
        for (request, _), (token, margin) in zip(batch, self.model.likeliest(out[rows])):
            if request.computed == len(request.tokens):
                request.tokens.append(token)
                request.margins.append(margin)
            unit = self.kind.page
            for end in range(unit, request.computed + 1, unit):
                self.known.setdefault(tuple(request.tokens[:end]), request.pages[end // unit - 1])


def requests(count: int, most: int, seed: int) -> list[Request]:
    """Of random lengths; every other one begins as another one does."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(most)] for _ in range(3)]
    made = []
    for index in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, most))]
        if index % 2:
            prompt = rng.choice(prefixes)[: rng.randrange(1, most)] + prompt[:3]
        made.append(Request(prompt, rng.randrange(1, 6)))
    return made


def alone(kind: Kind, found: list[Request], device: str = "cpu", **options: Any) -> list[Request]:
    """What each says when it is served by itself, its prompt in one piece."""
    said = [Request(request.prompt, request.output) for request in found]
    engine = Engine(kind, 64, step_tokens=4096, sequences=1, share=False, device=device, shuffle=False, **options)
    for request in said:
        engine.serve([request])
    return said


def differing(found: list[Request], said: list[Request], tie: float) -> tuple[int, list[int]]:
    """(tokens that are equal, requests whose answers differ at a token that was no tie); one that was aborted says
    less."""
    equal, wrong = 0, []
    for index, (mine, wanted) in enumerate(zip(found, said)):
        for at, token in enumerate(mine.answer):
            if token != wanted.answer[at]:
                wrong += [index] * (wanted.margins[at] > tie)
                break
            equal += 1
        else:
            wrong += [index] * (not mine.aborted and len(mine.answer) != len(wanted.answer))
    return equal, wrong
