"""Builds the archive of sources and the wheel, installs the wheel in a new environment, tries it: `make release-check`.

    python tests/tools/release_check.py --torch torch==2.13.0      to dist/; exit code 1 names what failed

Nothing of the checkout is on the path of what is tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = """
import torch
from terrazzo.nn import Linear

torch.manual_seed(0)
linear, x = torch.nn.Linear(256, 128, bias=False), torch.randn(4, 256, dtype=torch.float16)
for format in ("w4a16-g128", "w4a8-g64"):
    wanted = linear(x.float())
    error = (Linear.from_float(linear, format)(x).float() - wanted).norm() / wanted.norm()
    assert 0 < error < 0.2, (format, float(error))
"""
IMPORTS = """
import sys, terrazzo
from terrazzo.ops import w4a16, w4a8, attention
assert not {"torch", "tilelang"} & set(sys.modules), "importing took more than it needs"
assert "site-packages" in terrazzo.__file__, terrazzo.__file__
"""
TRIES: dict[str, tuple[str, ...]] = {
    "import": ("-c", IMPORTS),
    "terrazzo --version": ("-m", "terrazzo", "--version"),
    "terrazzo info": ("-m", "terrazzo", "info", "--json"),
    "terrazzo ops": ("-m", "terrazzo", "ops"),
    "a layout's picture": ("-m", "terrazzo", "layout", "w4a16", "--svg", "layout.svg"),
    "products by the reference on a CPU": ("-c", PRODUCT),
}
"""What is tried -> arguments of the new environment's Python."""


def try_out(python: Path, folder: Path) -> dict[str, str]:
    """What failed, by its name in `TRIES`, with the end of what it said; run in an empty folder.

    Args:
        python: of the environment that has the package. folder: where it runs, and where the picture is written.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["TERRAZZO_CACHE_DIR"] = str(folder / "cache")
    failed = {}
    for name, arguments in TRIES.items():
        done = subprocess.run([str(python), *arguments], cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            failed[name] = (done.stdout + done.stderr)[-2000:]
    picture = folder / "layout.svg"
    if not picture.is_file() or "<svg" not in picture.read_text(encoding="utf-8"):
        failed.setdefault("a layout's picture", "no picture was written")
    return failed


def release_of(changelog: str) -> str:
    """The version of the newest release in the changelog: a heading with a date.

    Raises:
        ValueError: there is none.
    """
    found = re.search(r"^## (\d+\.\d+\.\d+), \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    if not found:
        raise ValueError("CHANGELOG.md has no heading such as '## 0.2.0, 2026-11-26'")
    return found[1]


def build(out: Path) -> tuple[Path, Path]:
    """The archive of sources, and the wheel that is made from it."""
    version = release_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    for old in out.glob("terrazzo-*"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    return out / f"terrazzo-{version}.tar.gz", out / f"terrazzo-{version}-py3-none-any.whl"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/tools/release_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch", help="pip's arguments for torch, in one word")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(argv)
    made = build(options.out)
    if missing := [path.name for path in made if not path.is_file()]:
        print(f"not built: {', '.join(missing)}; do CHANGELOG.md and pyproject.toml name one version?", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv" / "bin" / "python"
        for what in (shlex.split(options.torch), [str(made[1])]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *what], check=True)
        (place / "empty").mkdir()
        failed = try_out(python, place / "empty")
    for name in TRIES:
        print(f"{'failed' if name in failed else 'ok':7}{name}")
    print(*failed.values(), *(str(path) for path in made), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
