"""The floor's public names."""

import terrazzo.layouts


def test_public_names_exist():
    assert all(hasattr(terrazzo.layouts, name) for name in terrazzo.layouts.__all__)
