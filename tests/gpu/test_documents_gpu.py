"""Every example of the documents runs, those that need a GPU included."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from document_code import ROOT, examples, run

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if examples(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run_on_a_gpu(page, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert len(run(page, tmp_path, gpu=True)) == len(
        [it for it in examples(page) if it.needs not in ("gpus", "server")]
    )
