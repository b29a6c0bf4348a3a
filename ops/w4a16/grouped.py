"""Kernels of grouped W4A16, named ahead of time; calls are those of `terrazzo.ops.weight_only`."""

from __future__ import annotations

from terrazzo.ops.grouped import GroupedWeight as GroupedWeight
from terrazzo.ops.weight_only.grouped import grouped_requests as grouped_requests
from terrazzo.ops.weight_only.grouped import plan as plan
from terrazzo.ops.weight_only.grouped import tuning_facts as tuning_facts
