"""`python -m terrazzo` is the `terrazzo` command, and as its script it imports nothing from the working directory."""

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

if sys.path and sys.path[0] in ("", os.getcwd()) and os.path.realpath(sys.path[0]) != _HOME:
    del sys.path[0]

from terrazzo.cli import main  # noqa: E402

sys.exit(main())
