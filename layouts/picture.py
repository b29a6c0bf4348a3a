"""A packed layout on the screen: who holds what, where it lies in memory, which bank each lane hits.

Both renderings, text and SVG, draw the same `Story`, which is computed from the layout's maps and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
from terrazzo.layouts.converters.base import get_converter
from terrazzo.layouts.instances import INSTANCES, get_instance
from terrazzo.layouts.linear import LinearMap, bits_of
from terrazzo.layouts.packed import PackedLayout
from terrazzo.layouts.proof import BANK_BITS, LANE_BITS, conflict_degree, phase_map

LANE = 6  # the lane whose elements are followed through the picture
PITCH = 128  # bytes of a row of the unpacked tile, as a TMA tile has them


@dataclass(frozen=True)
class Story:
    """What a picture of an instance shows.

    Attributes:
        tile: [(row, first k, lane, register)], the runs of one MMA's operand in warp 0.
        words: for every word of LANE's load, its fields (lowest first) as (row, k, register, atom).
        before, after: passes of the shared-memory loads; a pass is {bank: (first lane, last lane)}.
        loads_before: loads a thread needs to gather the same elements from row-major storage.
    """

    name: str
    note: str
    converter: str
    layout: PackedLayout
    tile: list[tuple[int, int, int, int]]
    words: list[list[tuple[int, int, int, int]]]
    before: list[dict[int, tuple[int, int]]]
    after: list[dict[int, tuple[int, int]]]
    loads_before: int
    degree_before: int
    degree_after: int

    @property
    def operand(self) -> str:
        """Letter of the MMA operand: "A" or "B"."""
        return "B" if "_b" in self.layout.fragment.name else "A"

    @property
    def facts(self) -> list[str]:
        """The findings, one sentence each."""
        w, loads = self.layout.load_words, self.loads_before
        after, run = len(self.after), 128 * w
        return [
            f"row-major: {loads} loads a thread x {len(self.before)} passes = {loads * len(self.before)} passes a warp",
            f"packed: one LDS.{32 * w} a thread, {after} pass{'es' if after > 1 else ''} of 32 different banks",
            f"a warp's load is one run of {run} bytes; the block is {4 * self.layout.words_per_block} bytes",
        ]


def row_major(layout: PackedLayout) -> LinearMap:
    """(value, thread) -> (address): the 32-bit word of each element in a row-major tile with rows of PITCH bytes."""
    codes = bits_of(32 // layout.storage_bits)
    rows, cols = (width for _, width in layout.fragment.map.outs)
    pitch = bits_of(PITCH // 4)
    columns = [1 << (pitch + bit) for bit in range(rows)] + [
        1 << (bit - codes) if bit >= codes else 0 for bit in range(cols)
    ]
    words = LinearMap((("row", rows), ("col", cols)), (("address", pitch + rows),), tuple(columns))
    return words @ layout.fragment.map


def _passes(lanes: np.ndarray, addresses: np.ndarray) -> list[dict[int, tuple[int, int]]]:
    """Serve every (lane, word address): one word of each bank in a pass; lanes that read the same word share it."""
    shared: dict[int, list[int]] = {}
    for lane, address in zip(lanes.tolist(), addresses.tolist()):
        shared.setdefault(address, []).append(lane)
    passes: list[dict[int, tuple[int, int]]] = []
    for address, readers in shared.items():
        bank = address % (1 << BANK_BITS)
        at = next((p for p in passes if bank not in p), None)
        if at is None:
            passes.append(at := {})
        at[bank] = (min(readers), max(readers))
    return passes


def tell(name: str) -> Story:
    """The story of a registered instance; LayoutError if there is none of that name."""
    layout, instance = get_instance(name), INSTANCES[name]
    fragment, convert = layout.fragment, get_converter(instance.converter)
    per = fragment.elements_per_register
    tile = []
    for lane in range(32):
        for register in range(fragment.registers):
            row, col = fragment(lane, register * per)
            tile.append((row, col, lane, register))
    words = []
    for word in range(layout.load_words):
        fields: list = [None] * layout.fields
        for o in range(convert.outputs):
            atom, register = layout.target(word, o)
            for e in range(per):
                p = convert.pos(o, e)
                at = layout.map(field=p, word=word, thread=LANE)
                fields[p] = (at["row"], at["k"], register, atom)
        words.append(fields)

    lanes = np.arange(1 << LANE_BITS)
    unpacked = row_major(layout)
    before = _passes(lanes, unpacked(value=0, thread=lanes)["address"])
    each, after = 32 // layout.load_words, []
    for first in range(0, 32, each):
        group = np.repeat(lanes[first : first + each], layout.load_words)
        at = layout.memory(word=np.arange(each * layout.load_words) % layout.load_words, thread=group)["address"]
        after += _passes(group, at)
    one_load = min(per * layout.storage_bits, 32) // layout.storage_bits  # neighbouring elements of a lane in row-major
    return Story(
        name,
        instance.note,
        convert.name,
        layout,
        tile,
        words,
        before,
        after,
        len(layout.placement) * fragment.values // one_load,
        conflict_degree(unpacked.restrict({"thread": LANE_BITS})),
        conflict_degree(phase_map(layout.memory, layout.load_words)),
    )


# -- text --------------------------------------------------------------------------------------------------------------


def _span(lanes: tuple[int, int]) -> str:
    return str(lanes[0]) if lanes[0] == lanes[1] else f"{lanes[0]}-{lanes[1]}"


def render_text(instance_name: str) -> str:
    """The layout of an instance as text: tile, one lane's words, memory and banks, proof and index matrix."""
    story = tell(instance_name)
    layout, per = story.layout, story.layout.fragment.elements_per_register
    lines = [f"{story.name}: {story.note}", f"{layout.identity}", ""]
    lines += [
        f"Who holds what: one {layout.fragment.name} tile, warp 0. L6.2 = register 2 of lane 6, {per} codes along k."
    ]
    rows: dict[int, dict[int, str]] = {}
    for row, col, lane, register in story.tile:
        rows.setdefault(row, {})[col] = f"L{lane}.{register}"
    starts = sorted({col for _, col, _, _ in story.tile})
    lines.append("  row\\k " + "".join(f"{start:>7}" for start in starts))
    lines += [f"  {row:>5} " + "".join(f"{cells[start]:>7}" for start in starts) for row, cells in sorted(rows.items())]
    lines += ["", f"What lane {LANE} loads: {layout.load_words} words, fields as row.k, most significant first."]
    for word, fields in enumerate(story.words):
        lines.append(f"  word {word} " + " ".join(f"{row:>2}.{k:<3}" for row, k, _, _ in reversed(fields)))
    for word in range(layout.load_words):
        outputs = len(story.words[word]) // per
        feeds = ", ".join(
            f"o{o} -> MMA {a} {story.operand}{r}" for o in range(outputs) for a, r in [layout.target(word, o)]
        )
        lines.append(f"  {story.converter} of word {word}: {feeds}")
    w = 4 * layout.load_words
    lines += [
        "",
        f"Where it lies: thread i owns bytes {w}i .. {w}i+{w - 1} of the block of {4 * layout.words_per_block}.",
    ]
    lines += ["", f"Banks before packing (row-major, rows of {PITCH} bytes, first load): {len(story.before)} passes."]
    for number, served in enumerate(story.before):
        lines.append(f"  pass {number}: " + ", ".join(f"bank {b}: lanes {_span(s)}" for b, s in sorted(served.items())))
    lines += ["", f"Banks after packing (LDS.{32 * layout.load_words}): {len(story.after)} passes."]
    for number, served in enumerate(story.after):
        lines.append(f"  pass {number}: " + " ".join(f"{_span(served[b]):>2}" for b in sorted(served)))
    lines += ["", *story.facts, f"proof: {layout.prove()}", "", str(layout.map)]
    return "\n".join(lines) + "\n"


