"""The table of CUDA texts that programs ask for by name."""

from __future__ import annotations

from collections import Counter

import pytest
from terrazzo.ops.tiles.cuda import attention as device
from terrazzo.ops.tiles.cuda import text as primitives


@pytest.mark.parametrize("name", primitives.PRIMITIVES)
def test_a_name_brings_one_text(name):
    assert Counter(one.name for one in primitives._ALL)[name] == 1
    assert primitives.prelude(name).count(primitives.PRIMITIVES[name].source) == 1


def test_attention_names_none_of_them_again():
    assert not set(device.PRIMITIVES) & set(primitives.PRIMITIVES)
