"""What users and files rely on, as data: parameters of public callables, options of the command, names of torch ops,
keys of tuned records, layouts, versions of files.

    python tests/tools/public_parameters.py            compare with tests/data/public_parameters.json; 1 if one differs
    python tests/tools/public_parameters.py --write    write that file anew, after a change that was meant

A callable is its parameters with their kinds and defaults, without annotations, which may become more exact.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)
GOLDEN = Path(__file__).parents[1] / "data" / "public_parameters.json"
VERSION = re.compile(r"terrazzo\.\w+/\d+")


def written(value: Any) -> str:
    """A default without what differs between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def parameters(function: Any) -> str:
    """ "(x, weight, *, out=None)"; "" of what tells none."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    empty, shown = inspect.Parameter.empty, []
    for it in found.parameters.values():
        default = it.default if it.default is empty else _Written(it.default)
        shown.append(it.replace(annotation=empty, default=default))
    return str(found.replace(parameters=shown, return_annotation=empty))


class _Written:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return written(self.value)


def is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("terrazzo")


def members(kind: type) -> Iterator[tuple[str, str]]:
    """(name, parameters) of a class's public methods and properties, inherited ones too, of terrazzo's own."""
    for name in dir(kind):
        if name.startswith("_"):
            continue
        part = inspect.getattr_static(kind, name)
        bare = getattr(part, "__func__", None) or getattr(part, "fget", None) or getattr(part, "func", None) or part
        if inspect.isfunction(bare) and is_ours(bare):
            yield name, parameters(getattr(kind, name)) if inspect.isroutine(getattr(kind, name)) else "property"


def callables(modules: list[str]) -> dict[str, str]:
    """ "terrazzo.ops.w4a16.gemm" -> its parameters, of every public function, class and method."""
    found = {}
    for name in modules:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            if inspect.isclass(value) and is_ours(value):
                found[f"{name}.{public}"] = parameters(value)
                found |= {f"{name}.{public}.{own}": text for own, text in members(value)}
            elif callable(value) and not inspect.isclass(value):
                found[f"{name}.{public}"] = parameters(value)
    return found


def options() -> dict[str, str]:
    """ "tune run --trials" -> what it may be, of every command."""
    import click
    from terrazzo.cli import terrazzo

    def every(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
        for it in command.params:
            shown = {name: getattr(it, name, None) for name in ("default", "required", "multiple", "is_flag", "nargs")}
            shown = {name: value for name, value in shown.items() if value not in (None, False, 1)}
            shown = {name: value for name, value in shown.items() if "UNSET" not in repr(value)}  # click's, of 8.3
            yield f"{path} {' '.join((*it.opts, *it.secondary_opts))}".strip(), f"{it.type.name} {written(shown)}"
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                yield from every(command.get_command(click.Context(command), name), f"{path} {name}".strip())

    return dict(every(terrazzo, ""))


def torch_ops() -> dict[str, str]:
    """Name -> schema."""
    import torch

    for path in sorted((ROOT / "ops").rglob("torch_op.py")):
        importlib.import_module(".".join(("terrazzo", *path.relative_to(ROOT).with_suffix("").parts)))
    schemas = [it for it in torch._C._jit_get_all_schemas() if it.name.startswith("terrazzo::")]
    return {it.name.partition("::")[2]: str(it).partition("(")[1] + str(it).partition("(")[2] for it in schemas}


def records() -> dict[str, list[str]]:
    """Operator -> keys under which records of one linear layer, or one cache, are kept."""
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.operators import OPERATORS
    from terrazzo.schedules.records import key

    found = {}
    for name, operator in OPERATORS.items():
        jobs = [
            Job(ops=(name,), shapes=((28672, 4096),), m=(64,), dtype=dtype, caches=("8x32/8x4k",))
            for dtype in ("float16", "bfloat16")
        ]
        problems = [problem for job in jobs for problem in operator.problems(job)]
        found[name] = sorted({f"{key(it.op, dict(it.facts))} m={it.m}" for it in problems})
    return found


def layouts() -> dict[str, str]:
    """Name of a layout, word of a format -> identity."""
    from terrazzo.layouts.instances import INSTANCES, get_instance

    return {name: get_instance(name).identity for name in INSTANCES}


def packed() -> dict[str, dict[str, Any]]:
    """Word of a format -> the facts that a module's state has of its weight, the layout among them."""
    import torch
    from terrazzo.nn import formats
    from terrazzo.ops.products.table import PRODUCTS

    found = {}
    for product in PRODUCTS:
        name, codes = product.word, product.codes
        words = [name, *(f"{name}-g{size}" for size in codes.groups), *[f"{name}-gK"] * codes.one_group]
        for word in [*words, *[f"{name}-sym"] * codes.symmetric]:
            weight = formats.Format.parse(word).quantize(torch.ones(64, 256), target="sm_90a")
            found[word] = formats.facts_of(weight)
            planes = (plane.name for plane in product.planes if plane.shape is not None)
            found[word] |= {own: list(getattr(weight, own).shape) for own in planes}
    return json.loads(json.dumps(found, default=str))


def versions() -> list[str]:
    """Of files that other versions of terrazzo read: all words "terrazzo.w4a16/1" of the library."""
    found: set[str] = set()
    for floor in ("lowering", "schedules", "ops", "nn", "integrations", "autotune", "terrazzo"):
        for path in (ROOT / floor).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            words = (it.value for it in nodes if isinstance(it, ast.Constant) and isinstance(it.value, str))
            found.update(word for word in words if VERSION.fullmatch(word))
    return sorted(found)


def snapshot(modules: list[str]) -> dict[str, Any]:
    """Everything above, as tests/data/public_parameters.json has it, of public modules."""
    return {
        "callables": callables(modules),
        "command": options(),
        "torch ops": torch_ops(),
        "records": records(),
        "layouts": layouts(),
        "packed": packed(),
        "versions": versions(),
    }


def differences(seen: Any, kept: Any, path: str = "") -> Iterator[str]:
    """A line for each value that differs, by where it stands."""
    if isinstance(seen, dict) and isinstance(kept, dict):
        for key in sorted(seen.keys() | kept.keys()):
            yield from differences(seen.get(key, "absent"), kept.get(key, "absent"), f"{path} / {key}" if path else key)
    elif seen != kept:
        yield f"{path}: {kept} became {seen}"


def main() -> int:
    """Compare, or write; returns the exit code."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_public_names import PUBLIC

    found = snapshot(PUBLIC)
    if "--write" in sys.argv[1:]:
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    lines = list(differences(found, json.loads(GOLDEN.read_text())))
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
