"""Operators that can be tuned. Linear layers follow from the kinds that there are, each alone and with experts.

A new weight format of `ops.products` is one of them without a line here. Another kind of operator is a subclass
of `Operator`: a `Space` of schedules/, a `Subject` of autotune/subjects.py, and an operator that asks `spaces.choose`
for its schedule and forgets its plans when `records.changed` is called.
"""

from __future__ import annotations

from terrazzo.autotune.adapter import Operator
from terrazzo.autotune.attention_adapter import Attention, AttentionPrefill
from terrazzo.autotune.linear import Linear
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.kinds.table import KINDS

_ALL = (
    *(Linear(kind) for kind in KINDS.values()),
    *(Linear(kind, experts=True) for kind in KINDS.values()),
    Attention(),
    AttentionPrefill(),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}


def get_operator(name: str) -> Operator:
    """The adapter of an operator.

    Raises:
        ArgumentError: one that cannot be tuned.
    """
    if name not in OPERATORS:
        raise ArgumentError("op", name, f"must be one of {', '.join(OPERATORS)}", "use one of these")
    return OPERATORS[name]
