"""Examples in documents: fenced Python, which tests run. `<!-- run: gpu -->` in front of one: it needs a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?:<!-- run: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)
FOLDER = re.compile(r"\"([\w.-]+)/\"")
GIVEN = {
    "operators": """
import torch
k, n = 1024, 512
draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float16)
x, weight, calibration, norm = draw(16, k), draw(n, k) * 0.02, draw(4, 64, k), torch.nn.RMSNorm(k, eps=1e-5)
norm.weight.data = norm.weight.data.to("cuda", torch.float16)
norm.variance_epsilon = norm.eps
weights, gates = [draw(n, k) * 0.02 for _ in range(8)], torch.rand(16, 2, device="cuda")
expert_ids = torch.randint(0, 8, (16, 2), device="cuda", dtype=torch.int32)
q, (k, v) = draw(300, 32, 128), draw(2, 300, 8, 128)
q1, (k1, v1) = draw(2, 1, 32, 128), draw(2, 2, 1, 8, 128)
""",
    "tuning": """
import terrazzo, torch
w = terrazzo.ops.w4a16.quantize(torch.randn(512, 512, device="cuda"), group_size=128)
x = torch.randn(16, 512, device="cuda", dtype=torch.float16)
""",
    "generate": """
import transformers, torch
tokenizer = transformers.AutoTokenizer.from_pretrained("packed/")
""",
}
"""Page -> what its reader has: arrays, layers, arguments."""


class Example(NamedTuple):
    """One block: its line, what it needs ("", "gpu", "gpus" and a process for each, or a "server"), its text."""

    line: int
    needs: str
    code: str


def examples(page: Path) -> list[Example]:
    """The blocks of a document, in order."""
    text = page.read_text(encoding="utf-8")
    return [Example(text[: it.start(2)].count("\n") + 1, it[1] or "", it[2]) for it in FENCE.finditer(text)]


def folders(page: Path) -> set[str]:
    """Names of models' folders that a document reads."""
    found = {name for it in examples(page) if it.needs not in ("gpus", "server") for name in FOLDER.findall(it.code)}
    return found | {name for name in FOLDER.findall(GIVEN.get(page.stem, ""))}


def run(page: Path, place: Path, *, gpu: bool) -> list[str]:
    """Run a document's blocks one after the other, in a process of its own, in a folder that has the models it names.

    Args:
        page: the document. place: an empty folder. gpu: whether blocks that need a GPU run too.

    Returns:
        The blocks that ran, as "line 12".

    Raises:
        AssertionError: one raised; with what it said.
    """
    _write_models(folders(page), place)
    chosen = [it for it in examples(page) if it.needs == "" or (gpu and it.needs == "gpu")]
    parts = [GIVEN.get(page.stem, "") if gpu or page.stem not in ("operators", "tuning") else ""]
    parts += [f"# line {it.line}\n{it.code}" for it in chosen]
    (place / "page.py").write_text("\n".join(parts), encoding="utf-8")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path),
    }
    done = subprocess.run([sys.executable, "page.py"], cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{page.name}: {done.stderr[-3000:]}"
    return [f"line {it.line}" for it in chosen]


def _write_models(names: set[str], place: Path) -> None:
    """Small Llamas under these names: in AWQ's words where the name says so, packed by this library as "packed"."""
    if not names:
        return
    sys.path[:0] = [str(ROOT / "tests" / "nn"), str(ROOT / "tests" / "integrations")]
    try:
        import test_transformers
        from tiny_text import VOCABULARY, byte_tokenizer, write_folder
    finally:
        del sys.path[:2]
    import terrazzo

    sizes = test_transformers.SIZES
    test_transformers.SIZES = {**sizes, "vocab_size": VOCABULARY}
    for name in names:
        if "awq" in name.lower():
            byte_tokenizer().save_pretrained(test_transformers.write_awq(place / name))
        elif name == "packed":
            model = terrazzo.load(write_folder(place / "float"), quantize="w4a16-g64", device="cpu")
            model.save_pretrained(place / name)
        else:
            write_folder(place / name)
    test_transformers.SIZES = sizes
