"""Pictures: every instance draws, says the truth about banks, and the SVG is well-formed and stays on its canvas."""

import re
from xml.etree import ElementTree

import pytest
from terrazzo.layouts import INSTANCES, get_instance
from terrazzo.layouts.picture import LANE, WIDTH, render_svg, render_text, tell
from terrazzo.lowering.errors import LayoutError


@pytest.mark.parametrize("name", INSTANCES)
def test_story_matches_the_layout(name):
    story, layout = tell(name), get_instance(name)
    held = {(row, col) for row, col, lane, _ in story.tile if lane == LANE}
    fragment = layout.fragment
    assert held <= {fragment(LANE, value) for value in range(fragment.values)}
    shown = {(row, k) for fields in story.words for row, k, _, _ in fields}
    image = layout.map.table().reshape(layout.threads, -1)[LANE]
    assert shown == {(int(i) // layout.block_k, int(i) % layout.block_k) for i in image}
    assert len(story.before) == story.degree_before
    assert story.degree_after == 1 and len(story.after) == layout.load_words
    assert all(sorted(served) == list(range(32)) for served in story.after)


@pytest.mark.parametrize("name", INSTANCES)
def test_svg_is_well_formed_and_inside(name):
    root = ElementTree.fromstring(render_svg(name))
    height = float(root.get("height"))
    assert layout_title(root).endswith(get_instance(name).identity)
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    assert len(boxes) > 150
    for box in boxes:
        x, y, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= WIDTH and y + h <= height
    for text in (e for e in root.iter() if e.tag.endswith("}text")):
        assert 0 <= float(text.get("x")) <= WIDTH and 0 < float(text.get("y")) < height


def layout_title(root) -> str:
    return next(e.text for e in root.iter() if e.tag.endswith("title"))


def test_text_of_the_w4a16_layout():
    text = render_text("w4a16_wgmma")
    assert "16 loads a thread x 8 passes = 128 passes a warp" in text
    assert "word 0  9.13   1.13   9.5    1.5    9.12   1.12   9.4    1.4" in text
    assert "thread i owns bytes 16i .. 16i+15 of the block of 2048" in text
    assert max(map(len, text.splitlines())) <= 120


def test_operand_letter():
    assert "MMA 1 B0" in render_text("qserve_g128") and not re.search(r"MMA \d A\d", render_text("marlin_u4"))


@pytest.mark.parametrize("render", [render_text, render_svg])
def test_unknown_instance(render):
    with pytest.raises(LayoutError, match="marlin_u4"):
        render("marlin")
