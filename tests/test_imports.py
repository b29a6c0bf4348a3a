"""The order of the floors: an import only goes down, inside a floor there are no circles, and importing is cheap."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    "lowering",
    "layouts",
    "schedules",
    "ops",
    "nn",
    "integrations",
    "autotune",
    "terrazzo",
)  # ground floor first
HEAVY = ("torch", "tilelang", "tvm", "tvm_ffi", "triton", "safetensors", "rich", "click")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "terrazzo" else ("terrazzo", *parts))


SOURCES = {module_name(path): path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))}


def floor_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS[:-1] else "terrazzo"


def resolve(base: str, name: str) -> str:
    """The module that `from base import name` reads: base.name if that is a module, else base."""
    return f"{base}.{name}" if f"{base}.{name}" in SOURCES else base


@cache
def imports(module: str) -> list[tuple[int, str, bool]]:
    """(line, module of terrazzo, whether it happens at import time) for each import of a file, and each dotted name
    "terrazzo.x.y" in a string or f-string, which is how lazy names are written."""
    tree = ast.parse(SOURCES[module].read_text())
    found, lazy = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy.update(id(inner) for inner in ast.walk(node) if inner is not node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            lazy.update(id(inner) for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            names = [resolve(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            names = [node.value] * (node.value in SOURCES)
            lazy.add(id(node))
        found += [(node.lineno, name, id(node) not in lazy) for name in names if name.split(".")[0] == "terrazzo"]
    return found


def test_every_floor_is_read():
    assert {floor_of(module) for module in SOURCES} == set(FLOORS)
    assert floor_of("terrazzo.cli") == "terrazzo" and floor_of("terrazzo.ops.weight_only.integers") == "ops"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_down(module):
    own = FLOORS.index(floor_of(module))
    for line, imported, _ in imports(module):
        assert FLOORS.index(floor_of(imported)) <= own, (
            f"{SOURCES[module].relative_to(ROOT)}:{line}: {floor_of(module)} must not import {imported}, "
            f"which is a floor above ({' -> '.join(reversed(FLOORS))})"
        )


CIRCLES: set[tuple[str, ...]] = set()
"""Circles that imports inside functions still close: the list only shrinks."""
SIDEWAYS: set[tuple[str, str]] = set()
"""Imports of one family by another, or by what all share: the list only shrinks."""
FAMILIES = ("activation", "attention", "fp8", "mxfp4", "nf4", "norm", "nvfp4", "rope", "w4a16", "w4a8", "w4ax", "w8a16")


def short(module: str) -> str:
    return module.removeprefix("terrazzo.")


@cache
def graph() -> dict[str, set[str]]:
    """module -> the modules that it imports when it is imported or in a function, but for type checkers alone."""
    return {
        module: {
            name
            for line, name, _ in imports(module)
            if name in SOURCES and name != module and not checked(module, line)
        }
        for module in SOURCES
    }


def checked(module: str, line: int) -> bool:
    """Whether a line stands under `if TYPE_CHECKING`."""
    return any(line in lines for lines in _checked(module))


@cache
def _checked(module: str) -> list[range]:
    tree = ast.parse(SOURCES[module].read_text())
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return [range(node.lineno, node.body[-1].end_lineno + 1) for node in blocks]


def circles(edges: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Sets of modules each of which reaches every other (Tarjan)."""
    index, low, stack, found = {}, {}, [], set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in sorted(edges[module]):
            if name not in index:
                visit(name)
            if name in stack:
                low[module] = min(low[module], low[name])
        if low[module] == index[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found.add(tuple(sorted(members)))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def test_circles_are_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(edges) == {("b", "c")}


def test_no_circles_even_through_functions():
    found = {tuple(map(short, circle)) for circle in circles(graph())}
    assert found == CIRCLES, f"new: {sorted(found - CIRCLES)}; gone, so take it off the list: {sorted(CIRCLES - found)}"


def test_benchmarks_close_no_circles():
    names = {f"benchmarks.{'.'.join(path.relative_to(ROOT / 'benchmarks').with_suffix('').parts)}": path
             for path in (ROOT / "benchmarks").rglob("*.py")}  # fmt: skip
    edges = {}
    for module, path in names.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        told = {one for node in nodes for alias in node.names for one in (node.module, f"{node.module}.{alias.name}")}
        edges[module] = (told & names.keys()) - {module}
    assert len(edges["benchmarks.readme"]) > 4 and not circles(edges)


def test_no_circles_at_import_time():
    edges = {m: {n for _, n, eager in imports(m) if eager and n in SOURCES and n != m} for m in SOURCES}
    assert not circles(edges)


PUBLIC = {"terrazzo.ops.w8a8": "w4a8", "terrazzo.ops.mxfp4_fp8": "w4a8", "terrazzo.ops.mxfp4_mxfp8": "w4a8"}
"""Public names of modules that lie in a family's folder."""


def family_of(module: str) -> str:
    if module in PUBLIC:
        return PUBLIC[module]
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["ops"] and len(parts) > 2 and parts[2] in FAMILIES else ""


def test_families_import_each_other_nowhere():
    """A family's modules may use what all share; no family uses another, and nothing shared uses a family, but for
    what names all of them."""
    names = {f"terrazzo.ops.{name}" for name in ("registry", "model_layers", "model_requests", "stored_layers")}
    found = {
        (short(module), short(name))
        for module, imported in graph().items()
        if module.startswith("terrazzo.ops.") and module not in names and not module.startswith("terrazzo.ops.kinds.")
        for name in imported
        if family_of(name) not in ("", family_of(module))
    }
    assert found == SIDEWAYS, f"new: {sorted(found - SIDEWAYS)}; gone, so take it off: {sorted(SIDEWAYS - found)}"


HOST = "cache dlpack entry fmpq format launching op quantizer records reference shards weights".split()
"""Last names of modules that no kernel is made of."""
LOWERING = {"errors", "targets"}
"""Modules of lowering that a builder may import."""
BUILDERS = [name for name, path in SOURCES.items() if floor_of(name) == "ops" and "\ndef build(" in path.read_text()]


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_kernel_is_not_made_of_code_of_the_host(builder):
    """A builder's closure is what a kernel's name hangs on (lowering/sources.py): a message changed in a module of the
    host would rename it, in wheels and bundles too."""
    from terrazzo.lowering import sources

    found = sources.closure([builder])
    assert builder in found
    assert not [name for name in found if floor_of(name) in ("ops", "schedules") and name.split(".")[-1] in HOST]
    assert {short(name) for name in found if floor_of(name) == "lowering"} <= {f"lowering.{name}" for name in LOWERING}


def test_every_builder_is_looked_at():
    assert len(BUILDERS) > 20 and "terrazzo.ops.attention.decoding.decode_program" in BUILDERS


def test_no_operator_is_named_on_the_floors_of_layouts_and_lowering():
    for module, path in SOURCES.items():
        if floor_of(module) in ("lowering", "layouts"):
            for name in ("w4a16", "w4a8", "w4ax"):
                hits = [line for line in path.read_text().splitlines() if f"tz_{name}" in line or f"ops.{name}" in line]
                assert not [line for line in hits if "example" not in line], f"{path}: {hits}"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_every_floor_imports_no_heavy_package():
    floors = [
        "terrazzo",
        *(f"terrazzo.{floor}" for floor in FLOORS[:-1]),
        "terrazzo.ops.w4a16",
        "terrazzo.ops.w4a8",
        "terrazzo.ops.registry",
    ]
    code = f"import importlib, sys\nfor name in {floors}:\n    importlib.import_module(name)\n"
    code += f"    bad = [heavy for heavy in {HEAVY} if heavy in sys.modules]\n    assert not bad, (name, bad)"
    run(code)


def test_importing_every_module_imports_neither_torch_nor_tilelang():
    # torch_op is torch.library's side of an operator; gemm imports it when traced. Modules of nn are torch's classes,
    # those of integrations import the library of their name.
    apart = (".__main__", ".torch_op")
    floors = ("terrazzo.nn.", "terrazzo.integrations.")
    modules = [name for name in SOURCES if not name.endswith(apart) and not name.startswith(floors)]
    heavy = ("torch", "tilelang", "tvm", "tvm_ffi")
    code = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
    code += f"    bad = [heavy for heavy in {heavy} if heavy in sys.modules]\n    assert not bad, (name, bad)"
    run(code)


def test_lazy_names_of_the_roof():
    import terrazzo

    for name in terrazzo.__all__:
        assert getattr(terrazzo, name) is not None and name in dir(terrazzo)
    assert terrazzo.Target.parse("sm_90a").arch == "sm_90a"
    assert terrazzo.ops.w4a16.__name__ == "terrazzo.ops.w4a16"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = terrazzo.nonsense


def test_one_line_reaches_an_operator():
    run("import terrazzo\nterrazzo.ops.w4a16.QuantizedWeight")


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w4ax", "attention", "norm", "activation", "rope"])
def test_no_submodule_hides_a_public_name(family):
    """An import binds a submodule to its package, where it would stand in the place of a function of the same name."""
    package = importlib.import_module(f"terrazzo.ops.{family}")
    for name in package.__all__:
        if importlib.util.find_spec(f"{package.__name__}.{name}") is not None:
            assert getattr(package, name) is importlib.import_module(f"{package.__name__}.{name}"), name
