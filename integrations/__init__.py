"""Terrazzo inside of other libraries. A module here imports the library of its name, and registers with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = ["transformers"]

if TYPE_CHECKING:
    from terrazzo.integrations import transformers
else:
    __getattr__, __dir__ = lazy.attach(__name__, {"transformers": "transformers"})
