"""The packed layout of a low-bit operand, derived from (fragment, converter, load).

The derivation is one composition of linear maps (specs.md B.1): a packed field (field, word, thread) becomes, through
the converter's positions, element e of operand register (atom, g); through the fragment, an element of that atom's
tile; through the placement, a position (row, k) of the block:

    (field, word, thread)  --converter, order-->  (value, atom, thread)  --fragment + placement-->  (row, k)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from terrazzo.layouts.converters.base import Converter, get_converter, move_bits
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.linear import LinearMap, bits_of
from terrazzo.layouts.proof import Proof, prove
from terrazzo.lowering.errors import LayoutError

SLAB = 1 << 24  # codes packed at a time: bounds the temporary memory


@dataclass(frozen=True)
class PackedLayout:
    """Where every element of an operand [N, K] lies in packed memory.

    Attributes:
        fragment, placement, order, block_order, storage_bits, load_words: as given to `derive`.
        pos_map, bit_map: (register, element) -> field of a word, and where a word's bits are stored, the converter's.
        map: LinearMap (field, word, thread) -> (k, row) inside a block.
        memory: LinearMap (word, thread) -> (address), the 32-bit word of the block.
        block_rows, block_k, threads: extent of a block and how many threads hold it.
    """

    fragment: Fragment
    pos_map: LinearMap
    storage_bits: int
    load_words: int
    placement: tuple[tuple[int, int], ...]
    order: str
    block_order: str
    map: LinearMap
    memory: LinearMap
    block_rows: int
    block_k: int
    bit_map: tuple[int, ...] = ()

    # -- facts ---------------------------------------------------------------------------------------------------------
    @property
    def threads(self) -> int:
        """Threads that a fragment is spread over."""
        return self.fragment.threads

    @property
    def fields(self) -> int:
        """Fields of one storage word."""
        return 32 // self.storage_bits

    @property
    def words_per_block(self) -> int:
        """32-bit words of a block."""
        return self.threads * self.load_words

    @cached_property
    def identity(self) -> str:
        """Stable name of the byte order: equal identities mean interchangeable packed data."""
        matrix = repr((self.map.ins, self.map.outs, self.map.columns, self.memory.columns, self.block_order))
        matrix += repr(self.bit_map) if self.bit_map else ""
        digest = hashlib.sha256(matrix.encode()).hexdigest()[:12]
        load = f"b{self.storage_bits}.w{self.load_words}.{self.block_rows}x{self.block_k}"
        return f"{self.fragment.name}.{load}.{self.order}.{self.block_order}.{digest}"

    def padded(self, n: int, k: int) -> tuple[int, int]:
        """(N', K'): n and k rounded up to whole blocks."""
        return -(-n // self.block_rows) * self.block_rows, -(-k // self.block_k) * self.block_k

    def blocks(self, n: int, k: int) -> tuple[int, int]:
        """Leading shape of the packed tensor, outermost first (row blocks first for "rk", k blocks first for "kr")."""
        rows, depth = -(-n // self.block_rows), -(-k // self.block_k)
        return (rows, depth) if self.block_order == "rk" else (depth, rows)

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of the packed [n, k], padding included."""
        rows, depth = self.blocks(n, k)
        return 4 * rows * depth * self.words_per_block

    def target(self, word: int, output: int) -> tuple[int, int]:
        """(atom, register): the MMA and the operand register that a converter's output of this word feeds."""
        registers, outputs = self.fragment.registers, self.fragment.bits // self.storage_bits
        index = word * outputs + output
        atoms = len(self.placement)
        return divmod(index, registers) if self.order == "atom" else (index % atoms, index // atoms)

    def prove(self) -> Proof:
        """Bijective, one contiguous run for each warp load, distinct banks in every phase; computed, not remembered."""
        return prove(self.map, self.memory, self.load_words)

    def __str__(self) -> str:
        held = f"{self.threads} threads x {self.load_words} words ({4 * self.words_per_block} bytes)"
        return f"{self.identity}\n  block {self.block_rows} x {self.block_k}, {held}, {self.prove()}\n{self.map}"

    # -- packing -------------------------------------------------------------------------------------------------------
    @cached_property
    def _index(self) -> np.ndarray:
        """Element row * block_k + k of the block for every packed field, in memory order."""
        place = self.memory.inverse()
        fields = LinearMap.identity({"field": bits_of(self.fields)})
        inner = (fields * place).order(["field", "address"], ["field", "word", "thread"])
        return (self.map @ inner).table()

    def pack(self, codes, pad: int = 0):
        """Pack the codes of an operand.

        Args:
            codes: [N, K] numpy or torch (CPU or CUDA), uint8 in 0 .. 2^b - 1, or int8 two's complement in b bits
                (uint16 / int16 bit patterns when b is 16).
            pad: code that fills the rows and columns added to complete the last blocks.
        Returns:
            uint32 (numpy) or int32 (torch, same device) [blocks..., threads * load_words], see `blocks`.
        Raises:
            LayoutError: wrong rank, dtype or range.
        """
        if type(codes).__module__.split(".")[0] == "torch":
            return self._pack_torch(codes, pad)
        codes = self._checked(np.asarray(codes), pad)
        n, k = codes.shape
        if not codes.size:
            return np.empty((*self.blocks(n, k), self.words_per_block), np.uint32)
        (rows, depth), unit = self.padded(n, k), codes.dtype
        if (rows, depth) != (n, k):
            whole = np.full((rows, depth), pad, dtype=unit)
            whole[:n, :k] = codes
            codes = whole
        size, step = self.block_rows * self.block_k, max(1, SLAB // (self.block_rows * depth))
        grid = (rows // self.block_rows, depth // self.block_k)
        out = np.empty((*grid, self.words_per_block), dtype=np.uint32)
        for first in range(0, grid[0], step):
            slab = codes[first * self.block_rows : (first + step) * self.block_rows]
            tiles = slab.reshape(-1, self.block_rows, grid[1], self.block_k).transpose(0, 2, 1, 3).reshape(-1, size)
            packed = self._combine(np.take(tiles, self._index, axis=1)).view(np.uint32)
            out[first : first + step] = self._stored(packed).reshape(-1, *out.shape[1:])
        return out if self.block_order == "rk" else np.ascontiguousarray(out.swapaxes(0, 1))

    def unpack(self, words, n: int, k: int):
        """The codes [n, k] (uint8, uint16 when b is 16) of a packed operand; numpy or torch, the inverse of `pack`.

        Raises:
            LayoutError: words that `pack` does not make of [n, k] codes.
        """
        if type(words).__module__.split(".")[0] == "torch":
            return self._unpack_torch(words, n, k)
        words = np.asarray(words)
        self._check_words(words, words.dtype in (np.uint32, np.int32), n, k)
        if not words.size:
            return np.empty((n, k), self._unit)
        words = self._fields(np.ascontiguousarray(words).view(np.uint32))
        if self.block_order == "kr":
            words = words.swapaxes(0, 1)
        grid = words.shape[:2]
        fields = self._split(np.ascontiguousarray(words).view(self._unit).reshape(-1, words.shape[2] * self._units))
        tiles = np.take(fields, np.argsort(self._index), axis=1).reshape(*grid, self.block_rows, self.block_k)
        return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3).reshape(-1, grid[1] * self.block_k)[:n, :k])

    @property
    def _unit(self):
        return np.uint16 if self.storage_bits == 16 else np.uint8

    @property
    def _units(self) -> int:
        return 32 // max(8, self.storage_bits)

    def _combine(self, fields):
        """[..., fields] codes to [..., bytes]: 8 / b neighbouring fields in each byte. Works for numpy and torch."""
        share = max(1, 8 // self.storage_bits)
        if share == 1:
            return fields
        packed = fields[..., 0::share] * 1
        for part in range(1, share):
            packed |= fields[..., part::share] << (self.storage_bits * part)
        return packed

    def _split(self, units):
        """The inverse of `_combine`."""
        share = max(1, 8 // self.storage_bits)
        if share == 1:
            return units
        mask = (1 << self.storage_bits) - 1
        shape = (*units.shape[:-1], units.shape[-1] * share)
        fields = np.empty(shape, np.uint8) if isinstance(units, np.ndarray) else units.new_empty(shape)
        for part in range(share):
            fields[..., part::share] = (units >> (self.storage_bits * part)) & mask
        return fields

    def _stored(self, words):
        """Words of fields as they lie in memory."""
        return move_bits(words, self.bit_map) if self.bit_map else words

    def _fields(self, words):
        """The inverse of `_stored`."""
        back = tuple(self.bit_map.index(bit) for bit in range(len(self.bit_map)))
        return move_bits(words, back) if back else words

    def _check_words(self, words, known: bool, n: int, k: int) -> None:
        for name, size in (("n", n), ("k", k)):
            if not isinstance(size, (int, np.integer)) or size < 0:
                raise LayoutError(name, size, "must be an integer, not negative", "pass the operand's [N, K]")
        expected = (*self.blocks(n, k), self.words_per_block)
        if not known:
            raise LayoutError("words", str(words.dtype), "must be dense 32-bit integers", "pack with this layout")
        if tuple(words.shape) != expected:
            raise LayoutError(
                "words", tuple(words.shape), f"must have shape {expected} for [{n}, {k}]", "pack with this layout"
            )

    def _checked(self, codes: np.ndarray, pad: int) -> np.ndarray:
        """Rank, dtype and range of numpy codes; the codes as unsigned fields."""
        b = self.storage_bits
        kinds = (np.uint16, np.int16) if b == 16 else (np.uint8, np.int8)
        self._check_form(codes.shape, codes.dtype, codes.dtype in kinds, pad)
        if b in (8, 16):
            return codes.view(self._unit)
        low = -(1 << (b - 1)) if codes.dtype == np.int8 else 0
        self._check_range(codes.min(initial=low), codes.max(initial=low), low)
        return codes if low == 0 else codes.view(np.uint8) & np.uint8((1 << b) - 1)

    def _check_form(self, shape: Sequence[int], dtype, known: bool, pad: int) -> None:
        b = self.storage_bits
        if len(shape) != 2:
            raise LayoutError("codes", f"rank {len(shape)}", "must be [N, K]", "reshape to two dimensions")
        if not known:
            kind = "16-bit integers" if b == 16 else "uint8 or int8"
            raise LayoutError("codes", str(dtype), f"must be {kind}", "convert or view the codes")
        if not isinstance(pad, (int, np.integer)) or not 0 <= pad < 1 << b:
            raise LayoutError("pad", pad, f"must be a code of {b} bits", "use the zero point, or 0 with scale 0")

    def _check_range(self, low: int, high: int, least: int) -> None:
        most = least + (1 << self.storage_bits) - 1
        if low < least or high > most:
            raise LayoutError(
                "codes", (int(low), int(high)), f"must lie in {least} .. {most}", "quantize or mask them first"
            )

    # -- torch ---------------------------------------------------------------------------------------------------------
    def _bit_axes(self) -> list[int]:
        """Axes of [row blocks, row bits..., k blocks, k bits...] that list the packed fields' bits, outermost first."""
        row_bits, k_bits = bits_of(self.block_rows), bits_of(self.block_k)
        source = [int(image).bit_length() - 1 for image in self._index[[1 << b for b in range(row_bits + k_bits)]]]
        return [row_bits + k_bits - b if b >= k_bits else row_bits + 1 + k_bits - b for b in reversed(source)]

    def _pack_torch(self, codes, pad: int):
        import torch

        b = self.storage_bits
        kinds = (torch.uint16, torch.int16) if b == 16 else (torch.uint8, torch.int8)
        if codes.layout is not torch.strided or codes.is_meta:
            raise LayoutError("codes", f"{codes.layout} on {codes.device}", "must be dense and hold data", "load them")
        self._check_form(codes.shape, codes.dtype, codes.dtype in kinds, pad)
        unit = torch.int16 if b == 16 else torch.uint8
        if b < 8 and codes.numel():
            low = -(1 << (b - 1)) if codes.dtype == torch.int8 else 0
            self._check_range(int(codes.min()) if low else 0, int(codes.max()), low)
            codes = codes.view(unit) & ((1 << b) - 1) if low else codes
        codes = codes.contiguous().view(unit)
        n, k = codes.shape
        if not codes.numel():
            return codes.new_empty((*self.blocks(n, k), self.words_per_block), dtype=torch.int32)
        rows, depth = self.padded(n, k)
        if (rows, depth) != (n, k):
            codes = torch.nn.functional.pad(codes, (0, depth - k, 0, rows - n), value=pad)
        grid = (rows // self.block_rows, depth // self.block_k)
        outer = (0, 1) if self.block_order == "rk" else (1, 0)
        if self.map.is_bit_permutation:
            row_bits, k_bits = bits_of(self.block_rows), bits_of(self.block_k)
            bits = codes.view(grid[0], *(2,) * row_bits, grid[1], *(2,) * k_bits)
            blocks = (0, row_bits + 1)
            packed = self._merge(bits.permute(*(blocks[axis] for axis in outer), *self._bit_axes()))
        else:
            tiles = codes.view(grid[0], self.block_rows, grid[1], self.block_k).permute(0, 2, 1, 3)
            tiles = tiles.permute(*outer, 2, 3).reshape(*(grid[axis] for axis in outer), -1)
            packed = self._combine(tiles[..., torch.from_numpy(self._index).to(codes.device)])
        return self._stored(packed.contiguous().view(*(grid[axis] for axis in outer), -1).view(torch.int32))

    def _merge(self, bits):
        """`_combine` on bit axes: the OR runs in the source's memory order, so only packed bytes are transposed."""
        share = max(1, 8 // self.storage_bits)
        pieces = [bits[(..., *(part >> bit & 1 for bit in reversed(range(bits_of(share)))))] for part in range(share)]
        packed = pieces[0]
        for part, piece in enumerate(pieces[1:], start=1):
            packed = packed | piece << (self.storage_bits * part)
        return packed

    def _unpack_torch(self, words, n: int, k: int):
        import torch

        self._check_words(words, words.dtype in (torch.int32, torch.uint32) and words.layout is torch.strided, n, k)
        if not words.numel():
            return words.new_empty((n, k), dtype=torch.int16 if self.storage_bits == 16 else torch.uint8)
        words = self._fields(words.contiguous().view(torch.int32))
        units = words.view(torch.int16 if self.storage_bits == 16 else torch.uint8)
        fields = self._split(units)
        if self.block_order == "kr":
            fields = fields.transpose(0, 1)
        grid = fields.shape[:2]
        if self.map.is_bit_permutation:
            row_bits, k_bits = bits_of(self.block_rows), bits_of(self.block_k)
            axes = [0, row_bits + 1, *self._bit_axes()]
            back = [axes.index(axis) for axis in range(len(axes))]
            tiles = fields.reshape(*grid, *(2,) * (row_bits + k_bits)).permute(*back)
        else:
            inverse = torch.from_numpy(np.argsort(self._index)).to(words.device)
            tiles = fields[..., inverse].view(*grid, self.block_rows, self.block_k).permute(0, 2, 1, 3)
        return tiles.reshape(grid[0] * self.block_rows, grid[1] * self.block_k)[:n, :k].contiguous()


def derive(
    fragment: Fragment,
    converter: str | Converter,
    storage_bits: int,
    load_words: int,
    placement: Sequence[tuple[int, int]] = ((0, 0),),
    order: str = "atom",
    block_order: str = "rk",
    memory: LinearMap | None = None,
) -> PackedLayout:
    """The packed layout that lets a thread fetch its operand registers with one load and one conversion.

    Args:
        fragment: the operand tile of one MMA (an atom).
        converter: storage word to operand registers; only its positions matter here.
        storage_bits: b, bits of one packed element.
        load_words: 32-bit words of one thread's load: 1, 2, 4 (LDS.32, .64, .128).
        placement: (row, k) position of every atom served by the load, counted in atoms.
        order: "atom" (an atom's registers together) or "reg" (one register of every atom together).
        block_order: "rk" (row blocks outermost, k blocks inner) or "kr".
        memory: (word, thread) -> (address); None = each thread's words adjacent, threads in order.
    Raises:
        LayoutError: naming the part that does not fit, or the proof (bijective, coalesced, banks) that fails.
    Source: specs.md B.1.
    """
    converter = get_converter(converter)
    placement = tuple((int(row), int(k)) for row, k in placement)
    _check_parts(fragment, converter, storage_bits, load_words, placement, order, block_order)
    steps = _steps(placement)
    index = _index_map(fragment, converter, load_words, steps, order)
    if memory is None:
        held = {"word": bits_of(load_words), "thread": bits_of(fragment.threads)}
        memory = LinearMap.reshape(held, {"address": sum(held.values())})
    proof = prove(index, memory, load_words)
    if not proof.ok:
        value = f"{fragment.name} x {converter.name}"
        raise LayoutError("layout", value, "; ".join(proof.failures), "change that part")
    extent = dict(index.outs)
    return PackedLayout(
        fragment=fragment,
        pos_map=converter.pos_map,
        storage_bits=storage_bits,
        load_words=load_words,
        placement=placement,
        order=order,
        block_order=block_order,
        map=index,
        memory=memory,
        block_rows=1 << extent["row"],
        block_k=1 << extent["k"],
        bit_map=converter.bit_map,
    )


def _check_parts(fragment, converter, storage_bits, load_words, placement, order, block_order) -> None:
    """Every argument of `derive` alone and against its neighbours."""
    if storage_bits != converter.storage_bits:
        constraint = f"{converter.name} reads {converter.storage_bits}-bit fields"
        raise LayoutError("storage_bits", storage_bits, constraint, "use the converter's width, or another converter")
    if fragment.bits != converter.operand_bits or 1 << fragment.map.in_bits != fragment.threads * fragment.values:
        constraint = f"{converter.name} makes whole operands of {converter.operand_bits} bits"
        raise LayoutError("fragment", fragment.name, constraint, "use a fragment of that width")
    if load_words not in (1, 2, 4):
        raise LayoutError("load_words", load_words, "a thread loads 1, 2 or 4 words", "use LDS.32, .64 or .128")
    for name, value, known in (("order", order, ("atom", "reg")), ("block_order", block_order, ("rk", "kr"))):
        if value not in known:
            raise LayoutError(name, value, f"must be one of {known}", "see derive's documentation")
    made, needed = load_words * converter.outputs, len(placement) * fragment.registers
    if made != needed:
        constraint = f"{load_words} words give {made} registers, {len(placement)} atoms need {needed}"
        raise LayoutError("placement", placement, constraint, "change load_words or the number of atoms")


def _steps(placement: tuple[tuple[int, int], ...]) -> LinearMap:
    """(atom) -> (row, col), counted in atoms."""
    atoms = {"atom": bits_of(len(placement), "placement")}
    corners = np.asarray(placement, dtype=np.int64)
    extent = {axis: bits_of(int(size) + 1, "placement") for axis, size in zip(("row", "col"), corners.max(axis=0))}
    try:
        return LinearMap.from_function(lambda atom: {"row": corners[atom, 0], "col": corners[atom, 1]}, atoms, extent)
    except LayoutError as error:
        remedy = "place atoms by the bits of their number, from (0, 0)"
        raise LayoutError("placement", placement, "is not linear over bits", remedy) from error


def _index_map(fragment: Fragment, converter: Converter, load_words: int, steps: LinearMap, order: str) -> LinearMap:
    """(field, word, thread) -> (k, row): the composition that is the derivation."""
    words, atoms = {"word": bits_of(load_words)}, dict(steps.ins)
    outputs, elements = {"output": bits_of(converter.outputs)}, {"element": bits_of(converter.elements)}
    registers, values = {"register": bits_of(fragment.registers)}, {"value": bits_of(fragment.values)}
    threads = LinearMap.identity({"thread": bits_of(fragment.threads)})
    # a field is an element of an output register of its word
    fields = converter.pos_map.inverse().rename(register="output") * LinearMap.identity(words)
    # output registers in load order are the operand registers, atom by atom or register by register
    inner, outer = (registers, atoms) if order == "atom" else (atoms, registers)
    route = LinearMap.identity(elements) * LinearMap.reshape(outputs | words, inner | outer)
    # an element of a register is a value of the fragment
    value = LinearMap.reshape(elements | registers, values) * LinearMap.identity(atoms)
    tile = fragment.map * steps
    index = tile @ ((value @ route @ fields) * threads)
    return index.rename(col="k").order(["field", "word", "thread"], ["k", "row"])
