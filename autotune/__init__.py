"""Measuring of operators on a GPU, and tuning of their schedules. Public names are resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "Database",
    "Job",
    "Runner",
    "enabled",
    "read_job",
]

if TYPE_CHECKING:
    from terrazzo.autotune.database import Database
    from terrazzo.autotune.first_use import enabled
    from terrazzo.autotune.jobs import Job, read_job
    from terrazzo.autotune.runner import Runner
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "database": "Database",
            "first_use": "enabled",
            "jobs": "Job read_job",
            "runner": "Runner",
        },
    )
