"""Gates of feed-forward layers, act(gate) * up: their names, the oracle in plain torch, and what kernels compute.

silu        h = round(round(silu(g)) * u)
gelu_tanh   h = round(round(gelu(g, by tanh)) * u);  gelu: by erf
swiglu_oai  h = round(round(u + 1) * round(g * round(sigmoid(round(alpha g)))))
limit       before: g = min(g, limit), u = clamp(u, -limit, limit)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "swiglu_oai")
"""silu(g), gelu(g) by tanh, by erf, and gpt-oss's g sigmoid(alpha g) beside up + 1."""
SOURCE = """\
// ACT as the program counts activations; EXACT: float32 functions as torch calls them, rounded to 16 bits in between
template <bool BF16, int ACT, bool EXACT> __device__ __forceinline__ float tz_gated(float g, float u, float alpha) {
  if constexpr (EXACT) {
    float a;
    if constexpr (ACT == 0) a = g / (1.0f + expf(-g));
    if constexpr (ACT == 1) a = 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * (g * g * g))));
    if constexpr (ACT == 2) a = g * 0.5f * (1.0f + erff(g * 0.7071067811865476f));
    if constexpr (ACT == 3) {
      a = tz_round<BF16>(alpha * g);
      a = g * tz_round<BF16>(1.0f / (1.0f + expf(-a)));
      u = tz_round<BF16>(u + 1.0f);
    }
    return tz_round<BF16>(tz_round<BF16>(a) * u);
  } else {
    if constexpr (ACT == 2) return g * 0.5f * erfcf(g * -0.7071067811865476f) * u;  // 1 + erf cancels below 0
    // the others are g sigmoid(z): 1 + tanh(y) is 2 sigmoid(2 y)
    float z = ACT == 0 ? g : ACT == 3 ? alpha * g : 1.5957691216057308f * fmaf(0.044715f * g * g, g, g);
    if constexpr (ACT == 3) u += 1.0f;
    return __fdividef(g, 1.0f + __expf(-z)) * u;
  }
}
// 8 values of h: a and b are gate and up, or (PAIRS) 8 pairs of them; CLAMPS: gate at most, up within `limit`
template <bool BF16, int ACT, bool EXACT, bool PAIRS, bool CLAMPS> __device__ __forceinline__ void tz_gated8(
    void *v_, const void *a_, const void *b_, float alpha, float limit) {
  float *v = (float *)v_, a[8], b[8];
  tz_widen8<BF16>(a, a_); tz_widen8<BF16>(b, b_);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float g = PAIRS ? (i < 4 ? a[2 * i] : b[2 * i - 8]) : a[i];
    float u = PAIRS ? (i < 4 ? a[2 * i + 1] : b[2 * i - 7]) : b[i];
    if constexpr (CLAMPS) {  // NaN stays
      g = g > limit ? limit : g;
      u = u > limit ? limit : u < -limit ? -limit : u;
    }
    v[i] = tz_gated<BF16, ACT, EXACT>(g, u, alpha);
  }
}
"""
"""Of programs with the functions of tiles/row_outputs.py. Why not TileLang: eight values in registers at a time."""


def gated(
    g: torch.Tensor, u: torch.Tensor, activation: str, alpha: float, limit: float | None, rounds: torch.dtype | None
) -> torch.Tensor:
    """h in g's dtype (float32 or float64), rounded to `rounds` where models round it."""
    import torch

    round_ = (lambda t: t) if rounds is None else (lambda t: t.to(rounds).to(g.dtype))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return round_(round_(u + 1) * round_(g * round_(torch.sigmoid(round_(alpha * g)))))
    if activation == "silu":
        a = torch.nn.functional.silu(g)
    else:
        a = torch.nn.functional.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return round_(round_(a) * u)
