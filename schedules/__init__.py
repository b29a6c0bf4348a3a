"""Problems, tile configurations, the cost model and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = ["MODELS", "Decode", "Prefill", "WarpgroupDecode"]

if TYPE_CHECKING:
    from terrazzo.schedules.attention import Decode, WarpgroupDecode
    from terrazzo.schedules.attention_prefill import Prefill
    from terrazzo.schedules.models import MODELS
else:
    __getattr__, __dir__ = lazy.attach(
        __name__, {"attention": "Decode WarpgroupDecode", "attention_prefill": "Prefill", "models": "MODELS"}
    )
