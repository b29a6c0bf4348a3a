"""`terrazzo info`, `terrazzo ops`, `terrazzo layout`: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from terrazzo.command_line import INSTANCE, OPERATOR, Command, TargetName
from terrazzo.commands_config import describe
from terrazzo.console import console, json_option, print_json, print_table, size


@click.command(cls=Command)
@click.argument("bundle", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def info(bundle: Path | None, as_json: bool) -> None:
    """Versions, tools and cache; GPUs, and which operators are tested on them; what is missing and how to get it.

    With BUNDLE: what it holds and needs.
    """
    from terrazzo.lowering.environment import environment_report

    if bundle is not None:
        return _show_bundle(bundle, as_json)

    report = environment_report()
    report["wheels"] = _wheels()
    for device in report["devices"]:
        device["operators"] = _operators(device["target"])
    if as_json:
        return print_json(report)
    torch, nvcc, cache = report["torch"], report["nvcc"], report["cache"]
    rows = [
        ("terrazzo", report["terrazzo"]),
        ("python", f"{report['python']} on {report['platform']}"),
        ("torch", torch and f"{torch['version']} (CUDA {torch['cuda'] or 'none'})"),
        ("tilelang", report["tilelang"]),
        ("apache-tvm-ffi", report["tvm_ffi"]),
        ("compiler", describe(report["compiler"])[0]),
        ("nvcc", nvcc["path"] and f"{nvcc['version']} (toolkit {nvcc['toolkit']}) {nvcc['path']}"),
        ("host compiler", report["host_compiler"]),
        ("disassembler", report["disassembler"]),
        ("driver", report["driver"] and f"CUDA {report['driver']}"),
        *(row for device in report["devices"] for row in _device_rows(device)),
        *(("kernel wheel", said) for said in report["wheels"]),
        ("kernel cache", cache["path"] and f"{cache['path']} ({cache['entries']} kernels, {size(cache['bytes'])})"),
    ]
    print_table(("", ""), rows)
    if any(device["operators"] for device in report["devices"]):
        click.echo("\n`terrazzo ops` says what these words promise.")
    if report["missing"]:
        click.echo()
        columns = ("missing", "needed for", "how to get it")
        print_table(columns, [(part["what"], part["needed_for"], part["remedy"]) for part in report["missing"]])


def _operators(arch: str | None) -> dict[str, dict[str, list[str]]]:
    """Status -> operator -> its formats on an architecture; "refused" for those that do not run there."""
    from terrazzo.ops.registry import REGISTRY, STATUS

    found: dict[str, dict[str, list[str]]] = {status: {} for status in (*STATUS, "refused")}
    for support in REGISTRY if arch else ():
        status = support.targets.get(arch, "refused")
        found[status].setdefault(support.operator, []).append(support.format)
    return {status: operators for status, operators in found.items() if operators}


def _device_rows(device: dict[str, Any]) -> list[tuple[str, str]]:
    """A device, and how far the operators have been tried on it; formats are named where an operator's differ."""
    rows = [(f"GPU {device['index']}", _device(device))]
    whole = {}  # operator -> number of its statuses
    for operators in device["operators"].values():
        for name in operators:
            whole[name] = whole.get(name, 0) + 1
    for status, operators in device["operators"].items():
        said = [
            name if whole[name] == 1 else f"{name} ({', '.join(dict.fromkeys(formats))})"
            for name, formats in operators.items()
        ]
        rows.append((f"  {status}", ", ".join(said)))
    return rows


def _wheels() -> list[str]:
    """A line for each installed wheel of kernels."""
    from terrazzo.lowering.wheels import installed

    found = installed()
    used = [f"{it.name} {it.version}, {len(it.kernels)} kernels for {it.target}" for it in found.wheels]
    return used + list(found.refused.values())


def _show_bundle(path: Path, as_json: bool) -> None:
    """What a bundle was made for, and whether the driver here can load it."""
    from terrazzo.lowering.bundle import read_bundle
    from terrazzo.lowering.environment import driver_version, is_older

    found, driver = read_bundle(path), driver_version()
    names: dict[str, int] = {}
    for request in found.requests:
        names[request.name] = names.get(request.name, 0) + 1
    bytes_ = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if as_json:
        facts = {"bundle": str(path), "target": found.target.arch, "driver_needed": found.driver, "driver": driver}
        return print_json({**facts, "bytes": bytes_, "kernels": names, "layouts": dict(found.layouts)})
    here = "there is no driver here"
    if driver is not None:
        here = f"the one here is for {driver}: {'TOO OLD' if is_older(driver, found.driver) else 'it will do'}"
    rows = [
        ("bundle", f"{found.path}, {size(bytes_)}, every file as it was written"),
        ("target", found.target.arch),
        ("driver", f"for CUDA {found.driver} or newer; {here}"),
        ("kernels", f"{len(found.requests)}: {', '.join(f'{count} {name}' for name, count in names.items())}"),
        *(("layout", f"{name} {identity}") for name, identity in found.layouts.items()),
    ]
    print_table(("", ""), rows)


