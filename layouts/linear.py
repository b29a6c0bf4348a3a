"""Linear maps over bits (F2): the one representation of every index map in Terrazzo.

An index such as ``thread`` is a vector of bits; a layout that only moves and XORs bits is a matrix over F2. Composition is
a matrix product, bijectivity is a rank, coalescing and bank conflicts are ranks of sub-matrices. Source: "Linear Layouts:
Robust Code Generation of Efficient Tensor Computation Using F2" (Zhou et al., 2025), written anew for operand packing.

Dimensions have names and bit widths. The first dimension listed is the least significant one when a map is flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from terrazzo.lowering.errors import LayoutError

Dims = tuple[tuple[str, int], ...]


def bits_of(size: int, what: str = "size") -> int:
    """log2 of a power of two; LayoutError(``what``) for anything else."""
    if size < 1 or size & (size - 1):
        raise LayoutError(what, size, "must be a power of two", "split or pad this dimension")
    return size.bit_length() - 1


def _dims(dims: Mapping[str, int] | Iterable[tuple[str, int]]) -> Dims:
    return tuple(dims.items() if isinstance(dims, Mapping) else dims)


def _offsets(dims: Dims) -> dict[str, tuple[int, int]]:
    table, at = {}, 0
    for name, width in dims:
        table[name] = (at, width)
        at += width
    return table


def _rank(columns: Iterable[int]) -> int:
    """Rank over F2 of column vectors given as integers (Gaussian elimination by highest set bit)."""
    basis: dict[int, int] = {}
    for column in columns:
        while column and column.bit_length() in basis:
            column ^= basis[column.bit_length()]
        if column:
            basis[column.bit_length()] = column
    return len(basis)


@dataclass(frozen=True)
class LinearMap:
    """A linear map over F2 between named bit dimensions.

    Attributes:
        ins, outs: (name, bits) pairs, least significant dimension first.
        columns: for every input bit (flattened, least significant first) its image as a flattened output integer.
    """

    ins: Dims
    outs: Dims
    columns: tuple[int, ...]

    # -- construction --------------------------------------------------------------------------------------------------
    @classmethod
    def from_function(cls, function: Callable[..., Mapping], ins, outs) -> LinearMap:
        """The map that equals ``function(**ins) -> {out: value}`` everywhere.

        ``function`` takes numpy integer arrays. It is read on the unit vectors and then compared on the whole domain;
        a function that is not linear over bits, or that leaves ``outs``, raises LayoutError("function").
        """
        ins, outs = _dims(ins), _dims(outs)
        where = _offsets(ins)
        flat = np.arange(1 << sum(width for _, width in ins), dtype=np.int64)
        split = {name: (flat >> at) & ((1 << width) - 1) for name, (at, width) in where.items()}
        images = function(**split)
        value = np.zeros_like(flat)
        for name, (at, width) in _offsets(outs).items():
            part = np.broadcast_to(np.asarray(images[name], dtype=np.int64), flat.shape)
            if (part >> width).any():
                raise LayoutError("function", name, f"reaches outside its {width} bits", "widen this output dimension")
            value |= part << at
        columns = tuple(int(value[1 << bit]) for bit in range(sum(width for _, width in ins)))
        result = cls(ins, outs, columns)
        if not np.array_equal(result._flat(flat), value):
            raise LayoutError("function", _text(ins), "is not linear over bits", "use XOR and bit moves only")
        return result

    @classmethod
    def identity(cls, dims) -> LinearMap:
        """Every dimension to itself."""
        dims = _dims(dims)
        return cls(dims, dims, tuple(1 << bit for bit in range(sum(width for _, width in dims))))

    @classmethod
    def reshape(cls, ins, outs) -> LinearMap:
        """Regroup the same flattened bits under other names: split, merge or rename dimensions."""
        ins, outs = _dims(ins), _dims(outs)
        width = sum(bits for _, bits in ins)
        if width != sum(bits for _, bits in outs):
            raise LayoutError("outs", _text(outs), f"must have {width} bits as {_text(ins)} has", "match the widths")
        return cls(ins, outs, tuple(1 << bit for bit in range(width)))

    # -- evaluation ----------------------------------------------------------------------------------------------------
    def _flat(self, flat):
        value = flat * 0
        for bit, column in enumerate(self.columns):
            value = value ^ (((flat >> bit) & 1) * column)
        return value

    def __call__(self, **values) -> dict:
        """Apply to ints or numpy integer arrays (broadcast together); returns {out name: value}."""
        flat = 0
        for name, (at, _) in _offsets(self.ins).items():
            flat = flat + (values[name] << at)
        value = self._flat(flat)
        return {name: (value >> at) & ((1 << width) - 1) for name, (at, width) in _offsets(self.outs).items()}

    def table(self) -> np.ndarray:
        """The flattened image of 0 .. 2^in_bits - 1, int64."""
        return self._flat(np.arange(1 << self.in_bits, dtype=np.int64))

    # -- shape ---------------------------------------------------------------------------------------------------------
    @property
    def in_bits(self) -> int:
        return len(self.columns)

    @property
    def out_bits(self) -> int:
        return sum(width for _, width in self.outs)

    @property
    def rank(self) -> int:
        return _rank(self.columns)

    @property
    def is_injective(self) -> bool:
        return self.rank == self.in_bits

    @property
    def is_surjective(self) -> bool:
        return self.rank == self.out_bits

    @property
    def is_bijective(self) -> bool:
        return self.is_injective and self.is_surjective

    @property
    def is_bit_permutation(self) -> bool:
        """Whether every output bit is exactly one input bit: then a transposition does the whole work."""
        return sorted(self.columns) == [1 << bit for bit in range(self.out_bits)]

    # -- algebra -------------------------------------------------------------------------------------------------------
    def __matmul__(self, inner: LinearMap) -> LinearMap:
        """Composition ``self(inner(x))``; inner's outputs are matched to self's inputs by name."""
        if dict(inner.outs) != dict(self.ins):
            raise LayoutError("inner", _text(inner.outs), f"must end in {_text(self.ins)}", "rename or reshape it")
        source = _offsets(inner.outs)
        columns = []
        for image in inner.columns:
            flat = 0
            for name, (at, width) in _offsets(self.ins).items():
                flat |= ((image >> source[name][0]) & ((1 << width) - 1)) << at
            columns.append(self._flat(flat))
        return LinearMap(inner.ins, self.outs, tuple(columns))

    def __add__(self, other: LinearMap) -> LinearMap:
        """Sum of two maps on disjoint inputs into the same outputs (widened as needed): images are XORed."""
        if {name for name, _ in self.ins} & {name for name, _ in other.ins}:
            raise LayoutError("other", _text(other.ins), f"must not share inputs with {_text(self.ins)}", "rename them")
        widths = dict(self.outs)
        for name, width in other.outs:
            widths[name] = max(width, widths.get(name, 0))
        left, right = self.widen(widths), other.widen(widths)
        return LinearMap(left.ins + right.ins, left.outs, left.columns + right.columns)

    def __mul__(self, outer: LinearMap) -> LinearMap:
        """Product: ``self`` acts on the low bits of every dimension and ``outer`` on the high bits (a block diagonal)."""
        ins, outs = _merge(self.ins, outer.ins), _merge(self.outs, outer.outs)
        low, high = dict(self.outs), _offsets(outer.outs)
        inner_at, outer_at = _offsets(self.ins), _offsets(outer.ins)
        columns = []
        for name, _ in ins:
            at, width = inner_at.get(name, (0, 0))
            columns += [
                _move(column, _offsets(self.outs), _offsets(outs), {}) for column in self.columns[at : at + width]
            ]
            at, width = outer_at.get(name, (0, 0))
            columns += [_move(column, high, _offsets(outs), low) for column in outer.columns[at : at + width]]
        return LinearMap(ins, outs, tuple(columns))

    def divide(self, left: LinearMap) -> LinearMap:
        """The quotient q with ``left * q == self``; LayoutError if ``left`` does not tile this map."""
        inner, width_in, width_out = _offsets(self.ins), dict(left.ins), dict(left.outs)
        ins = tuple((name, width - width_in.get(name, 0)) for name, width in self.ins)
        outs = tuple((name, width - width_out.get(name, 0)) for name, width in self.outs)
        if (
            set(width_in) <= set(inner)
            and set(width_out) <= set(dict(self.outs))
            and min(w for _, w in ins + outs) >= 0
        ):
            columns = []
            for name, width in ins:
                at = inner[name][0] + width_in.get(name, 0)
                for column in self.columns[at : at + width]:
                    parts = {out: column >> first for out, (first, _) in _offsets(self.outs).items()}
                    moved = {out: (parts[out] >> width_out.get(out, 0)) & ((1 << bits) - 1) for out, bits in outs}
                    columns.append(sum(moved[out] << first for out, (first, _) in _offsets(outs).items()))
            quotient = LinearMap(ins, outs, tuple(columns))
            if left * quotient == self.order([n for n, _ in left.ins], [n for n, _ in left.outs]):
                return quotient.order([n for n, _ in self.ins], [n for n, _ in self.outs])
        raise LayoutError("left", str(left), "does not divide this map", "compare both maps with str()")

    def inverse(self) -> LinearMap:
        """The inverse of a bijective map (Gauss-Jordan); LayoutError with the missing rank otherwise."""
        if not self.is_bijective:
            shape = f"{self.out_bits} x {self.in_bits} of rank {self.rank}"
            raise LayoutError("map", shape, "must be square and of full rank to be inverted", "drop broadcast bits")
        rows: dict[int, tuple[int, int]] = {}  # pivot bit -> (vector, combination of inputs that makes it)
        for bit, column in enumerate(self.columns):
            made = 1 << bit
            for pivot, (vector, parts) in rows.items():
                if column >> pivot & 1:
                    column, made = column ^ vector, made ^ parts
            pivot = column.bit_length() - 1
            rows = {p: (v ^ column, m ^ made) if v >> pivot & 1 else (v, m) for p, (v, m) in rows.items()}
            rows[pivot] = (column, made)
        return LinearMap(self.outs, self.ins, tuple(rows[bit][1] for bit in range(self.out_bits)))

    # -- views ---------------------------------------------------------------------------------------------------------
    def rename(self, **names: str) -> LinearMap:
        """Rename inputs and outputs."""
        ins, outs = (tuple((names.get(name, name), width) for name, width in dims) for dims in (self.ins, self.outs))
        return LinearMap(ins, outs, self.columns)

    def order(self, ins: list[str], outs: list[str]) -> LinearMap:
        """List the named dimensions first, in that order (the map itself does not change)."""
        new_ins, new_outs = (
            tuple(sorted(dims, key=lambda dim: head.index(dim[0]) if dim[0] in head else len(head)))
            for dims, head in ((self.ins, ins), (self.outs, outs))
        )
        at = _offsets(self.ins)
        columns = [self.columns[at[name][0] + bit] for name, width in new_ins for bit in range(width)]
        moved = [_move(column, _offsets(self.outs), _offsets(new_outs), {}) for column in columns]
        return LinearMap(new_ins, new_outs, tuple(moved))

    def widen(self, outs) -> LinearMap:
        """The same map into wider (or more) output dimensions."""
        outs = _dims(outs)
        moved = tuple(_move(column, _offsets(self.outs), _offsets(outs), {}) for column in self.columns)
        return LinearMap(self.ins, outs, moved)

    def restrict(
        self, ins: Mapping[str, int | range] | None = None, outs: Mapping[str, int] | None = None
    ) -> LinearMap:
        """The sub-matrix of some input bits (a width = low bits, or a range) and of the low bits of some outputs."""
        at = _offsets(self.ins)
        picked = ins if ins is not None else dict(self.ins)
        spans = {name: span if isinstance(span, range) else range(span) for name, span in picked.items()}
        columns = [self.columns[at[name][0] + bit] for name, span in spans.items() for bit in span]
        target = _dims(outs) if outs is not None else self.outs
        source, places = _offsets(self.outs), _offsets(target)
        cut = [
            sum(((c >> source[n][0]) & ((1 << width) - 1)) << first for n, (first, width) in places.items())
            for c in columns
        ]
        return LinearMap(tuple((name, len(span)) for name, span in spans.items()), target, tuple(cut))

    def __str__(self) -> str:
        lines = [f"{_text(self.ins)} -> {_text(self.outs)}"]
        for name, (at, width) in _offsets(self.ins).items():
            for bit in range(width):
                column = self.columns[at + bit]
                parts = {out: (column >> first) & ((1 << w) - 1) for out, (first, w) in _offsets(self.outs).items()}
                image = " ^ ".join(f"{out} {value}" for out, value in parts.items() if value) or "0"
                lines.append(f"  {name} {1 << bit:>3} -> {image}")
        return "\n".join(lines)


def _text(dims: Dims) -> str:
    return "(" + ", ".join(f"{name}:{1 << width}" for name, width in dims) + ")"


def _merge(low: Dims, high: Dims) -> Dims:
    widths, extra = dict(high), dict(low)
    return tuple((n, w + widths.get(n, 0)) for n, w in low) + tuple((n, w) for n, w in high if n not in extra)


def _move(column: int, source: Mapping, target: Mapping, shift: Mapping[str, int]) -> int:
    """Re-place the fields of a flattened output integer, each moved up by shift[name] bits."""
    value = 0
    for name, (at, width) in source.items():
        value |= ((column >> at) & ((1 << width) - 1)) << (target[name][0] + shift.get(name, 0))
    return value
