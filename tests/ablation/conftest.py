"""Tests of what serves comparisons only, with the helpers of the operators' tests."""

from __future__ import annotations

import sys
from pathlib import Path

OPS = Path(__file__).parents[1] / "ops"
sys.path += [str(path) for path in (OPS, *sorted(OPS.iterdir())) if path.is_dir()]