def _device(device: dict[str, Any]) -> str:
    if device["target"] is None:
        return f"{device['name']}: {device['problem']}"
    return f"{device['name']} ({device['target']}, {device['sms']} SMs, {size(device['memory_bytes'])})"


@click.command(cls=Command)
@click.option("--op", type=OPERATOR, help="Only this operator.")
@click.option("--target", type=TargetName(only_arch=True), help="Only this architecture, for example sm_90a.")
@json_option
def ops(op: str | None, target: str | None, as_json: bool) -> None:
    """Operators x formats x targets, and how far each has been tried."""
    from terrazzo.ops.registry import STATUS, rows

    found = rows(op, target)
    if as_json:
        return print_json(found)
    targets = list(dict.fromkeys(row["target"] for row in found))
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for row in found:
        merged.setdefault((row["operator"], row["format"]), {**row, "status": {}})["status"][row["target"]] = row[
            "status"
        ]
    rows = [(row["operator"], row["format"], *(row["status"].get(arch) for arch in targets)) for row in merged.values()]
    listed = lambda row, name: ", ".join(map(str, row[name]))
    below = [
        f"groups: {listed(row, 'groups')}; {listed(row, 'zeros')}; x: {listed(row, 'activations')}; {row['notes']}"
        for row in merged.values()
    ]
    print_table(("operator", "format", *targets), rows, below)
    click.echo()
    used = {row["status"] for row in found}
    for status, meaning in STATUS.items():
        if status in used:
            click.echo(f"{status}: {meaning}")


@click.command(cls=Command)
@click.argument("instance", type=INSTANCE, required=False)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the picture to this file.")
@json_option
def layout(instance: str | None, svg: Path | None, as_json: bool) -> None:
    """A packed layout: who holds what, where it lies in memory, which bank each lane hits. No INSTANCE: all names."""
    from terrazzo.layouts.instances import INSTANCES, get_instance

    if instance is None:
        if svg is not None:
            raise click.UsageError("--svg needs an INSTANCE: `terrazzo layout` lists them")
        facts = [_facts(name) for name in INSTANCES]
        if as_json:
            return print_json(facts)
        columns = ("instance", "block", "bits", "words", "bytes", "proof", "note")
        return print_table(
            columns,
            [
                (
                    fact["instance"],
                    f"{fact['block_rows']}x{fact['block_k']}",
                    fact["storage_bits"],
                    fact["load_words"],
                    fact["block_bytes"],
                    "holds" if fact["proof"]["ok"] else "FAILS",
                    fact["note"],
                )
                for fact in facts
            ],
        )
    get_instance(instance)
    if svg is not None:
        from terrazzo.layouts.picture import render_svg

        try:
            svg.parent.mkdir(parents=True, exist_ok=True)
            svg.write_text(render_svg(instance), encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--svg {svg} cannot be written: {error.strerror}") from error
    if as_json:
        return print_json(_facts(instance) | ({"svg": str(svg)} if svg else {}))
    if svg is not None:
        return click.echo(f"{svg}: picture of {instance}")
    from terrazzo.layouts.picture import render_text

    console().print(render_text(instance), end="", markup=False, soft_wrap=True)


def _facts(name: str) -> dict[str, Any]:
    from terrazzo.layouts.instances import INSTANCES, get_instance

    packed, instance = get_instance(name), INSTANCES[name]
    proof = packed.prove()
    return {
        "instance": name,
        "note": instance.note,
        "identity": packed.identity,
        "converter": instance.converter,
        "fragment": packed.fragment.name,
        "block_rows": packed.block_rows,
        "block_k": packed.block_k,
        "threads": packed.threads,
        "storage_bits": packed.storage_bits,
        "load_words": packed.load_words,
        "block_bytes": 4 * packed.words_per_block,
        "order": packed.order,
        "block_order": packed.block_order,
        "proof": {
            "ok": proof.ok,
            "bijective": proof.bijective,
            "coalesced": proof.coalesced,
            "banks": proof.banks,
            "failures": list(proof.failures),
        },
    }
