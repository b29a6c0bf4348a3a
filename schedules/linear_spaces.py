"""The search space of a linear layer, by its problem."""

from __future__ import annotations

from terrazzo.schedules import grouped_spaces, spaces, w4a8_fp8_space, w4ax_space
from terrazzo.schedules.problem import Gemm

_KINDS = {"f16": spaces.W4A16, "s8": spaces.W4A8, "e4m3": w4a8_fp8_space.W4A8Fp8, "s4_s8": w4ax_space.W4Ax}


def of(problem: Gemm) -> spaces.Space:
    """The schedules of a problem."""
    return grouped_spaces.Grouped(problem) if problem.experts else _KINDS[problem.activations](problem)
