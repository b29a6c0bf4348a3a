"""Caches that transformers hands from step to step, over a `KVCache`. Importing this module imports transformers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NoReturn

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.generation import DecodeStep
from terrazzo.ops.attention import CacheFullError
from terrazzo.ops.attention.kv_cache import Batch, KVCache
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from terrazzo.nn.generation import CausalModel

PAGE = 128
"""Tokens of a page of the caches that models make."""
STEPS = 256
"""Steps of one token for which a cache takes pages ahead, so that one CUDA graph serves them."""
AHEAD = 4096
"""Most tokens of a sequence for which a cache that grows takes room ahead."""
CROPS_TO = "max_length" in inspect.signature(Cache.crop).parameters
"""Whether crop(0) of this release of transformers keeps no token; newer ones remove none."""


class PagedLayer(CacheLayerMixin):
    """What transformers asks of a layer of a cache; keys and values never pass through it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: PagedCache) -> None:
        super().__init__()
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        return None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> NoReturn:
        raise ArgumentError("past_key_values", "update", "stores keys and values itself", "use it with its own model")

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        return self.owner.columns + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.owner.columns

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self.owner.sequences)

    @property
    def is_croppable(self) -> bool:
        return not self.owner.kv.residual_tokens  # a ring forgets


class PagedCache(Cache):
    """A `KVCache` and the sequences of one batch in it.

    Args:
        kv: the cache. layers: what transformers asks. batch: number of sequences that are made in it.
        whole: whether nobody else uses `kv`, which then may grow.

    Attributes:
        columns: of the padded batch so far.
    """

    def __init__(self, kv: KVCache, layers: list[PagedLayer], batch: int, whole: bool = False) -> None:
        self.kv, self.columns, self.whole = kv, 0, whole
        self.sequences = [kv.new() for _ in range(batch)]
        self.counted: list[tuple[int, torch.Tensor | None]] = []  # columns in turn, and which of them are no padding
        super().__init__(layers=layers)

    def note(self, columns: int, mask: torch.Tensor | None) -> None:
        """Count further columns, bool [B, columns] of which are tokens; None for all."""
        self.columns += columns
        if mask is None and self.counted and self.counted[-1][1] is None:
            columns += self.counted.pop()[0]
        self.counted.append((columns, mask))

    def ask(self, tokens: int) -> None:
        """Have room for sequences of so many tokens, where nobody else uses the cache.

        Raises:
            ArgumentError: no such memory.
        """
        if self.whole and tokens > self.kv.max_tokens:
            pages = len(self.sequences) * -(-tokens // self.kv.table.page_size)
            self.kv.grow(pages=pages, max_tokens=tokens)
            self.changed()

    def changed(self) -> None:
        """Drop what was made for the sequences as they were."""

    # -- what callers do -----------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forget all tokens; the sequences, and their room, stay."""
        for sequence in self.sequences:
            self.kv.truncate(sequence, 0)
        self.columns, self.counted = 0, []
        self.changed()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest columns.

        Args:
            tokens_to_remove: -n forgets n columns, n keeps the first n. 0 does what this release of transformers does.

        Raises:
            ArgumentError: no integer; a cache with an f16 ring whose older tokens have left it. Nothing has changed.
        """
        if type(tokens_to_remove) is not int:
            remedy = "pass -n to forget n columns, or n to keep the first n"
            raise ArgumentError("tokens_to_remove", tokens_to_remove, "must be an integer", remedy)
        keeps = tokens_to_remove > 0 or (CROPS_TO and not tokens_to_remove)
        drop = self.columns - tokens_to_remove if keeps else min(-tokens_to_remove, self.columns)
        if drop <= 0:
            return
        left, rows, kept = drop, torch.zeros(len(self.sequences), dtype=torch.int64), list(self.counted)
        while left:
            columns, mask = kept.pop()
            part = min(left, columns)
            rows += part if mask is None else mask[:, columns - part :].sum(1).cpu()
            if part < columns:
                kept.append((columns - part, None if mask is None else mask[:, : columns - part]))
            left -= part
        lengths = {s: self.kv.length(s) - n for s, n in zip(self.sequences, rows.tolist())}
        for sequence, length in lengths.items():
            self.kv.check_truncate(sequence, length)
        for sequence, length in lengths.items():
            self.kv.truncate(sequence, length)
        self.columns, self.counted = self.columns - drop, kept
        self.changed()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence `repeats` times, in a row; pages are shared until one of them writes to them.

        Raises:
            ArgumentError: no integer above 0. CacheFullError: a `KVCache` of others with too few slots.
        """
        if type(repeats) is not int or repeats < 1:
            raise ArgumentError("repeats", repeats, "must be an integer above 0", "pass how often each row comes")
        self._take([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Have the sequences of these rows, in this order; one that comes twice is shared until it differs.

        Args:
            indices: integers [rows], or bool [B].

        Raises:
            ArgumentError: rows that there are not, or none. CacheFullError: a `KVCache` of others with too few slots.
        """
        count = len(self.sequences)
        try:
            rows = torch.arange(count)[torch.as_tensor(indices).cpu()]
        except (IndexError, TypeError, ValueError, RuntimeError):
            rows = torch.empty(0)
        if rows.dim() != 1 or not len(rows):
            constraint = f"must be rows 0..{count - 1}, at least one"
            seen = list(indices.shape) if isinstance(indices, torch.Tensor) else indices
            raise ArgumentError("indices", seen, constraint, "pass integers [rows], or bool for each row")
        self._take(rows.tolist())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See `batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def _take(self, rows: list[int]) -> None:
        table, lost = self.kv.table, set(range(len(self.sequences))) - set(rows)
        missing = len(rows) - len(set(rows)) - len(lost) - table.free_slots
        if missing > 0 and not self.whole:
            raise CacheFullError(f"{len(rows)} rows need {missing} further sequence slots; free a sequence first")
        if missing > 0:
            pages = len(rows) * -(-self.kv.max_tokens // table.page_size)
            self.kv.grow(pages=pages, sequences=len(rows))
        for row in lost:
            self.kv.free(self.sequences[row])
        taken: list[int] = []
        for at, row in enumerate(rows):
            taken.append(self.kv.fork(self.sequences[row]) if row in rows[:at] else self.sequences[row])
        self.sequences = taken
        pick = lambda mask: None if mask is None else mask[torch.tensor(rows, device=mask.device)]
        self.counted = [(columns, pick(mask)) for columns, mask in self.counted]
        self.changed()

    def offload(self, *args: object, **kwargs: object) -> None:
        """Refused: pages stay where kernels read them."""
        raise ArgumentError("offload", type(self).__name__, "stays on its device", 'load the model with kv="int4"')

    prefetch = offload

    def __len__(self) -> int:
        return len(self.kv.pages)


class TerrazzoCache(PagedCache):
    """The cache of a model of `terrazzo.load`.

    Args:
        kv: the cache. batch: number of sequences that are made in it.
        whole: whether nobody else uses `kv`: it then grows with its texts, pages are taken ahead, and steps of one
            token are CUDA graphs.
    """

    def __init__(self, kv: KVCache, batch: int, whole: bool = False) -> None:
        self.steps: DecodeStep | None = None
        super().__init__(kv, [PagedLayer(self) for _ in range(len(kv.pages))], batch, whole)

    def changed(self) -> None:
        self.steps = None

    def extend(self, columns: int, mask: torch.Tensor | None) -> Batch:
        """Room for so many columns of the padded batch, bool [B, columns] of which are tokens; None for all."""
        new = [columns] * len(self.sequences) if mask is None else mask.sum(1).tolist()
        self._grow(max(self.kv.length(s) + n for s, n in zip(self.sequences, new)))
        batch = self.kv.extend(dict(zip(self.sequences, new)))
        self.steps = None
        self.note(columns, mask)
        return batch

    def step(self, model: CausalModel, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor | None:
        """Hidden states [B, hidden] of one more token of each sequence, [B]; None where steps cannot be captured.

        Args:
            model: whose `decoder` runs. positions: integers [B]; None counts tokens.
        """
        held = self.steps
        if held is None or not held.batch.reserved or (held.positions is None) != (positions is None):
            if not self.whole:
                return None
            longest = max(map(self.kv.length, self.sequences))
            self._grow(longest + 1)
            reserve = min(STEPS, self.kv.max_tokens - 1 - longest)
            batch = self.kv.extend(dict.fromkeys(self.sequences, 1), reserve=reserve)
            held = self.steps = DecodeStep(model, batch, positions=positions is not None, head=False)
        self.note(1, None)
        held.tokens.copy_(tokens)
        if positions is not None:
            held.positions.copy_(positions)
        return held().clone()  # the next step writes where this one did

    def _grow(self, longest: int) -> None:
        """Room for a sequence of so many tokens, and for as many more, up to AHEAD."""
        if longest > self.kv.max_tokens:
            self.ask(longest + min(longest, AHEAD))
