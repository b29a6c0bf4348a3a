"""The wheel and the editable install: their contents, any working directory, type checkers."""

from __future__ import annotations

import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import terrazzo
from test_public_names import PUBLIC

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import release_check

ROOT = Path(__file__).parents[1]
FLOORS = sorted(path.name for path in (ROOT / "terrazzo").iterdir() if path.is_symlink())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what is built, links as links, in a folder named terrazzo, as a clone is."""
    copy = tmp_path_factory.mktemp("parent") / "terrazzo"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("terrazzo", *FLOORS):  # other processes may write bytecode meanwhile
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    """Built by way of an archive of the sources, without isolation, so that no package is fetched."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = out.glob("terrazzo-*.whl")
    return built


@pytest.fixture(scope="module")
def environments(checkout, wheel, tmp_path_factory) -> dict[str, Path]:
    """Interpreters of environments in which the wheel is installed, or the checkout as an editable one."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    sources = {"wheel": (str(wheel),), "editable": ("--no-build-isolation", "-e", str(checkout))}
    made, running = {}, []
    for kind, source in sources.items():
        folder = tmp_path_factory.mktemp(kind) / "venv"
        venv.create(folder, symlinks=True)
        made[kind] = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text("\n".join(packages))  # what stands in *.pth files there is not read
        command = [sys.executable, "-m", "pip", "--python", str(made[kind]), "install", "--no-deps", "--no-index"]
        running.append(subprocess.Popen([*command, "--quiet", *source], stderr=subprocess.PIPE, text=True))
    for install in running:
        said = install.communicate()[1]
        assert install.returncode == 0, said
    return made


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


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
    assert {"test", "compile", "runtime", "cluster", "bench", "dev"} <= set(meta.get_all("Provides-Extra"))
    base = {re.match(r"[\w-]+", need).group() for need in needs if "extra ==" not in need}
    assert base == {"apache-tvm-ffi", "torch", "numpy", "safetensors", "filelock", "regex", "click", "rich", "tomli"}
    (compiler,) = (need for need in needs if need.startswith("tilelang") and "compile" in need)
    assert compiler.startswith("tilelang[nvcc]<0.1.16,>=0.1.15")
    (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "terrazzo = terrazzo.cli:main" in archive.read(points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


WITH_CODE = [ROOT / "README.md", ROOT / "docs" / "quick-start.md", ROOT / "docs" / "operators.md"]
"""Documents whose lines users copy, in the order in which they are read."""


def names_of_documents() -> list[str]:
    """Dotted names below `terrazzo` in the documents' code: "terrazzo.ops.w4a16.gemm" of "w4a16.gemm"."""
    text = "".join(path.read_text() for path in WITH_CODE)
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    family = r"(?:w4a16|w4a8|w4ax|attention|moe)"
    found = re.findall(rf"(?<![\w./\"-])((?:terrazzo|{family})(?:\.[A-Za-z_]\w*)+)", code)
    return sorted({name if name.startswith("terrazzo") else f"terrazzo.ops.{name}" for name in found})


USE = """
import sys, terrazzo
for dotted in {names}:
    if dotted.startswith("terrazzo.nn."):  # to use a name of it is to import torch; to name it is not
        assert dotted.split(".")[2] in dir(terrazzo.nn), dotted
        continue
    *path, name = dotted.split(".")[1:]
    value = terrazzo
    for part in path:
        value = getattr(value, part)
    assert name in dir(value), dotted
    if dotted not in {heavy}:
        getattr(value, name)
import terrazzo.ops.w4a16, terrazzo.autotune
assert terrazzo.layouts.get_instance("w4a16_wgmma").prove().ok
assert not {{"torch", "tilelang"}} & set(sys.modules)
print(terrazzo.__file__, terrazzo.ops.w4a16.__file__)
"""


HEAVY = ("terrazzo.load", "terrazzo.generate", "terrazzo.quantize")
"""What makes modules: to use one is to import torch, as of terrazzo.nn; to name it is not."""


def test_names_of_the_documents_are_found():
    assert {"terrazzo.ops.w4a16.load_layer", "terrazzo.ops.w4a8.fp8.quantize", "terrazzo.load_bundle"} <= set(
        names_of_documents()
    )


