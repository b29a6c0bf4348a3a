"""Damage for readers of files: seeded changes of JSON values, of bytes, and of named tensors.

    random = Random(seed)
    damaged = mutation.value(good, random)       # a JSON value of a few changes; `good` stays as it is
    text = mutation.text(damaged, random)        # as JSON text, at times one that is deep, cut short or no UTF-8
    data = mutation.data(bytes, random)          # bytes flipped, cut, doubled, zeroed
    named = mutation.tensors(good, random)       # name -> tensor: lost, of other shapes, dtypes and values

A reader is held to `survives`: it returns, or raises an error that is meant for its user, and in time. Shared by the
tests of every reader; needs no file, and torch for tensors only. The fixture `tries` gives each try its generator.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

from terrazzo.lowering.errors import TerrazzoError

HUGE = 10**30
DIGITS = "9" * 5000  # more than Python turns into an int
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**31), 2**63, -(2**63) - 1, HUGE, 0.5, -0.0, 1e300, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", "x", "0", "-1", "nan", "\0", "\ud800", "..", "/", "a" * 5000,
    "🧱", [], {}, [None], {"": None}, [[]], [0, "x"], {"x": {"y": []}}, b"x".hex(),
)  # fmt: skip
"""Values that a JSON file may hold where another one is expected."""


def nested(levels: int, random: Random) -> Any:
    """Lists and objects inside each other."""
    made: Any = 0
    for _ in range(levels):
        made = [made] if random.random() < 0.5 else {"a": made}
    return made


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all parts of a JSON value, its own excepted."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from _places(part, (*path, key))


def _change(value: Any, random: Random) -> Any:
    """One change somewhere in a value, which is changed in place unless it is all that is."""
    places = list(_places(value))
    if not places or random.random() < 0.02:
        return deepcopy(random.choice(ODD))
    *above, key = random.choice(places)
    inside = value
    for step in above:
        inside = inside[step]
    kind = random.choice(("odd", "odd", "odd", "gone", "near", "near", "other", "twice", "deep", "key"))
    if kind == "gone":
        del inside[key]
    elif kind == "near":
        inside[key] = _near(inside[key], random)
    elif kind == "other":
        *path, last = random.choice(places)
        found = value
        with suppress(KeyError, IndexError, TypeError):  # a place of what was just taken out
            for step in (*path, last):
                found = found[step]
            inside[key] = deepcopy(found)
    elif kind == "twice" and isinstance(inside, list):
        inside.insert(key, deepcopy(inside[key]))
    elif kind == "deep":
        inside[key] = nested(random.choice((2, 5, 50)), random)
    elif kind == "key" and isinstance(inside, dict):
        inside[random.choice(("", "x", "__class__", key.upper(), key + " ", key[:-1]))] = inside.pop(key)
    else:
        inside[key] = deepcopy(random.choice(ODD))
    return value


def _near(value: Any, random: Random) -> Any:
    """A value of the same kind, or of the kind that is taken for it."""
    if isinstance(value, bool):
        return random.choice((not value, int(value), str(value)))
    if isinstance(value, int):
        real = float(value) if abs(value) < 2**1000 else 0.5
        text = str(value) if abs(value) < 2**1000 else "9" * 400
        return random.choice((value + 1, value - 1, -value, value * 2, value << 40, real, text, [value]))
    if isinstance(value, float):
        whole = int(value) if math.isfinite(value) else 0
        return random.choice((-value, value * 1e30, whole, str(value), value + 0.5))
    if isinstance(value, str):
        cut = random.randrange(len(value) + 1)
        letter = chr(random.choice((0, 9, 10, 0x20, 0x2F, 0x41, 0x7F, 0xE9, 0x2028, 0xD800, 0x1F9F1)))
        return random.choice((value[:cut], value[:cut] + letter + value[cut:], value.upper(), [value], value * 50))
    if isinstance(value, list):
        return random.choice((value[1:], value + value, value[::-1], {str(at): it for at, it in enumerate(value)}))
    if isinstance(value, dict):
        return random.choice((list(value), list(value.values()), {**value, "unknown": 1}))
    return 0


def value(good: Any, random: Random) -> Any:
    """A JSON value with one to three changes."""
    made = deepcopy(good)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        made = _change(made, random)
    return made


def text(value: Any, random: Random) -> bytes:
    """A value as the text of a JSON file, which one in five is damaged further."""
    made = json.dumps(value).encode()
    kind = random.randrange(25)
    if kind == 0:
        return b"[" * 100_000 + made
    if kind == 1:
        return b'{"a":' * 100_000 + made
    if kind == 2:
        at = made.find(b": ") + 2
        return made[:at] + DIGITS.encode() + made[at:]
    return data(made, random) if kind in (3, 4) else made


def data(good: bytes, random: Random) -> bytes:
    """Bytes with a few changes, or cut short."""
    made = bytearray(good)
    for _ in range(random.choice((1, 1, 2, 8))):
        size = len(made)
        at, count = random.randrange(size + 1), random.choice((1, 1, 2, 4, 16, 256))
        kind = random.choice(("flip", "flip", "set", "cut", "gone", "zero", "twice", "noise"))
        if kind == "flip" and at < size:
            made[at] ^= 1 << random.randrange(8)
        elif kind == "set" and at < size:
            made[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == "cut":
            del made[at:]
        elif kind == "gone":
            del made[at : at + count]
        elif kind == "zero":
            made[at : at + count] = bytes(len(made[at : at + count]))
        elif kind == "twice":
            made[at:at] = made[at : at + count]
        else:
            made[at : at + count] = random.randbytes(count)
    return bytes(made)


def tensors(good: dict[str, Any], random: Random) -> dict[str, Any]:
    """Named tensors with one to three changes: of a shape, a dtype, values, a name. `good` stays as it is."""
    made = dict(good)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choice(sorted(made)) if made else "x"
        kind = random.choice(("gone", "shape", "shape", "dtype", "dtype", "values", "values", "noise", "other", "name"))
        found = made.pop(name, None)
        if found is None or kind == "gone":
            continue
        if kind == "name":
            made[random.choice((name + "x", name[:-1], name + ".weight", "x." + name, name.upper(), ""))] = found
        elif kind == "other" and made:
            made[name] = made[random.choice(sorted(made))].clone()
        else:
            change = {"shape": _shape, "dtype": _dtype, "values": _values, "noise": _noise}.get(kind, _shape)
            made[name] = change(found, random).contiguous()
    return made


def _shape(tensor: Any, random: Random) -> Any:
    flat = tensor.flatten()
    changes = [
        lambda: flat[0].clone() if len(flat) else flat, lambda: flat[:0], lambda: flat, lambda: tensor[None],
        lambda: tensor.T if tensor.ndim == 2 else flat[:1], lambda: tensor[:-1] if tensor.ndim else flat,
        lambda: tensor.repeat(*(2,) * max(tensor.ndim, 1)), lambda: tensor[..., :1] if tensor.ndim else flat,
        lambda: flat.reshape(-1, 1), lambda: tensor.new_zeros(0, 7),
    ]  # fmt: skip
    return random.choice(changes)().clone()


def _dtype(tensor: Any, random: Random) -> Any:
    import torch

    names = "bool uint8 int8 int16 int32 int64 uint16 uint32 float16 bfloat16 float32 float64 float8_e4m3fn complex64"
    return tensor.to(getattr(torch, random.choice(names.split())))


def _values(tensor: Any, random: Random) -> Any:
    import torch

    made, dtype = tensor.clone(), tensor.dtype
    if dtype == torch.bool:
        limits: tuple = (False, True)
    elif dtype.is_floating_point or dtype.is_complex:
        limits = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 6e4, 1e30)
    else:
        info = torch.iinfo(dtype)
        limits = (info.min, info.max, max(-1, info.min), 0)
    value = torch.tensor(random.choice(limits)).to(dtype)  # too large ones become infinity or NaN
    if made.numel() and random.random() < 0.5:
        made.view(-1)[random.randrange(made.numel())] = value
        return made
    return value.expand(made.shape).clone()


def _noise(tensor: Any, random: Random) -> Any:
    import torch

    if not tensor.numel():
        return tensor
    size = tensor.numel() * tensor.element_size()
    return torch.frombuffer(bytearray(random.randbytes(size)), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


MOST_S = 20.0
"""Seconds in which a reader answers, whatever it was given; wide, as machines are busy."""


def survives(call: Callable[[], Any], *also: type[BaseException], seconds: float = MOST_S) -> bool:
    """Whether a reader took what it got; False when it refused it with an error of ours (or one of `also`).

    Whatever else it raises goes on, and fails the test, as does an answer that takes longer than `seconds`.
    """
    start = time.monotonic()
    try:
        call()
    except (TerrazzoError, *also):
        return False
    finally:
        took = time.monotonic() - start
        assert took < seconds, f"an answer took {took:.1f} seconds, more than {seconds:g}"
    return True
