"""`torch.ops.terrazzo.w4a16_gemm` and `w4a16_grouped_gemm`: importing this registers them."""

from terrazzo.ops.weight_only.torch_op import call as call
from terrazzo.ops.weight_only.torch_op import call_grouped as call_grouped