# -- SVG ---------------------------------------------------------------------------------------------------------------

TINTS = ("#DCE9F4", "#F6E7D2", "#DDEEDF", "#F0E1EC")  # registers 0 .. 3
DEEPS = ("#3F77A8", "#BF8336", "#4E9160", "#9C5E8C")
INK, MUTED, FAINT, PAPER, CARD = "#22303C", "#6A7783", "#DADFE3", "#FBFAF7", "#FFFFFF"
CLASH, CLASH_INK, CALM = "#F5D5CC", "#A83E26", "#E6EEF3"
WIDTH, MARGIN = 1200, 40


class _Canvas:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x, y, w, h, fill, stroke="none", width=1.0, radius=3.0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{fill}"'
            f' stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def text(self, x, y, words, size=12.0, fill=INK, anchor="start", weight=400) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"'
            f' font-weight="{weight}">{escape(str(words))}</text>'
        )

    def head(self, x, y, number, title, note) -> None:
        self.text(x, y, number, 15, DEEPS[0], weight=700)
        self.text(x + 18, y, title, 15, INK, weight=600)
        self.text(x + 18, y + 18, note, 12, MUTED)

    def document(self, height: float, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img"'
            f' width="{WIDTH}" height="{height:g}" font-family="Inter, Helvetica Neue, Helvetica, Arial, sans-serif">'
            f"<title>{escape(title)}</title>"
        )
        ground = f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>'
        return "\n".join([head, ground, *self.parts, "</svg>"]) + "\n"


