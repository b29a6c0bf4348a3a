"""`python -m terrazzo` is the `terrazzo` command."""

import sys

from terrazzo.cli import main

sys.exit(main())
