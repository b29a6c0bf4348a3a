"""Proofs about index maps: bijective, coalesced, free of bank conflicts. Each is a rank of a bit matrix."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.layouts.linear import LinearMap, bits_of

BANK_BITS = 5  # 32 banks of one 32-bit word
LANE_BITS = 5


@dataclass(frozen=True)
class Proof:
    """What holds of a packed layout; ``failures`` says in words what does not."""

    bijective: bool
    coalesced: bool
    banks: bool
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything was proved."""
        return self.bijective and self.coalesced and self.banks

    def __str__(self) -> str:
        marks = (("bijective", self.bijective), ("coalesced", self.coalesced), ("banks", self.banks))
        return ", ".join(f"{name} {'yes' if good else 'NO'}" for name, good in marks) + "".join(
            f"; {f}" for f in self.failures
        )


def conflict_degree(addresses: LinearMap) -> int:
    """How many distinct words of one bank a group of lanes asks for at once (1 = free of conflicts).

    Args:
        addresses: any inputs -> (address), counted in 32-bit words. Lanes that read the same word share it (broadcast).
    """
    bank = addresses.restrict(outs={"address": min(BANK_BITS, dict(addresses.outs)["address"])})
    return 1 << (addresses.rank - bank.rank)


def phase_map(memory: LinearMap, load_words: int) -> LinearMap:
    """The part of (word, thread) -> (address) that one phase serves: 32, 16 or 8 lanes for LDS.32, .64, .128."""
    wide = bits_of(load_words, "load_words")
    return memory.restrict({"word": wide, "thread": LANE_BITS - wide})


def prove(index: LinearMap, memory: LinearMap, load_words: int) -> Proof:
    """The proof of a packed block.

    Args:
        index: (field, word, thread) -> (k, row), where each packed field comes from.
        memory: (word, thread) -> (address), where each packed word lies in the block, in 32-bit words.
        load_words: words that a thread fetches with one load (1, 2, 4).
    """
    failures = []
    if not index.is_bijective:
        lost = index.in_bits - index.rank
        missing = index.out_bits - index.rank
        failures.append(
            f"bijective: rank {index.rank} of a {index.out_bits} x {index.in_bits} matrix"
            f" ({1 << lost} fields share each element, 1/{1 << missing} of the block is covered)"
        )
    wide = bits_of(load_words, "load_words")
    vector = memory.restrict({"word": wide})
    warp = memory.restrict({"word": wide, "thread": LANE_BITS})
    whole = vector.columns == tuple(1 << bit for bit in range(wide))
    run = warp.rank == wide + LANE_BITS and all(column < 32 * load_words for column in warp.columns)
    if not whole:
        failures.append(f"coalesced: the {load_words} words of a thread's load are not adjacent and aligned")
    if not run:
        failures.append(f"coalesced: a warp's load is not one aligned run of {128 * load_words} bytes")
    degree = conflict_degree(phase_map(memory, load_words))
    if degree > 1:
        failures.append(f"banks: {degree} words of one bank in a phase of {32 // load_words} lanes")
    return Proof(index.is_bijective, whole and run, degree == 1, tuple(failures))
