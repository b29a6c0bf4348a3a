"""The wheel: built from the tree, its contents, and that it works where nothing else of the tree is."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("autotune", "ops", "schedules", "layouts", "lowering")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built without isolation, so that no package is fetched; from a copy, so that the tree stays clean."""
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("terrazzo", *FLOORS):  # other processes may write bytecode meanwhile
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = out.glob("terrazzo-*.whl")
    return built


def test_it_contains_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"terrazzo/py.typed"}
    for floor in ("terrazzo", *FLOORS):
        for path in (ROOT / floor).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            expected.add(inside if floor == "terrazzo" else f"terrazzo/{inside}")
    assert expected <= names, f"missing from the wheel: {sorted(expected - names)}"
    tops = {name.split("/")[0] for name in names}
    assert all(top == "terrazzo" or re.fullmatch(r"terrazzo-.*\.dist-info", top) for top in tops), tops


def test_tuned_records_travel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "schedules" / "tuned").glob("*.json"):
        assert f"terrazzo/schedules/tuned/{path.name}" in names


def test_its_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    meta = email.message_from_bytes(archive.read(name))
    needs = meta.get_all("Requires-Dist")
    assert meta["License-Expression"] == "Apache-2.0" and meta["Requires-Python"] == ">=3.10"
    assert any(need.startswith("tilelang<0.1.16,>=0.1.15") for need in needs)
    assert {"test", "nvcc", "runtime", "bench", "dev"} <= set(meta.get_all("Provides-Extra"))
    (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "terrazzo = terrazzo.cli:main" in archive.read(points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_it_works_in_a_clean_environment(wheel, tmp_path):
    """Installed alone into an empty folder, run by an interpreter that sees that folder and the dependencies only."""
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
# an editable install of the tree would answer for the wheel
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__ + repr(finder)]
import importlib
for floor in {FLOORS!r}:
    module = importlib.import_module("terrazzo." + floor)
    assert module.__file__.startswith({str(site)!r}), module.__file__
import terrazzo
from terrazzo.layouts import get_instance
assert get_instance("w4a16_wgmma").prove().ok
assert not {{"torch", "tilelang"}} & set(sys.modules)
from terrazzo.cli import main
sys.exit(main(["ops", "--json"]))
"""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and '"w4a16"' in done.stdout, done.stderr


def test_every_package_folder_is_listed():
    """setuptools maps folders one by one; a new folder that is not listed would be left out of the wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    for floor in FLOORS:
        for init in (ROOT / floor).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT).as_posix()
            dotted = "terrazzo." + folder.replace("/", ".")
            assert f'    "{dotted}",' in text, f"list {dotted} under [tool.setuptools] packages"
            assert f'"{dotted}" = "{folder}"' in text, f"map {dotted} under [tool.setuptools.package-dir]"
