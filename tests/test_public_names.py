"""Public names: what a package lists, what type checkers read and what it resolves on first use are the same names."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from prose import MOST_WORDS, clauses, words

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import public_parameters

ROOT = Path(__file__).parents[1]
OPS = ("fp8", "moe", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8", "nf4", "nvfp4", "registry", "w4a8.fp8", "w8a8", "w8a16")
MODULES = (
    "terrazzo.integrations.transformers",
    "terrazzo.layouts.tilelang",
    "terrazzo.lowering.errors",
    "terrazzo.nn.generation",
    "terrazzo.nn.preparing",
    *(f"terrazzo.ops.{name}" for name in OPS),
)
"""Modules that are public beside the packages."""
FOLDERS = sorted(path for path in (ROOT / "terrazzo").iterdir() if path.is_symlink())
PACKAGES = sorted(
    ".".join(("terrazzo", folder.name, *init.parent.relative_to(folder.resolve()).parts))
    for folder in FOLDERS
    for init in folder.resolve().rglob("__init__.py")
    if len(ast.parse(init.read_text()).body) > 1  # those of a docstring alone are not public
)
PUBLIC = ["terrazzo", *PACKAGES, *MODULES]
EAGER = ("terrazzo.layouts.converters", "terrazzo.integrations.vllm", *MODULES)
"""Those whose names are there as soon as they are imported."""
NEEDS = {"terrazzo.integrations": "transformers", "terrazzo.integrations.transformers": "transformers"}
"""Modules whose names are there where another library is installed."""


def imported(name: str) -> ModuleType:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    return importlib.import_module(name)


def tree_of(module: ModuleType) -> ast.Module:
    return ast.parse(Path(module.__file__).read_text(encoding="utf-8"))


def literal_all(tree: ast.Module) -> list[str] | None:
    """The names of `__all__` where it is written out, as type checkers read it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def test_what_public_names_lead_to_is_public():
    assert {"terrazzo.ops.w4a16", "terrazzo.nn", "terrazzo.ops.w4a8.fp8"} <= set(PUBLIC)
    for name in set(PUBLIC) - set(NEEDS):  # whose modules are of other libraries' names
        module = importlib.import_module(name)
        values = (getattr(module, public) for public in module.__all__)
        found = {value.__name__ for value in values if isinstance(value, ModuleType)}
        assert found <= set(PUBLIC), name


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_shows_the_public_names_and_no_others(name):
    module = imported(name)
    listed = literal_all(tree_of(module))
    assert listed and len(set(listed)) == len(listed) and module.__all__ == listed
    for public in listed:
        assert getattr(module, public) is not None, public
    assert dir(module) == sorted(listed)  # also now that all were resolved
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in EAGER])
def test_checkers_read_what_is_resolved(name):
    """The imports of a package under TYPE_CHECKING are its public names, and the objects that it hands out."""
    module = imported(name)
    (block,) = (node for node in tree_of(module).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    found = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        home = importlib.import_module(statement.module)
        found |= {alias.name: (home, alias.name) for alias in statement.names}
    assert set(found) == set(module.__all__) - {"__version__"}
    for public, (home, own) in found.items():
        value = getattr(module, public)
        there = importlib.import_module(value.__name__) if isinstance(value, ModuleType) else getattr(home, own)
        assert value is there, public
        assert not isinstance(value, ModuleType) or value.__name__ == f"{home.__name__}.{own}"


def test_what_users_and_files_rely_on_is_what_it_was():
    """Parameters, options, torch ops, keys of records, layouts: after a change that was meant, run
    tests/tools/public_parameters.py --write."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    kept = json.loads(public_parameters.GOLDEN.read_text())
    assert not list(public_parameters.differences(public_parameters.snapshot(PUBLIC), kept))


NO_ERRORS = ("terrazzo.nn.fuse", "terrazzo.nn.positions_of", "terrazzo.integrations.vllm.register")
"""Functions that refuse nothing."""


def functions_of(name: str) -> dict[str, Callable]:
    """Public functions of a module and public methods and properties of its classes, of terrazzo's own."""
    found = {}
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isfunction(value):
            found[f"{name}.{public}"] = inspect.unwrap(value)
        elif inspect.isclass(value):
            for own, part in vars(value).items():
                part = getattr(part, "__func__", None) or getattr(part, "fget", None) or getattr(part, "func", part)
                if not own.startswith("_") and inspect.isfunction(part):
                    found[f"{name}.{public}.{own}"] = inspect.unwrap(part)
    return {name: it for name, it in found.items() if it.__module__.startswith("terrazzo")}


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_documented(name):
    """Functions also name their parameters and errors, or another function that has them."""
    missing, module = [], imported(name)
    for public in module.__all__:
        value = getattr(module, public)
        own_doc = (value.__doc__ or "(").removeprefix(getattr(value, "__name__", ""))
        if inspect.isclass(value) and own_doc.startswith("("):  # a dataclass without one has its signature
            missing.append(f"{public}: a docstring")
    for public, function in functions_of(name).items():
        text = inspect.getdoc(function) or ""
        if not text:
            missing.append(f"{public}: a docstring")
        is_method = public.removeprefix(f"{name}.").count(".")
        if is_method or re.search(r"`[\w.]+(\(|`)", text):
            continue
        parameters = inspect.signature(function).parameters
        missing += [f"{public}: {parameter}" for parameter in parameters if not re.search(rf"\b{parameter}\b", text)]
        if "Raises:" not in text and public not in NO_ERRORS:
            missing.append(f"{public}: what it raises")
    assert not missing


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings_are_plain_english(name):
    """No clause is longer than a sentence of a page may be. "Behind" is where one means "after", "those of" a noun."""
    module = imported(name)
    classes = {f"{name}.{it}": getattr(module, it) for it in module.__all__ if inspect.isclass(getattr(module, it))}
    found = {}
    for public, owner in {name: module, **classes, **functions_of(name)}.items():
        text = inspect.cleandoc(owner.__doc__ or "")
        said = [f"{words(part)} words: {part}" for part in clauses(text) if words(part) > MOST_WORDS]
        if said := [*said, *re.findall(r"\S*\s+\b(?:behind|those of)\b\s+\S+", text)]:
            found[public] = said
    assert not found


TENSORS = re.compile(r"\bTensor\b|SupportsDLPack|Array")
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):")
ENTRY = r"(?:^|\. |; |\.\n|;\n)\s*((?:\*{0,2}\w+, )*\*{0,2}\w+): "


