"""Items with one right answer each, made up of token numbers: what a low-bit cache loses shows here.

A small model learns them: `benchmarks.train_small` mixes them into its text, `benchmarks.accuracy` asks others of the
same kinds. An answer is right if every token of it has the largest logit, given the ones before it: that is what a
greedy generation would give.

| task | a row | answer |
|---|---|---|
| copy | `<copy>` words `<is>` words | the words |
| lookup | `<find>` pairs of a key and a value, each of two words, then ASKED times `<is>` key value | each value |
| close | `<close>` brackets that open and close, of KINDS kinds, `<is>` | the closing ones, innermost first |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MARKS = ("<copy>", "<find>", "<close>", "<is>")
WORDS, KINDS, ASKED, OPEN = 128, 8, 8, 12
EVALUATED = {
    "copy 64": ("copy", 64),
    "copy 256": ("copy", 256),
    "lookup 256": ("lookup", 256),
    "lookup 1024": ("lookup", 1024),
    "lookup 4096": ("lookup", 4096),
    "close 128": ("close", 128),
}
"""Name -> (task, tokens of a row)."""


@dataclass(frozen=True)
class Rows:
    """tokens: int64 [rows, length]. answers: int64 [items, tokens], the places of each item's answer in every row."""

    tokens: torch.Tensor
    answers: torch.Tensor

    def labels(self) -> torch.Tensor:
        """int64 [rows, length] for a loss of the answers alone: -100 elsewhere."""
        made = torch.full_like(self.tokens, -100)
        places = self.answers.flatten()
        made[:, places] = self.tokens[:, places]
        return made


class Tasks:
    """Makers of rows over a tokenizer that has MARKS; equal seeds of the generator give equal rows."""

    def __init__(self, tokenizer: Any) -> None:
        self.copy_mark, self.find_mark, self.close_mark, self.is_mark = tokenizer.convert_tokens_to_ids(list(MARKS))
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        words = [i for i, name in enumerate(names) if name[:1] == "Ġ" and name[1:].isascii() and name[1:].isalpha()]
        if len(words) < WORDS:
            raise ValueError(f"the tokenizer has {len(words)} words of letters, items are made of {WORDS}")
        self.words = torch.tensor(words[:WORDS])

    def make(self, task: str, rows: int, length: int, generator: torch.Generator) -> Rows:
        """Rows of at most `length` tokens."""
        return {"copy": self.copy, "lookup": self.lookup, "close": self.close}[task](rows, length, generator)

    def copy(self, rows: int, length: int, generator: torch.Generator) -> Rows:
        count = (length - 2) // 2
        words = self.words[torch.randint(WORDS, (rows, count), generator=generator)]
        tokens = torch.cat([self._mark(self.copy_mark, rows), words, self._mark(self.is_mark, rows), words], 1)
        return Rows(tokens, (torch.arange(count) + count + 2)[None])

    def lookup(self, rows: int, length: int, generator: torch.Generator) -> Rows:
        pairs = (length - 1 - 5 * ASKED) // 4
        keys = torch.rand(rows, WORDS**2, generator=generator).argsort(1)[:, :pairs]  # no key twice
        keys = torch.stack([keys // WORDS, keys % WORDS], 2)
        both = torch.cat([keys, torch.randint(WORDS, (rows, pairs, 2), generator=generator)], 2)
        asked = torch.rand(rows, pairs, generator=generator).argsort(1)[:, :ASKED, None].expand(-1, -1, 4)
        found = self.words[both.gather(1, asked)]
        found = torch.cat([self._mark(self.is_mark, rows)[..., None].expand(-1, ASKED, -1), found], 2)
        tokens = torch.cat([self._mark(self.find_mark, rows), self.words[both].flatten(1), found.flatten(1)], 1)
        return Rows(tokens, 1 + 4 * pairs + 5 * torch.arange(ASKED)[:, None] + torch.tensor([3, 4]))

    def close(self, rows: int, length: int, generator: torch.Generator) -> Rows:
        steps = length - 2 - OPEN
        steps -= (steps - OPEN) % 2  # whatever opens or closes: steps and OPEN are both even or both odd
        stack, depth = torch.zeros(rows, steps + 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        at, made = torch.arange(rows), []
        for step in range(steps):
            kind = torch.randint(KINDS, (rows,), generator=generator)
            opens = torch.rand(rows, generator=generator) < 0.5
            left = steps - step
            opens = (opens | (depth == 0) | (depth + left == OPEN)) & (depth - left != OPEN)
            made.append(torch.where(opens, kind, stack[at, (depth - 1).clamp_min(0)] + KINDS))
            stack[at[opens], depth[opens]] = kind[opens]
            depth += torch.where(opens, 1, -1)
        answer = self.words[stack[:, :OPEN].flip(1) + KINDS]
        walk = self.words[torch.stack(made, 1)]
        tokens = torch.cat([self._mark(self.close_mark, rows), walk, self._mark(self.is_mark, rows), answer], 1)
        return Rows(tokens, (steps + 2 + torch.arange(OPEN))[None])

    @staticmethod
    def _mark(token: int, rows: int) -> torch.Tensor:
        return torch.full((rows, 1), token)

    def packed(self, task: str, rows: int, length: int, size: int, generator: torch.Generator) -> tuple[Any, Any]:
        """(tokens, labels) int64 [rows, length]: rows of `size` tokens one after another, the last place repeated."""
        each = length // size
        made = self.make(task, rows * each, size, generator)
        parts = []
        for x, filler in ((made.tokens, made.tokens[:1, :1]), (made.labels(), torch.full((1, 1), -100))):
            whole = x.view(rows, -1)
            parts.append(torch.cat([whole, filler.expand(rows, length - whole.shape[1])], 1))
        return parts[0], parts[1]


def exact(logits: torch.Tensor, rows: Rows, first: int) -> float:
    """The share of items whose answer is right by logits [rows, length - first, vocabulary] of the places from `first`
    on; the place before an answer says its first token."""
    said = logits[:, rows.answers.flatten() - 1 - first].argmax(-1)
    right = (said == rows.tokens[:, rows.answers.flatten()].to(said.device)).view(len(logits), *rows.answers.shape)
    return right.all(-1).float().mean().item()
