"""Which pages hold which sequence of a paged KV cache: allocation, sharing and copy-on-write, in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral

from terrazzo.lowering.errors import ArgumentError, TerrazzoError


class CacheFullError(TerrazzoError, RuntimeError):
    """The KV cache has too few free pages or sequence slots; the call that asked for them changed nothing."""


@dataclass
class Sequence:
    """Pages of a sequence in order, its tokens, and its residual slot.

    Attributes:
        generation: another one once it is freed, or one of its pages is replaced by a copy.
        unstored: who knows in which layers its newest tokens are not stored; None for nobody.
        longest: tokens that it had at most, as far as its residual ring remembers.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    generation: int = 0
    unstored: Unstored | None = None
    longest: int = 0


class Unstored:
    """Layers in which new tokens are not stored yet, as far as the host sees.

    Attributes:
        layers: their numbers. unseen: whether a traced call may have stored some, too.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.unseen = set(range(layers)), False


class PageTable:
    """Pages and slots of many sequences.

    Args:
        pages: number of pages. page_size: tokens of a page. slots: most sequences at a time.
        stored: how many of so many first tokens lie in pages, not in an f16 residual ring; None for all.
    """

    def __init__(self, pages: int, page_size: int, slots: int, stored: Callable[[int], int] | None = None) -> None:
        self.page_size, self.stored = page_size, stored or (lambda tokens: tokens)
        self.sequences: dict[int, Sequence] = {}
        self.holders = [0] * pages
        """Sequences that hold each page."""
        self._free = list(range(pages - 1, -1, -1))
        self._slots: list[int] = []  # given back; from _unused on they were never taken
        self._unused, self._end = 0, slots
        self._next = 0
        self.generation = 0
        """Sum of the generations of all sequences: while it stays, none has changed."""

    # -- counting ------------------------------------------------------------------------------------------------------
    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def shared_pages(self) -> int:
        """Pages that several sequences hold."""
        return sum(count > 1 for count in self.holders)

    @property
    def free_slots(self) -> int:
        return len(self._slots) + self._end - self._unused

    @property
    def slots(self) -> int:
        return self._end

    def get(self, sequence: int) -> Sequence:
        """Raises ArgumentError for a sequence that does not exist (any more)."""
        try:
            found = self.sequences.get(sequence)
        except TypeError:  # unhashable
            found = None
        if found is None:
            raise ArgumentError("sequence", sequence, "is no sequence of this cache", "make one with new() or fork()")
        return found

    # -- changing ------------------------------------------------------------------------------------------------------
    def new(self) -> int:
        """An empty sequence. Raises CacheFullError without a free slot."""
        if not self.free_slots:
            raise CacheFullError(f"all {len(self.sequences)} sequence slots are taken; free a sequence first")
        self._next += 1
        if not self._slots:
            self._slots.append(self._unused)
            self._unused += 1
        self.sequences[self._next] = Sequence(self._slots.pop())
        return self._next

    def fork(self, sequence: int) -> int:
        """A sequence with the same tokens in the same pages, which are copied when one of the two writes to them."""
        source = self.get(sequence)
        made = self.new()
        self.sequences[made].pages = list(source.pages)
        self.sequences[made].length = source.length
        self.sequences[made].longest = source.longest
        for page in source.pages:
            self.holders[page] += 1
        return made

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of a sequence behind the first `length`, and the pages that only they lie in."""
        found = self.get(sequence)
        found.longest = max(found.longest, found.length) if length else 0
        found.length = length
        kept = -(-self.stored(length) // self.page_size)
        for page in reversed(found.pages[kept:]):
            self._release(page)
        del found.pages[kept:]
        self._changed(found)

    def free(self, sequence: int) -> None:
        """Give back a sequence's slot and the pages that nobody else holds."""
        found = self.get(sequence)
        del self.sequences[sequence]
        self._changed(found)
        for page in found.pages:
            self._release(page)
        self._slots.append(found.slot)

    def grow(self, pages: int, slots: int) -> None:
        """Have so many pages and slots, no fewer than before; whoever knows the tables of sequences must ask again."""
        held = len(self.holders)
        self.holders += [0] * (pages - held)
        self._free = list(range(pages - 1, held - 1, -1)) + self._free
        self._end = slots
        for found in self.sequences.values():
            self._changed(found)

    def _changed(self, found: Sequence) -> None:
        """What was read of its pages before must not be used any more."""
        found.generation += 1
        self.generation += 1

    def _release(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            self._free.append(page)

    def _take(self) -> int:
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def needed(self, sequence: int, new: int) -> tuple[int, list[int]]:
        """(further pages, positions of held pages that `new` more tokens write to) of a sequence."""
        found = self.get(sequence)
        before, after = self.stored(found.length), self.stored(found.length + new)
        held = len(found.pages)
        more = -(-after // self.page_size) - held
        touched = list(range(before // self.page_size, held)) if after > before else []
        return max(more, 0), touched

    def extend(
        self, new: Mapping[int, int], use: Callable[[list[tuple[int, int]]], object] | None = None, reserve: int = 0
    ) -> list[tuple[int, int]]:
        """Make room for new[sequence] more tokens of each sequence, and count them.

        Args:
            use: called with what is returned, once tokens and pages are counted; where it raises, nothing has changed.
            reserve: tokens of each sequence behind the new ones that get pages now, and are not counted.

        Returns:
            (source, target) of each page that was shared and must be copied before the tokens are written.

        Raises:
            CacheFullError: too few free pages; nothing changed. ArgumentError: unknown sequences, negative numbers.
        """
        wanted, writers = 0, {}
        for count in new.values():
            if not isinstance(count, Integral):
                raise ArgumentError("new", count, "must be a number of tokens", "pass {sequence: tokens}")
            if count < 0:
                raise ArgumentError("new", count, "must not be negative", "fork before tokens that may be dropped")
        new = {sequence: int(count) for sequence, count in new.items()}  # numpy's would wrap
        for sequence, count in new.items():
            more, touched = self.needed(sequence, count + reserve)
            wanted += more
            for at in touched:
                writers.setdefault(self.sequences[sequence].pages[at], []).append((sequence, at))
        copies = [  # where all holders write, one of them keeps the page
            place
            for page, places in writers.items()
            if self.holders[page] > 1
            for place in places[len(places) == self.holders[page] :]
        ]
        wanted += len(copies)
        if wanted > len(self._free):
            tokens = sum(new.values()) + reserve * len(new)
            raise CacheFullError(
                f"{tokens} new tokens of {len(new)} sequences need {wanted} pages of {self.page_size} "
                f"tokens, {len(self._free)} of {len(self.holders)} are free; free sequences first"
            )
        before = {s: (self.sequences[s].length, self.sequences[s].unstored) for s in new}
        moved = []
        for sequence, at in copies:
            pages = self.sequences[sequence].pages
            self._changed(self.sequences[sequence])
            source, pages[at] = pages[at], self._take()
            self._release(source)
            moved.append((source, pages[at]))
        added = {s: [self._take() for _ in range(self.needed(s, count + reserve)[0])] for s, count in new.items()}
        for sequence, count in new.items():
            self.sequences[sequence].pages += added[sequence]
            self.sequences[sequence].length += count
        try:
            if use is not None:
                use(moved)
        except BaseException:
            self._undo(before, added, list(zip(copies, moved)))
            raise
        return moved

    def _undo(self, before: Mapping, added: Mapping[int, list[int]], copied: list[tuple]) -> None:
        """Take back what `extend` has just done."""
        for sequence in reversed(added):
            found = self.sequences[sequence]
            del found.pages[len(found.pages) - len(added[sequence]) :]
            for page in reversed(added[sequence]):
                self._release(page)
            found.length, found.unstored = before[sequence]
        for (sequence, at), (source, target) in reversed(copied):
            found = self.sequences[sequence]
            found.pages[at] = source
            self.holders[source] += 1
            self._release(target)
            found.generation, self.generation = found.generation - 1, self.generation - 1

    def rows(self, sequences: Iterable[int]) -> list[list[int]]:
        """Pages of each sequence."""
        return [list(self.get(sequence).pages) for sequence in sequences]