def entries(text: str) -> dict[str, str]:
    """Parameter -> its own entry under `Args:`: what stands between its name and the next one's."""
    found: dict[str, str] = {}
    _, _, rest = text.partition("Args:\n")
    lines = list(itertools.takewhile(lambda line: not line or line.startswith(" "), rest.splitlines()))
    for block in re.split(r"\n(?= {4}\S)", "\n".join(lines)):
        names = list(re.finditer(ENTRY, block))
        for at, name in enumerate(names):
            end = names[at + 1].start() if at + 1 < len(names) else len(block)
            found |= dict.fromkeys(re.split(r", ", name[1].replace("*", "")), block[name.end() : end])
    return found


def has_shape(text: str, parameter: str) -> bool:
    """Whether a docstring says the sizes of a tensor: in brackets in its entry or right behind its name, or where."""
    entry = entries(text).get(parameter, "")
    behind = re.search(rf"\b{parameter}\b`? (\S+ )?\[", text)
    listed = re.search(rf"^Arguments \([^)]*\b{parameter}\b[^)]*\) as of\b", text, re.MULTILINE)
    return bool(behind or listed or re.search(r"\[|\(N, K\)|\b(see|as (of|in)|there)\b", entry))


@pytest.mark.parametrize(
    ("text", "found"),
    (
        ("x: float [M, K]. w: what it multiplies.", {"x"}),
        ("x: what is\n        multiplied, [M, K].\n    w: of x.", {"x"}),
        ("x, w: float [M, K], of one\n        size. b: given.", {"x", "w"}),
        ("x: see `gemm`. w: [N, K].", {"x", "w"}),
    ),
)
def test_a_shape_is_that_of_its_own_parameter(text, found):
    text = f"Multiply x [M, K] by them.\n\nArgs:\n    {text}\n\nRaises:\n    ArgumentError: sizes [N]."
    assert {name for name in ("w", "b") if has_shape(text, name)} == found - {"x"} and has_shape(text, "x")
    assert {name for name in ("x", "w") if has_shape(text.replace("x [M, K] by", "by"), name)} == found


@pytest.mark.parametrize("name", PUBLIC)
def test_tensors_that_public_functions_take_have_a_shape(name):
    """In the parameter's own entry: its sizes in brackets, or what else says them."""
    imported(name)
    missing = []
    for public, function in functions_of(name).items():
        text = inspect.getdoc(function) or ""
        if public.removeprefix(f"{name}.").count(".") or not text:
            continue
        for parameter in inspect.signature(function).parameters.values():
            if not TENSORS.search(str(parameter.annotation)) or "Mapping" in str(parameter.annotation):
                continue
            if not has_shape(text, parameter.name):
                missing.append(f"{public}: {parameter.name}")
    assert not missing


def test_importing_the_root_is_cheap():
    """0.05 s is the promise, of CPU time here, which a busy machine does not lengthen; the best of five."""

    def seconds(code: str) -> float:
        used = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(used)

    own = {"terrazzo", "terrazzo.lowering", "terrazzo.lowering.lazy"}
    check = f"assert {{name for name in sys.modules if name.partition('.')[0] == 'terrazzo'}} == {own}"
    assert seconds(f"import sys, terrazzo; {check}") - seconds("import sys") < 0.05
