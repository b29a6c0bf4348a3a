"""What operators ask of a schedule that a caller made."""

from __future__ import annotations

from dataclasses import fields

from terrazzo.lowering.errors import ArgumentError

_TYPES = {"int": int, "bool": bool, "str": str}


def check_fields(schedule: object, *kinds: type) -> None:
    """Raise ArgumentError unless it is None or an object of one of the dataclasses, whose fields have their own types:
    plans are kept by equal arguments, and 2 == 2.0, 1 == True."""
    if schedule is None:
        return
    if type(schedule) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ArgumentError("schedule", schedule, f"must be a schedule, {names}", "leave it out")
    for field in fields(schedule):
        value, wanted = getattr(schedule, field.name), _TYPES[str(field.type)]
        if type(value) is not wanted:
            raise ArgumentError("schedule", schedule, f"{field.name} must be of type {field.type}", "see its class")
