"""Measuring of operators on a GPU, and tuning of their schedules. Public names are resolved on first use."""

from __future__ import annotations

from terrazzo.ops import lazy

_HOME = {
    "Database": "database",
    "Job": "jobs",
    "Runner": "runner",
    "enabled": "first_use",
    "read_job": "jobs",
}

__all__, __getattr__, __dir__ = lazy.names(__name__, _HOME)