@pytest.mark.parametrize("place", ["elsewhere", "parent", "checkout", "checkout/terrazzo", "checkout/ops"])
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_every_name_of_the_documents_works_in_any_folder(kind, place, environments, checkout, tmp_path):
    """A folder named terrazzo below the working directory, a checkout or its root, does not answer for the package."""
    folders = {"elsewhere": tmp_path, "parent": checkout.parent, "checkout": checkout}
    folder = folders.get(place) or checkout / place.partition("/")[2]
    python, env = str(environments[kind]), clean_environment()
    code = USE.format(names=names_of_documents(), heavy=HEAVY)
    done = subprocess.run([python, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    root, module = map(Path, done.stdout.split())
    assert module == root.parent / "ops" / "w4a16" / "__init__.py", "one package, from one place"
    installed = kind == "wheel" and place != "checkout"  # whose own folder terrazzo/ is the first on the path
    assert root.is_relative_to(environments["wheel"].parents[1] if installed else checkout)
    command = [python, "-m", "terrazzo", "ops", "--json"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and '"w4a16"' in done.stdout, done.stderr


def test_a_release_is_tried_as_a_user_would(environments, tmp_path):
    """`make release-check` does the same where every package is fetched."""
    assert release_check.try_out(environments["wheel"], tmp_path) == {}
    (tmp_path / "layout.svg").unlink()
    assert set(release_check.try_out(Path("/bin/false"), tmp_path)) == set(release_check.TRIES)


def test_the_changelog_has_the_release():
    assert release_check.release_of((ROOT / "CHANGELOG.md").read_text()) == terrazzo.__version__
    with pytest.raises(ValueError, match="no heading"):
        release_check.release_of("## Unreleased\n\n## 1.2.3\n")


def test_every_floor_is_linked():
    """A new floor without its link in terrazzo/ would be left out of the wheel, and unknown to editors."""
    floors = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {"terrazzo", "benchmarks"}
    links = {path.name: os.readlink(path) for path in (ROOT / "terrazzo").iterdir() if path.is_symlink()}
    assert links == {floor: f"../{floor}" for floor in floors}
    for floor in floors:  # setuptools takes a folder with modules and without __init__.py for no package
        for path in (ROOT / floor).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"add {path.parent.relative_to(ROOT)}/__init__.py"


GIVEN = """import torch
class Norm:
    weight: torch.Tensor
    variance_epsilon: float
def given() -> torch.Tensor:
    return torch.ones(1)
"""
EACH = """
norm, weights = Norm(), [given()]
calibration, weight, expert_ids, gates, q, k, v, q1, k1, v1 = [given() for _ in range(10)]
"""
"""What the documents' lines take for granted, before each block."""


def checked_files(folder: Path) -> tuple[list[str], dict[str, list[int]]]:
    """Files that a user may write: names of all, and the lines in them that a type checker must refuse."""
    text = "".join(path.read_text() for path in WITH_CODE)
    files = {
        "documents.py": GIVEN + "".join(EACH + code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    }
    imports = [f"import {name}" for name in PUBLIC]
    every = [f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__]
    files["every_name.py"] = "\n".join([*imports, *(f"reveal_type({name})" for name in every)])
    by_import = ("from {} import {} as _{}".format(*name.rsplit(".", 1), i) for i, name in enumerate(every))
    files["by_import.py"] = "\n".join(by_import)
    files["unknown.py"] = "\n".join([*imports, *(f"{module}.quantise" for module in PUBLIC)])
    files["misused.py"] = """from terrazzo.ops import w4a16, w4a8
import torch

def call(x: torch.Tensor, w: w4a16.PackedWeight, v: w4a8.PackedWeight, e: w4a8.fp8.PackedWeight) -> torch.Tensor:
    w4a8.gemm(w4a8.quantize_activations(x), v, out=x)
    w4a8.gemm(x, e)
    w4a8.gemm(x, w)
    w4a16.gemm(x, v)
    w4a16.gemm(x, w, biass=x)
    return w4a16.gemm([1.0], w)
"""
    files["arrays.py"] = """from terrazzo.ops import attention, w4a16, w4a8
import torch
import tvm_ffi

def call(a: tvm_ffi.Tensor, x: torch.Tensor, w: w4a16.PackedWeight, v: w4a8.PackedWeight) -> tvm_ffi.Tensor:
    y: torch.Tensor = w4a8.gemm(w4a8.quantize_activations(a), v)
    y = w4a8.gemm(x, v)
    z: tvm_ffi.Tensor = w4a8.gemm(a, v, out=x)
    w4a16.quantize(a)
    attention.pack_cache(a, a, "int4", "int4")
    return w4a16.gemm(a, w, bias=a)
"""
    for name, code in files.items():
        (folder / name).write_text(code)
    wrong = {"unknown.py": [len(PUBLIC) + 1 + i for i in range(len(PUBLIC))], "misused.py": [7, 8, 9, 10]}
    return list(files), wrong


def complaints(said: list[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for file, line in sorted(set(said)):
        found.setdefault(Path(file).name, []).append(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_mypy_knows_every_name(kind, environments, tmp_path, tmp_path_factory):
    pytest.importorskip("mypy", reason="mypy is in the extra `test`")
    files, wrong = checked_files(tmp_path)
    cache = tmp_path_factory.getbasetemp() / "mypy"  # torch is read once
    command = [sys.executable, "-m", "mypy", "--strict", "--allow-redefinition", "--no-error-summary"]
    command += ["--python-executable", str(environments[kind]), "--cache-dir", str(cache), *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = re.findall(r"^((\S+?):(\d+): error: .*)$", done.stdout, re.MULTILINE)
    seen = complaints([(file, int(line)) for _, file, line in said])
    assert seen == wrong, "\n".join(whole for whole, _, _ in said) + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_pyright_knows_every_name(kind, environments, tmp_path):
    pytest.importorskip("pyright", reason="pyright is in the extra `test`")
    files, wrong = checked_files(tmp_path)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(environments[kind]), *files]
    env = os.environ | {"PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "1"}  # else it is fetched
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)["generalDiagnostics"]
    errors = [one for one in report if one["severity"] == "error"]
    seen = complaints([(one["file"], one["range"]["start"]["line"] + 1) for one in errors])
    assert seen == wrong, "\n".join(f"{one['file']}: {one['message']}" for one in errors)
    revealed = [one["message"] for one in report if one["severity"] == "information"]
    assert len(revealed) > 100 and not [message for message in revealed if "Unknown" in message]
