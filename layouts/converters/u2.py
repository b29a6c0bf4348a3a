"""Two-bit integers to f16 and bf16: fields o and o + 8 of a word become register o.

With a smaller ulp for each step up the mantissa (1024, 256, 64, 16, 4), five of the eight f16 registers need no shift
at all and one shift by 10 serves the other three: 9 instructions for 16 values before the subtraction. Masked without a
magic number they are subnormals q * 2^-24 .. q * 2^-16. bf16 reaches three fields (128, 32, 8) before it must shift.
"""

from __future__ import annotations

from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, lop3, register, sub_bf16, sub_f16


def _plan(reach: int) -> list[tuple[int, int]]:
    """For every output register: (shift of the word, bit position of the field after the shift)."""
    return [(2 * reach * (o // reach), 2 * (o % reach)) for o in range(8)]


def _biased(words, plan, magics):
    return [(words >> shift) & arith.pair(3 << at) | arith.pair(magics[at // 2]) for shift, at in plan]


def _text(plan, magics=None) -> list[str]:
    names = {0: "w"} | {shift: f"y{shift}" for shift, _ in plan if shift}
    lines = [f"unsigned {name} = w >> {shift};" for shift, name in names.items() if shift]
    for o, (shift, at) in enumerate(plan):
        if magics is None:
            lines.append(f"out[{o}] = {names[shift]} & {int(arith.pair(3 << at)):#010x}u;")
        else:
            mask, magic = int(arith.pair(3 << at)), int(arith.pair(magics[at // 2]))
            lines.append(lop3(f"out[{o}]", names[shift], mask, magic))
    return lines


F16_PLAN, F16_MAGIC = _plan(5), [arith.half(1024 >> 2 * i) for i in range(5)]
SEPARABLE_PLAN = _plan(4)  # exponents 0, 2, 4, 6 twice: a part of the row (g, g + 8) plus a part of the k half
BF16_PLAN, BF16_MAGIC = _plan(3), [arith.brain(128 >> 2 * i) for i in range(3)]

register(
    Converter(
        "u2_f16_subnormal",
        "u2",
        "float16",
        2,
        16,
        lambda w: _biased(w, F16_PLAN, [0] * 5),
        "\n".join(_text(F16_PLAN)),
        instructions=9,
        scale_exp2=tuple(at - 24 for _, at in F16_PLAN),
    )
)
register(
    Converter(
        "u2_f16_separable",
        "u2",
        "float16",
        2,
        16,
        lambda w: _biased(w, SEPARABLE_PLAN, [0] * 5),
        "\n".join(_text(SEPARABLE_PLAN)),
        instructions=9,
        scale_exp2=tuple(at - 24 for _, at in SEPARABLE_PLAN),
    )
)
for _name, _operand, _plan_, _magics, _sub, _emulated in (
    ("u2_f16_magic", "float16", F16_PLAN, F16_MAGIC, sub_f16, arith.hsub2),
    ("u2_bf16_magic", "bfloat16", BF16_PLAN, BF16_MAGIC, sub_bf16, arith.bsub2),
):
    _words = [int(arith.pair(_magics[at // 2])) for _, at in _plan_]
    register(
        Converter(
            _name,
            "u2",
            _operand,
            2,
            16,
            lambda w, plan=_plan_, magics=_magics, words=_words, sub=_emulated: [
                sub(x, arith.u32(word)) for x, word in zip(_biased(w, plan, magics), words)
            ],
            "\n".join(
                _text(_plan_, _magics) + [_sub(f"out[{o}]", f"out[{o}]", f"{_words[o]:#010x}u") for o in range(8)]
            ),
            instructions=16 + len({shift for shift, _ in _plan_}) - 1,
        )
    )
