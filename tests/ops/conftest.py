"""Tests of an operator lie in its folder, as in ops/; what several share lies here. Each may import from all."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]
