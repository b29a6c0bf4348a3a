"""Which kernels the published wheel of a target holds: what serving the usual models needs, in every usual form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from terrazzo.lowering.targets import TARGET_NAMES, Target
from terrazzo.ops import model_requests
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_requests import Plan, Weights
from terrazzo.ops.products import converted, wide
from terrazzo.ops.products.table import BY_RECORD, PRODUCTS
from terrazzo.ops.weight_only import op


@dataclass(frozen=True)
class Part:
    """Kernels of a wheel that belong together.

    Attributes:
        operator: record of a product, or "attention".
        models: of schedules/models.py. groups: channels for each scale, 0: all of a row. dtypes: of activations.
        kv: formats of keys and values. symmetric: W4A16 without zero points, as GPTQ's symmetric checkpoints.
    """

    operator: str
    models: tuple[str, ...]
    groups: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    kv: tuple[tuple[str, str], ...] = ()
    symmetric: bool = False


SERVED = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "llama-3.2-3b")
"""Models whose kernels a wheel holds where a program's kernels are made for each shape."""
USUAL = SERVED[:3]
"""Of these, those that are served in rarer forms, too."""
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b")
LEFT_OUT = {one.root: one.wheel for one in PRODUCTS if one.wheel}
"""Operators of the registry without kernels in the wheel, and why: they are compiled, or prepared."""
ALONG = ("norm", "activation", "rope")
"""Operators whose kernels come with a model's linear layers."""
PARTS = (
    Part(wide.W4A16.record, SERVED, (128,)),
    Part(wide.W4A16.record, USUAL, (128,), symmetric=True),
    Part(wide.W4A16.record, USUAL, (64,)),
    Part(wide.W4A16.record, USUAL[:1], (0,), symmetric=True),  # with a scale for each row they have none
    Part(converted.W4A8.record, USUAL[:2], (128, 64)),
    Part(converted.W4A8_FP8.record, USUAL[:2], (128,)),
    Part(wide.W4A16.record, EXPERTS, (128,)),
    Part(wide.W4A16.record, EXPERTS[1:], (128,), symmetric=True),
    Part(wide.FP8.record, USUAL[:2], (128, 0)),
    Part("attention", SERVED, kv=(("int4", "int4"), ("int8", "int8"), ("fp8", "fp8"))),
)


def published(target: Target) -> Plan:
    """The kernels of the wheel of a target's architecture, each once, and the packed layouts that they read. Each
    device of the architecture has its own choice of schedules. Kernels that stand in for others are among them: so
    weights of other sizes are served, too."""
    made = Plan()
    for device, part in product(devices(target), PARTS):
        if runs(part.operator, device):
            for plan in plans(part, device):
                made.requests |= plan.requests
                made.layouts |= plan.layouts
    made.requests |= dict.fromkeys(filter(None, map(op.stand_in, list(made.requests))))
    return made


def devices(target: Target) -> list[Target]:
    """Those that are known of a target's architecture."""
    known = map(Target.parse, TARGET_NAMES)
    return list(dict.fromkeys(device for device in known if device.arch == target.arch))


def runs(operator: str, target: Target) -> bool:
    """Whether an operator has a program for a target's architecture; attention has one for each."""
    return operator not in BY_RECORD or BY_RECORD[operator].on(target.arch) is not None


def plans(part: Part, target: Target) -> Iterator[Plan]:
    """The kernels of one part, by model and form."""
    for name in part.models:
        for dtype in part.dtypes:
            for group in part.groups or (128,):
                linear = part.operator != "attention"
                weights = Weights(group, part.symmetric, dtype=dtype, operator=part.operator if linear else None)
                serving = Serving(target, dtype, linear, part.kv, parts=False)
                yield model_requests.plan(model_requests.of_name(name, weights), serving)
