"""docs/add-a-format.md is followed in a copy of the tree: its files are written, its changes made, its tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "add-a-format.md"
FENCE = re.compile(r"```(\w+)(?: title=\"(.+?)\")?\n(.*?)```", re.DOTALL)


def steps() -> list[tuple[str, str, str]]:
    """(kind, file, text) of each block: a "file" to write or a "change" to make."""
    found = []
    for language, title, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if language == "diff":
            head, _, text = text.partition("\n")
            found.append(("change", head.removeprefix("--- "), text))
        elif title:
            found.append(("file", title, text))
    return found


def changed(before: str, change: str, file: str) -> str:
    """A text after one change, whose lines begin with " ", "-" or "+" as those of a patch do. "…" is any text."""
    lines = change.splitlines()
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != out) for out in "+-")
    place = re.compile(f"^{re.escape(old).replace('…', '(.*)')}", re.MULTILINE)
    assert len(place.findall(before)) == 1, f"{PAGE.name}: not one place in {file} for\n{change}"
    return place.sub(lambda found: new.replace("…", "".join(found.groups())), before)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the tree in which the page was followed."""
    place = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git, whose files are copied")
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, place / name
        if not name.startswith(("benchmarks/results/", "schedules/tuned/")) and source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(os.readlink(source)) if source.is_symlink() else copy.write_bytes(source.read_bytes())
    for kind, file, text in steps():
        if kind == "file":
            assert not (place / file).exists(), file
        else:
            text = changed((place / file).read_text(encoding="utf-8"), text, file)
        (place / file).write_text(text, encoding="utf-8")
    return place


def run(tree: Path, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *arguments], cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_a_change_has_one_place():
    assert changed("a\nb\n", "-b\n+c\n+d\n", "x") == "a\nc\nd\n" and changed("a\nb\n", "+c\n b\n", "x") == "a\nc\nb\n"
    assert changed("a = (b, c)\n", "-a = (…)\n+a = (…, d)\n", "x") == "a = (b, c, d)\n"
    for text in ("a\n", "b\nb\n", "ab\n"):
        with pytest.raises(AssertionError, match="not one place in x"):
            changed(text, "+c\n b\n", "x")


def test_the_format_is_read_packed_and_multiplied(tree):
    own = "tests/ops/weight_only/test_toy4.py"
    said = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", own, "tests/ops/test_products.py", "-k", "toy4")
    assert int(said.split(" passed")[0].split()[-1]) >= 8


TABLES = (
    "tests/ops/test_products.py", "tests/ops/test_registry.py", "tests/ops/test_ready.py", "tests/test_format_names.py",
    "tests/ops/checkpoints/test_conventions.py", "tests/test_public_names.py", "tests/test_imports.py",
    "tests/test_style.py",
)  # fmt: skip
"""Tests that read whole tables, or every file."""


@pytest.mark.slow
def test_the_tests_of_the_house_hold_with_it(tree):
    """Its program runs on the CPU, too: a case of the page is among those that are emulated."""
    run(tree, "-m", "ruff", "format", "-q", ".")
    run(tree, "tests/tools/public_parameters.py", "--write")
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TABLES)
    own = ("tests/ops", "tests/nn/test_linear.py", "tests/nn/test_joined.py", "tests/autotune")
    said = run(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, "-m", "slow or not slow", "-k", "toy4 or toymaker"
    )
    assert int(said.split(" passed")[0].split()[-1]) >= 25