def _draw_tile(canvas: _Canvas, story: Story, x: float, y: float) -> float:
    """Panel 1; returns its lower edge."""
    per = story.layout.fragment.elements_per_register
    rows = 1 + max(row for row, *_ in story.tile)
    starts = 1 + max(col for _, col, *_ in story.tile) // per
    wide, high = 440 / starts, 20
    for start in range(starts):
        label = f"{start * per}–{start * per + per - 1}"
        canvas.text(x + 30 + wide * (start + 0.5), y - 6, label, 10, MUTED, "middle")
    canvas.text(x + 22, y - 6, "k", 10, MUTED, "end")
    for row in range(rows):
        canvas.text(x + 22, y + high * row + 14, row, 10, MUTED, "end")
    for row, col, lane, register in story.tile:
        left, top, chosen = x + 30 + wide * (col // per), y + high * row, lane == LANE
        canvas.box(left + 1, top + 1, wide - 2, high - 2, (DEEPS if chosen else TINTS)[register])
        canvas.text(left + wide / 2, top + 14, lane, 11, CARD if chosen else INK, "middle", 700 if chosen else 400)
    return y + high * rows


def _draw_words(canvas: _Canvas, story: Story, x: float, y: float) -> float:
    """Panel 2: the followed lane's words and what the converter makes of the first one."""
    count, shown = len(story.words[0]), 560
    wide, high, text = shown / count, 30, 10 if count <= 8 else 8.5
    for p in range(count):
        canvas.text(x + 58 + wide * (count - p - 0.5), y - 6, p, 10, MUTED, "middle")
    canvas.text(x + 50, y - 6, "field", 10, MUTED, "end")
    for number, fields in enumerate(story.words):
        top = y + number * (high + 6)
        canvas.text(x + 50, top + 19, f"word {number}", 11, INK, "end", 600)
        for p, (row, k, register, _) in enumerate(fields):
            left = x + 58 + wide * (count - 1 - p)
            canvas.box(left + 1, top, wide - 2, high, TINTS[register], DEEPS[register], 1)
            if count <= 8:
                canvas.text(left + wide / 2, top + 19, f"{row}, {k}", text, INK, "middle")
            else:
                canvas.text(left + wide / 2, top + 13, row, text, INK, "middle")
                canvas.text(left + wide / 2, top + 24, k, text, INK, "middle")
    top = y + len(story.words) * (high + 6) + 22
    per = story.layout.fragment.elements_per_register
    outputs = count // per
    canvas.text(x + 58, top, f"{story.converter}: word 0 becomes operand registers", 12, MUTED)
    top, columns = top + 12, min(outputs, 4)
    wide = shown / columns
    for o in range(outputs):
        left, line = x + 58 + wide * (o % columns), top + (o // columns) * 44
        atom, register = story.layout.target(0, o)
        canvas.box(left + 1, line, wide - 2, 38, CARD, DEEPS[register], 1.2)
        canvas.text(
            left + wide / 2, line + 15, f"{story.operand}{register} of MMA {atom}", 11, DEEPS[register], "middle", 600
        )
        fields = ", ".join(str(o + outputs * e) for e in range(per))
        canvas.text(left + wide / 2, line + 30, f"field{'s' * (per > 1)} {fields}", 10, INK, "middle")
    return _draw_count(canvas, story, x + 58, top + -(-outputs // columns) * 44 + 14)


def _draw_count(canvas: _Canvas, story: Story, x: float, y: float) -> float:
    """The passes of shared memory that one warp needs, before and after."""
    before, after = story.loads_before * len(story.before), len(story.after)
    ways = (
        (
            before,
            "passes a warp, row-major",
            f"{story.loads_before} loads x {len(story.before)} passes",
            CLASH,
            CLASH_INK,
        ),
        (after, "passes a warp, packed", f"1 load × {after} pass{'es' * (after > 1)}", "#E3F0E5", DEEPS[2]),
    )
    for column, (count, what, how, ground, ink) in enumerate(ways):
        left = x + 1 + 282 * column
        canvas.box(left, y, 276, 56, ground, radius=6)
        canvas.text(left + 48, y + 38, count, 28, ink, "middle", 700)
        canvas.text(left + 92, y + 25, what, 12, INK, weight=600)
        canvas.text(left + 92, y + 42, how, 11, MUTED)
    return y + 56


def _draw_banks(canvas: _Canvas, passes, x: float, y: float, conflict: bool) -> float:
    """A grid of banks by passes; each cell shows the lanes it serves."""
    wide, high = (WIDTH - 2 * MARGIN - 62) / 32, 20
    left = x + 62
    for bank in range(32):
        canvas.text(left + wide * (bank + 0.5), y - 5, bank, 9.5, MUTED, "middle")
    canvas.text(left - 10, y - 5, "bank", 10, MUTED, "end")
    for number, served in enumerate(passes):
        top = y + number * high
        canvas.text(left - 10, top + 14, f"pass {number + 1}", 10, MUTED, "end")
        for bank in range(32):
            lanes = served.get(bank)
            chosen = lanes is not None and lanes[0] <= LANE <= lanes[1]
            fill = CARD if lanes is None else CLASH if conflict else DEEPS[0] if chosen else CALM
            if lanes is not None and conflict and chosen:
                fill = CLASH_INK
            canvas.box(
                left + wide * bank + 1, top + 1, wide - 2, high - 2, fill, FAINT if lanes is None else "none", 0.8
            )
            if lanes is not None:
                ink = CARD if chosen else CLASH_INK if conflict else INK
                label = _span(lanes).replace("-", "–")
                canvas.text(left + wide * (bank + 0.5), top + 14, label, 9.5, ink, "middle", 700 if chosen else 400)
    return y + high * len(passes)


def render_svg(instance_name: str) -> str:
    """The layout of an instance as a self-contained SVG document (1200 wide, light background)."""
    story = tell(instance_name)
    layout, canvas, x = story.layout, _Canvas(), MARGIN
    canvas.text(x, 48, f"{story.name}", 24, INK, weight=700)
    canvas.text(x, 72, f"{story.note}. {story.facts[2][0].upper() + story.facts[2][1:]}.", 13, MUTED)
    proof = layout.prove()
    marks = [("bijective", proof.bijective), ("coalesced", proof.coalesced), ("no bank conflict", proof.banks)]
    at = WIDTH - MARGIN
    for label, good in reversed(marks):
        wide = 7.2 * len(label) + 34
        at -= wide + 8
        canvas.box(at, 32, wide, 24, "#E3F0E5" if good else CLASH, radius=12)
        canvas.text(
            at + wide / 2, 48, f"{'✓' if good else '✗'} {label}", 12, DEEPS[2] if good else CLASH_INK, "middle", 600
        )

    top = 116
    per = layout.fragment.elements_per_register
    canvas.head(
        x, top, "1", "The tensor core asks", f"lane that holds each run of {per} codes; colour = operand register"
    )
    right = x + 500
    load = f"LDS.{32 * layout.load_words}"
    canvas.head(
        right, top, "2", f"Lane {LANE} gets it with one {load}", "(row, k) of every field of its words, colour as in 1"
    )
    lower = max(_draw_tile(canvas, story, x, top + 46), _draw_words(canvas, story, right, top + 46))

    top = lower + 40
    size = 4 * layout.load_words
    note = (
        f"thread i owns bytes {size}i to {size}i + {size - 1}; 32 lanes of warp 0 shown: {32 * size} contiguous bytes"
    )
    canvas.head(x, top, "3", "In memory", note)
    wide = (WIDTH - 2 * MARGIN - 62) / 32
    for lane in range(32):
        left, chosen = x + 62 + wide * lane, lane == LANE
        canvas.box(left + 0.5, top + 28, wide - 1, 24, DEEPS[0] if chosen else CALM, radius=2)
        canvas.text(left + wide / 2, top + 44, lane, 10, CARD if chosen else INK, "middle", 700 if chosen else 400)
    canvas.text(x + 52, top + 44, "lane", 10, MUTED, "end")

    top += 92
    before = f"row-major tile, rows of {PITCH} bytes, read by fragment: one of {story.loads_before} loads a thread"
    verdict = f"{story.degree_before}-way bank conflict" if story.degree_before > 1 else "no conflict"
    canvas.head(x, top, "4", f"Banks before packing: {verdict}", before)
    lower = _draw_banks(canvas, story.before, x, top + 46, story.degree_before > 1)
    top = lower + 40
    after = (
        f"the same elements and more: all {len(story.words[0]) * layout.load_words} codes of a thread in its only load"
    )
    canvas.head(x, top, "5", "Banks after packing: each pass uses all 32", after)
    lower = _draw_banks(canvas, story.after, x, top + 46, story.degree_after > 1)

    top = lower + 34
    at = x
    for register in range(layout.fragment.registers):
        canvas.box(at, top - 11, 14, 14, TINTS[register], DEEPS[register], 1)
        canvas.text(at + 20, top, f"register {story.operand}{register}", 11.5, INK)
        at += 106
    canvas.box(at, top - 11, 14, 14, DEEPS[0])
    canvas.text(at + 20, top, f"lane {LANE}", 11.5, INK)
    canvas.text(WIDTH - MARGIN, top, layout.identity, 11.5, MUTED, "end")
    return canvas.document(top + 30, f"Packed layout {story.name}: {layout.identity}")
