"""Kernels of W4A16, named ahead of time; calls are those of `terrazzo.ops.weight_only`."""

from __future__ import annotations

from terrazzo.ops.weight_only.op import kernel_requests as kernel_requests
from terrazzo.ops.weight_only.op import plan as plan
from terrazzo.ops.weight_only.op import tuning_facts as tuning_facts
from terrazzo.ops.weight_only.op import weight_requests as weight_requests
