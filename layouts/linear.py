"""Linear maps over bits (F2): the one representation of every index map in Terrazzo.

An index such as ``thread`` is a vector of bits; a layout that only moves and XORs bits is a matrix over F2. Composition
is a matrix product, bijectivity is a rank, coalescing and bank conflicts are ranks of sub-matrices. Source: "Linear
Layouts: Robust Code Generation of Efficient Tensor Computation Using F2" (Zhou et al., 2025), written anew for operand
packing.

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


def _width(dims: Dims) -> int:
    return sum(width for _, width in dims)


def _split(flat, dims: Dims) -> dict:
    """A flattened index (int or array) as {name: value}."""
    parts = {}
    for name, width in dims:
        parts[name] = flat & ((1 << width) - 1)
        flat = flat >> width
    return parts


def _join(parts: Mapping, dims: Dims):
    """{name: value} flattened; names that are missing count as 0, bits beyond a width are dropped."""
    flat, at = 0, 0
    for name, width in dims:
        flat = flat | (parts.get(name, 0) & ((1 << width) - 1)) << at
        at += width
    return flat


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
        flat = np.arange(1 << _width(ins), dtype=np.int64)
        images = {name: np.asarray(image, dtype=np.int64) for name, image in function(**_split(flat, ins)).items()}
        for name, width in outs:
            if (images[name] >> width).any():
                raise LayoutError("function", name, f"reaches outside its {width} bits", "widen this output dimension")
        value = np.broadcast_to(_join(images, outs), flat.shape)
        result = cls(ins, outs, tuple(int(value[1 << bit]) for bit in range(_width(ins))))
        if not np.array_equal(result._flat(flat), value):
            raise LayoutError("function", _text(ins), "is not linear over bits", "use XOR and bit moves only")
        return result

    @classmethod
    def identity(cls, dims) -> LinearMap:
        """Every dimension to itself."""
        dims = _dims(dims)
        return cls(dims, dims, tuple(1 << bit for bit in range(_width(dims))))

    @classmethod
    def reshape(cls, ins, outs) -> LinearMap:
        """Regroup the same flattened bits under other names: split, merge or rename dimensions."""
        ins, outs = _dims(ins), _dims(outs)
        if _width(ins) != _width(outs):
            raise LayoutError("outs", _text(outs), f"must have as many bits as {_text(ins)}", "match the widths")
        return cls(ins, outs, tuple(1 << bit for bit in range(_width(ins))))

    # -- evaluation ----------------------------------------------------------------------------------------------------
    def _flat(self, flat):
        value = flat * 0
        for bit, column in enumerate(self.columns):
            value = value ^ (((flat >> bit) & 1) * column)
        return value

    def __call__(self, **values) -> dict:
        """Apply to ints or numpy integer arrays (broadcast together); returns {out name: value}."""
        missing = {name for name, _ in self.ins} ^ set(values)
        if missing:
            raise LayoutError("values", tuple(sorted(missing)), f"must be {_text(self.ins)}", "name every input once")
        return _split(self._flat(_join(values, self.ins)), self.outs)

    def table(self) -> np.ndarray:
        """The flattened image of 0 .. 2^in_bits - 1, int64."""
        return self._flat(np.arange(1 << self.in_bits, dtype=np.int64))

    # -- shape ---------------------------------------------------------------------------------------------------------
    @property
    def in_bits(self) -> int:
        """Bits of all inputs."""
        return len(self.columns)

    @property
    def out_bits(self) -> int:
        """Bits of all outputs."""
        return _width(self.outs)

    @property
    def rank(self) -> int:
        """Rank of the matrix over GF(2)."""
        return _rank(self.columns)

    @property
    def is_injective(self) -> bool:
        """Whether no two inputs have the same output."""
        return self.rank == self.in_bits

    @property
    def is_surjective(self) -> bool:
        """Whether every output has an input."""
        return self.rank == self.out_bits

    @property
    def is_bijective(self) -> bool:
        """Whether every output has exactly one input."""
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
        columns = tuple(self._flat(_join(_split(image, inner.outs), self.ins)) for image in inner.columns)
        return LinearMap(inner.ins, self.outs, columns)

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
        """Product: ``self`` acts on the low bits of every dimension, ``outer`` on the high bits (a block diagonal)."""
        outs, low = _stack(self.outs, outer.outs), dict(self.outs)

        def raised(column: int) -> int:
            return _join({n: part << low.get(n, 0) for n, part in _split(column, outer.outs).items()}, outs)

        inner = self.widen(outs)._by_input()
        outer_columns = {name: [raised(c) for c in columns] for name, columns in outer._by_input().items()}
        ins = _stack(self.ins, outer.ins)
        return LinearMap(ins, outs, tuple(c for n, _ in ins for c in inner.get(n, []) + outer_columns.get(n, [])))

    def divide(self, left: LinearMap) -> LinearMap:
        """The quotient q with ``left * q == self``; LayoutError if ``left`` does not tile this map."""
        low_in, low_out = dict(left.ins), dict(left.outs)
        ins = tuple((name, width - low_in.get(name, 0)) for name, width in self.ins)
        outs = tuple((name, width - low_out.get(name, 0)) for name, width in self.outs)
        known = low_in.keys() <= dict(ins).keys() and low_out.keys() <= dict(outs).keys()
        if known and all(width >= 0 for _, width in ins + outs):
            columns = []
            for name, held in self._by_input().items():
                for column in held[low_in.get(name, 0) :]:
                    parts = _split(column, self.outs)
                    columns.append(_join({n: part >> low_out.get(n, 0) for n, part in parts.items()}, outs))
            quotient = LinearMap(ins, outs, tuple(columns))
            if (left * quotient).order(*self._names()) == self:
                return quotient
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
        columns = self.widen(new_outs)._by_input()
        return LinearMap(new_ins, new_outs, tuple(c for name, _ in new_ins for c in columns[name]))

    def widen(self, outs) -> LinearMap:
        """The same map into wider, more, or reordered output dimensions (high bits of narrower ones are dropped)."""
        outs = _dims(outs)
        return LinearMap(self.ins, outs, tuple(_join(_split(c, self.outs), outs) for c in self.columns))

    def restrict(self, ins: Mapping[str, int | range] | None = None, outs=None) -> LinearMap:
        """The sub-matrix of some input bits (a width = low bits, or a range) and of the low bits of some outputs."""
        columns = self._by_input()
        spans = {
            n: s if isinstance(s, range) else range(s) for n, s in (dict(self.ins) if ins is None else ins).items()
        }
        kept = tuple(columns[name][bit] for name, span in spans.items() for bit in span)
        part = LinearMap(tuple((name, len(span)) for name, span in spans.items()), self.outs, kept)
        return part if outs is None else part.widen(outs)

    def _by_input(self) -> dict[str, list[int]]:
        columns = iter(self.columns)
        return {name: [next(columns) for _ in range(width)] for name, width in self.ins}

    def _names(self) -> tuple[list[str], list[str]]:
        return [name for name, _ in self.ins], [name for name, _ in self.outs]

    def __str__(self) -> str:
        lines = [f"{_text(self.ins)} -> {_text(self.outs)}"]
        for name, columns in self._by_input().items():
            for bit, column in enumerate(columns):
                parts = _split(column, self.outs).items()
                image = " ^ ".join(f"{out} {value}" for out, value in parts if value) or "0"
                lines.append(f"  {name} {1 << bit:>3} -> {image}")
        return "\n".join(lines)


def _text(dims: Dims) -> str:
    return "(" + ", ".join(f"{name}:{1 << width}" for name, width in dims) + ")"


def _stack(low: Dims, high: Dims) -> Dims:
    """The dimensions of a product: low's widths under high's."""
    widths, first = dict(high), dict(low)
    return tuple((n, w + widths.get(n, 0)) for n, w in low) + tuple((n, w) for n, w in high if n not in first)
