"""The public calls, which are those of every weight-only format: `terrazzo.ops.weight_only.entry`."""

from terrazzo.ops.weight_only.entry import gemm as gemm
from terrazzo.ops.weight_only.entry import grouped_gemm as grouped_gemm
