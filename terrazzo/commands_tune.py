"""`terrazzo tune`: search schedules on this machine's GPU, and look after what was measured."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from terrazzo.command_line import AMOUNT, COUNT, MODEL, TUNED_OPERATOR, Counts, Group, Number, Shape, TargetName
from terrazzo.console import check_writable, console, json_option, print_json, print_table

if TYPE_CHECKING:
    from terrazzo.autotune.database import Best, Database
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.runner import Progress, Summary
    from terrazzo.lowering.targets import Target

_STATUS_S = 30.0  # between two lines that only say how far a job is, where there is no terminal


class _DefaultRun(Group):
    """`terrazzo tune --op ...` is `terrazzo tune run --op ...`, and its help shows the options of both."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [record for it in run_command.params if (record := it.get_help_record(ctx)) is not None]
        with formatter.section("Options of `tune run`, which `tune` followed by options stands for"):
            formatter.write_dl(records)
        super().format_options(ctx, formatter)


@click.group("tune", cls=_DefaultRun)
def tune_group() -> None:
    """Search the fastest schedules on this machine's GPU, keep and share them."""


def _database(function: Callable) -> Callable:
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--database", type=path, help="Trial database. Default: beside the kernel cache.")(function)


def _open(path: Path | None, create: bool = False) -> Database:
    from terrazzo.autotune.database import Database

    return Database(path, create)


@tune_group.command("run")
@click.option("--job", "job_file", type=click.Path(path_type=Path), help="Job file (TOML); flags override its fields.")
@click.option("--op", "ops", type=TUNED_OPERATOR, multiple=True, help="Operator, may be repeated. Default: w4a16.")
@click.option("--model", "models", type=MODEL, multiple=True, help="All layers of a model; may be repeated.")
@click.option("--shape", "shapes", type=Shape(), multiple=True, help="Weight [N, K] as 28672x4096; may be repeated.")
@click.option("--shapes", "shapes_file", type=click.Path(path_type=Path), help="File of lines NxK, or NxK M M ...")
@click.option("--m", "ms", type=Counts(), help="Numbers of tokens. Default: one of each bucket, 8 to 4096.")
@click.option("--experts", type=Counts(), help="Of the grouped operators, for --shape. Default: 8.")
@click.option("--cache", "caches", multiple=True, help="Attention: batch x heads / kv heads x tokens, 8x32/8x32k.")
@click.option("--format", "formats", multiple=True, help="Attention: formats of keys/values, int4/int4.")
@click.option("--page", "pages", type=AMOUNT, multiple=True, help="Attention: tokens of a page. Default: 0, none.")
@click.option("--dtype", type=click.Choice(["f16", "bf16"]), help="Activations and output. Default: f16.")
@click.option("--group", type=COUNT, help="Channels of a scale. Default: 128, w4a8 64, mxfp4 32, nvfp4 16, w8a8 K.")
@click.option("--symmetric", is_flag=True, help="Without zero points.")
@click.option(
    "--target",
    type=TargetName(auto=True),
    help="auto (default), or the GPU that must be there; with --dry-run any target.",
)
@click.option("--strategy", help="learned (default with the extra `tune`), top-k (without), exhaustive or random.")
@click.option("--trials", type=AMOUNT, help="Schedules of one problem, at most.")
@click.option("--most", type=COUNT, help="Schedules of a problem's space, at most. Default: 160.")
@click.option("--within", type=Number(1, 1e6), help="Leave out what is predicted slower by this factor. Default: 1.6.")
@click.option("--sample", type=AMOUNT, help="Only a random choice of so many schedules of each problem.")
@click.option("--table", "tables", multiple=True, help="Records whose schedules are tried too, of another GPU as well.")
@click.option("--wide", is_flag=True, help="Also rings of fewer stages and other rasters: a whole space, to record it.")
@click.option("--budget", help="For the whole job: 90s, 10m, 1h or '200 trials'.")
@click.option("--patience", type=AMOUNT, help="Trials without progress that end a problem. Default: 24; 0: never.")
@click.option("--seed", type=AMOUNT, help="Of the strategy.")
@click.option("--gpus", help="CUDA devices, 0,1, or all. Default: the first one.")
@click.option("--workers", type=COUNT, help="Compiling processes. Default: one for each CPU.")
@click.option("--executor", type=click.Choice(["local", "ray"]), default="local", help="ray: the extra `cluster`.")
@click.option("--address", help="Of a running Ray cluster, auto or ray://host:10001. Default: start one here.")
@click.option("--resume", is_flag=True, help="Go on: nothing that the database holds is measured again.")
@click.option("--export", "export", type=click.Path(dir_okay=False, path_type=Path), help="Write the table in the end.")
@click.option("--dry-run", is_flag=True, help="Only counts and predictions; needs no GPU.")
@_database
@json_option
def run_command(
    job_file: Path | None, shapes_file: Path | None, budget: str | None, gpus: str | None, executor: str,
    export: Path | None, dry_run: bool, database: Path | None, as_json: bool, **named: Any,
) -> None:  # fmt: skip
    """Measure schedules and keep every trial. Ctrl-C keeps what was measured; --resume goes on."""
    from terrazzo.autotune import jobs
    from terrazzo.autotune.runner import preview
    from terrazzo.autotune.search import usual

    job = jobs.read_job(job_file) if job_file else jobs.Job()
    given = named | {name: named[name] or None for name in ("symmetric", "wide")} | {"m": named["ms"]}
    given |= {"dtype": {"f16": "float16", "bf16": "bfloat16", None: None}[named["dtype"]]}
    given |= {"extra": jobs.read_shapes(shapes_file)} if shapes_file else {}
    given |= jobs.budget(budget) if budget else {}
    job = jobs.override(job, **given)
    job.problems()  # a job that names none is refused before anything starts
    if not named.get("strategy") and job.strategy == "top-k" == usual():
        click.echo("strategy top-k; with xgboost (pip install 'terrazzo[tune]') the usual one is learned", err=True)
    _check_gpus(gpus, executor)
    check_writable("--export", export)
    if dry_run:
        target, rows = preview(job)
        return _show_preview(job, target, rows, as_json)
    parts = _ray_parts(named["address"], gpus) if executor == "ray" else _local_parts(gpus, named["workers"])
    with parts as (measurers, own), _open(database, create=True) as trials, _Display(job, quiet=as_json) as display:
        from terrazzo.autotune.runner import Runner

        summary = Runner(job, trials, measurers, resume=named["resume"], report=display, **own).run()
        display.close(summary)
        if as_json:
            print_json(_summary(summary))
        else:
            _show_summary(summary, trials)
        if export is not None:
            from terrazzo.autotune.database import best

            _write_table(best(trials.trials()), export, None)
    if summary.ended == "interrupted":
        raise click.exceptions.Exit(130)


def _check_gpus(gpus: str | None, executor: str) -> None:
    """Refuse, in a dry run too, what names no GPUs: CUDA's numbers or UUIDs, a number of workers with ray."""
    if gpus in (None, "all"):
        return
    if executor == "ray" and not gpus.isdecimal():
        raise click.UsageError(f"--gpus {gpus!r}: with --executor ray it is a number of workers, or all")
    if not all(re.fullmatch(r"\d+|(GPU|MIG)-\S+", at) for at in gpus.split(",")):
        raise click.UsageError(f"--gpus {gpus!r} names no CUDA devices: write 0,1, or all")


@contextmanager
def _local_parts(gpus: str | None, workers: int | None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Measuring processes of this machine's GPUs, and the runner's further arguments."""
    from terrazzo.autotune.isolation import Measurer

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    every = visible.split(",") if visible else [str(at) for at in range(_gpu_count())]
    devices = every if gpus == "all" else (gpus or every[0]).split(",")
    yield [Measurer(at) for at in devices], {"workers": workers}


@contextmanager
def _ray_parts(address: str | None, gpus: str | None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The same of a Ray cluster; `gpus` is a number of workers there."""
    from terrazzo.autotune.cluster import Cluster

    with Cluster(address, None if gpus in (None, "all") else int(gpus)) as found:
        yield found.measurers, {"compiler": found.compiler, "workers": found.cpus}


def _gpu_count() -> int:
    """GPUs of this machine, asked without touching them; 1 where nobody knows."""
    import subprocess

    from terrazzo.lowering.toolchain import find_program

    try:
        said = subprocess.run(
            [find_program("nvidia-smi") or "/nowhere", "-L"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in said.splitlines()))


def _show_preview(job: Job, target: Target, rows: list[dict[str, object]], as_json: bool) -> None:
    if as_json:
        return print_json({"target": target.arch, "gpu": target.name, "strategy": job.strategy, "problems": rows})
    columns = ("op", "problem", "M", "schedules", "trials", "heuristic us", "best us", "bound", "bound us")
    names = ("op", "what", "m", "schedules", "trials", "heuristic_us", "predicted_best_us", "bound", "bound_us")
    print_table(columns, [tuple(row[name] for name in names) for row in rows])
    trials = sum(row["trials"] for row in rows)
    confirm = len(rows) * (job.confirm + 1 if job.confirm else 0)
    click.echo(
        f"{len(rows)} problems for {target.name} ({target.arch}), predicted times; strategy {job.strategy}: at most "
        f"{trials} trials and {confirm} more to confirm; nothing was measured"
    )


class _Display:
    """Live progress: a bar on a terminal, lines elsewhere (new bests, and how far the job is)."""

    def __init__(self, job: Job, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.job, self.quiet, self.live = job, quiet, sys.stderr.isatty() and not quiet
        text = TextColumn("{task.description}")
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self.bar = Progress(*columns, console=console(stderr=True), disable=not self.live, transient=True)
        self.task = self.bar.add_task("compiling the first kernels", total=None)
        self.best: dict[Any, float] = {}
        self.last = time.monotonic()

    def __enter__(self) -> _Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, at: Progress) -> None:
        line = _line(at)
        self.bar.update(self.task, completed=at.done, total=at.total, description=line)
        news = at.best_us is not None and at.best_us < self.best.get(at.problem, float("inf"))
        if at.best_us is not None:
            self.best[at.problem] = at.best_us
        due = time.monotonic() - self.last > _STATUS_S
        if not self.live and not self.quiet and at.trial is not None and (news or due):
            self.last = time.monotonic()
            click.echo(f"[{at.done}/{at.total}] {line}", err=True)

    def close(self, summary: Summary) -> None:
        self.bar.stop()
        if not self.quiet:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
            known = f", {summary.reused} known before" if summary.reused else ""
            ended = {"done": "done", "budget": "budget spent", "interrupted": "stopped"}[summary.ended]
            click.echo(
                f"{ended}: {summary.trials} trials ({counts or 'none'}){known} in {summary.seconds:.1f} s", err=True
            )


def _line(at: Progress) -> str:
    """What a job just did, in one line."""
    said = [str(at.problem)]
    if at.trial is not None:
        said.append(f"{at.trial.us:.2f} us" if at.trial.us is not None else f"{at.trial.status}")
    if at.best_us is not None:
        ratio = f" ({at.heuristic_us / at.best_us:.3f}x the heuristic)" if at.heuristic_us else ""
        said.append(f"best {at.best_us:.2f} us{ratio}")
    if at.left_s is not None:
        said.append(f"{max(0, round(at.left_s))} s left")
    return ", ".join(said)


def _summary(summary: Summary) -> dict[str, Any]:
    best = [
        {"op": problem.op, **dict(problem.facts), "m": problem.m, "us": us, "heuristic_us": heuristic}
        for problem, (us, heuristic) in summary.best.items()
    ]
    return {**vars(summary), "best": best}


def _show_summary(summary: Summary, trials: Database) -> None:
    from terrazzo.autotune.database import best

    found = [it for it in best(trials.trials()) if it.trial.problem in summary.best]
    if found:
        _print_best(found, trials)


@tune_group.command("list")
@_database
@json_option
def list_command(database: Path | None, as_json: bool) -> None:
    """Jobs in the database: what they tried and how it ended; each operator's heuristic against the tuned best."""
    from terrazzo.autotune.database import best

    with _open(database) as trials:
        jobs: dict[str, list] = {}
        for it in trials.trials():
            jobs.setdefault(it.job, []).append(it)
        where, gains = str(trials.path), _gains(best(trials.trials()))
    rows = []
    for job, same in jobs.items():
        counts = Counter(it.status for it in same)
        failed = {status: count for status, count in sorted(counts.items()) if status != "ok"}
        started = time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(it.created for it in same)))
        row = {
            "job": job,
            "started": started,
            "gpu": same[-1].machine.gpu,
            "ops": sorted({it.problem.op for it in same}),
        }
        row |= {"problems": len({it.problem for it in same}), "trials": len(same), "ok": counts["ok"], "failed": failed}
        rows.append(row | {"terrazzo": same[-1].machine.terrazzo, "sources": same[-1].machine.sources})
    if as_json:
        return print_json({"database": where, "jobs": rows})
    columns = ("job", "started", "gpu", "ops", "problems", "trials", "ok", "failed", "sources")
    print_table(
        columns,
        [
            tuple(
                ", ".join(f"{number} {status}" for status, number in row[name].items())
                if name == "failed"
                else row[name]
                for name in columns
            )
            for row in rows
        ],
    )
    for line in gains:
        click.echo(line)
    click.echo(where)


@tune_group.command("best")
@click.option("--op", type=TUNED_OPERATOR, help="Only this operator.")
@click.option("--gpu", help="Only this GPU's name.")
@click.option("--shape", "shapes", type=Shape(), multiple=True, help="Only these weights.")
@_database
@json_option
def best_command(
    op: str | None, gpu: str | None, shapes: tuple[tuple[int, int], ...], database: Path | None, as_json: bool
) -> None:
    """The fastest schedule of each problem."""
    from terrazzo.autotune.database import best

    with _open(database) as trials:
        found = best(trials.trials(op=op, gpu=gpu))
        size = lambda it: tuple(dict(it.trial.problem.facts).get(name) for name in ("n", "k"))
        found = [it for it in found if not shapes or size(it) in shapes]
        if as_json:
            return print_json([_best_row(it) for it in found])
        _print_best(found, trials)


def _best_row(it: Best) -> dict[str, Any]:
    trial = it.trial
    row = {"gpu": trial.machine.gpu, "op": trial.problem.op, **dict(trial.problem.facts), "m": trial.problem.m}
    row |= {"program": trial.program, "schedule": dict(trial.params), "us": trial.us, "spread": trial.spread}
    return row | {"heuristic_us": it.heuristic_us, "tried": it.tried, "failed": it.failed, "bound": trial.bound}


def _print_best(found: list[Best], trials: Database) -> None:
    peers = {problem: us for (problem, _), us in trials.peers().items()}
    rows = []
    for it in found:
        trial, peer = it.trial, peers.get(it.trial.problem)
        schedule = " ".join([trial.program, *(f"{name}={value}" for name, value in trial.params)])
        gain, over = it.heuristic_us and it.heuristic_us / trial.us, peer and peer / trial.us
        problem = trial.problem
        rows.append((problem.op, problem.what, problem.m, trial.us, gain, over, it.tried, it.failed, schedule))
    columns = ("op", "problem", "M", "us", "x heuristic", "x cuBLAS", "tried", "failed", "schedule")
    print_table(columns, rows)
    for line in _gains(found):
        click.echo(line)


def _gains(found: list[Best]) -> list[str]:
    """For each operator, the heuristic's time over the tuned best one: the goal is a geometric mean within 10 %."""
    from terrazzo.autotune.report import GOAL, geomean

    lines = []
    for op in dict.fromkeys(it.trial.problem.op for it in found):
        ratios = [it.heuristic_us / it.trial.us for it in found if it.trial.problem.op == op and it.heuristic_us]
        if ratios:
            lines.append(
                f"{op}: the heuristic takes {geomean(ratios):.3f}x the tuned best (geometric mean of {len(ratios)} "
                f"problems, worst {max(ratios):.3f}x; goal {GOAL:.2f}x)"
            )
    return lines


@tune_group.command("explain")
@click.option("--op", type=TUNED_OPERATOR, default="w4a16", show_default=True, help="Operator.")
@click.option("--shape", "shapes", type=Shape(), multiple=True, help="Weight [N, K] as 28672x4096.")
@click.option("--m", "ms", type=Counts(), help="Numbers of tokens.")
@click.option("--experts", type=Counts(), help="Of the grouped operators. Default: 8.")
@click.option("--cache", "caches", multiple=True, help="Attention: batch x heads / kv heads x tokens, 8x32/8x32k.")
@click.option("--format", "formats", multiple=True, help="Attention: formats of keys/values, int4/int4.")
@click.option("--page", "pages", type=AMOUNT, multiple=True, help="Attention: tokens of a page. Default: 0, none.")
@click.option("--dtype", type=click.Choice(["f16", "bf16"]), default="f16", show_default=True)
@click.option("--group", type=COUNT, help="Default: 128, w4a8 64, mxfp4 32, nvfp4 16, w8a8 K.")
@click.option("--symmetric", is_flag=True, help="Without zero points.")
@click.option("--target", type=TargetName(), help="Default: the GPU that is here.")
@json_option
def explain_command(
    op: str,
    ms: tuple[int, ...] | None,
    dtype: str,
    target: str | None,
    as_json: bool,
    **named: object,
) -> None:
    """Which tuned record an operator takes, or why it takes its heuristic."""
    from terrazzo.autotune import jobs
    from terrazzo.lowering.targets import Target
    from terrazzo.schedules import records

    at, given = Target.parse(target), {**named, "symmetric": named["symmetric"] or None}
    job = jobs.override(jobs.Job(), ops=(op,), m=ms, dtype={"f16": "float16", "bf16": "bfloat16"}[dtype], **given)
    rows = []
    for problem in job.problems():
        found, reasons = records.explain(op, dict(problem.facts), problem.m, at)
        reasons = reasons or ["no table for this GPU"] * (found is None)
        row = {
            "what": problem.what,
            "m": problem.m,
            "how": found.how if found else "heuristic",
            "record_m": found.m if found else None,
        }
        rows.append(row | {"us": found.us if found else None, "reasons": reasons})
    if as_json:
        return print_json(rows)
    print_table(
        ("problem", "M", "answer", "record's M", "us", "because"),
        [(row["what"], row["m"], row["how"], row["record_m"], row["us"], "; ".join(row["reasons"])) for row in rows],
    )


@tune_group.command("export")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: standard output.")
@click.option("--gpu", help="Its name. Default: the only GPU in the database.")
@_database
def export_command(output: Path | None, gpu: str | None, database: Path | None) -> None:
    """Write the best schedules of a GPU as the table that operators read (TERRAZZO_TUNED names it)."""
    from terrazzo.autotune.database import best

    check_writable("--output", output)
    with _open(database) as trials:
        _write_table(best(trials.trials(gpu=gpu)), output, gpu)


def _write_table(found: list[Best], output: Path | None, gpu: str | None) -> None:
    """The table of the one GPU of some bests, to a file or to standard output."""
    from terrazzo.autotune.database import table
    from terrazzo.lowering.errors import ArgumentError

    machines = {(it.trial.machine.gpu, it.trial.machine.sms) for it in found}
    if len(machines) != 1:
        names = ", ".join(f"{name} with {sms} SMs" for name, sms in sorted(machines)) or "none"
        raise ArgumentError("gpu", gpu, f"the database must have one such GPU, it has: {names}", "name one with --gpu")
    data = table(found, *machines.pop())
    lines = [json.dumps(row, sort_keys=True) for row in data["records"]]
    head = json.dumps({name: value for name, value in data.items() if name != "records"})[:-1]
    text = head + ', "records": [\n' + ",\n".join(lines) + "\n]}\n"
    if output is None:
        return click.echo(text, nl=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    private = output.with_name(f".{output.name}.{os.getpid()}")
    private.write_text(text, encoding="utf-8")
    private.replace(output)
    click.echo(f"{output}: {len(lines)} records of {data['gpu']}")


@tune_group.command("space")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--op", type=TUNED_OPERATOR, help="Only this operator.")
@click.option("--gpu", help="Only this GPU's name.")
@_database
def space_command(output: Path, op: str | None, gpu: str | None, database: Path | None) -> None:
    """Write every schedule that was tried, with its time: a space to replay searches with."""
    from terrazzo.autotune.database import spaces_of

    check_writable("--output", output)
    with _open(database) as trials:
        data = spaces_of(trials.trials(op=op, gpu=gpu))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(data).replace("], [", "],\n[") + "\n", encoding="utf-8")
    sizes = [sum(len(own["rows"]) for own in row["programs"].values()) for row in data["problems"]]
    click.echo(f"{output}: {len(sizes)} problems, {sum(sizes)} schedules")


@tune_group.command("import")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@_database
def import_command(files: tuple[Path, ...], database: Path | None) -> None:
    """Add the records of exported tables to the database; of benchmark results, others' times for its problems."""
    from terrazzo.autotune.benchmark_peers import is_result, peers_of
    from terrazzo.autotune.database import from_table
    from terrazzo.lowering.data_files import read_json

    with _open(database, create=True) as trials:
        for path in files:
            data = read_json(path, "table", "name an exported table or a benchmark's result")
            if is_result(data):
                known = dict.fromkeys(it.problem for it in trials.trials(gpu=data.get("gpu")))
                made = list(peers_of(data, known, path.name))
                for problem, name, us in made:
                    run = f"{path.name} {data.get('commit')} {data.get('date')}"
                    uid = f"{run} {problem.op} {problem.text} {problem.m} {name}"
                    trials.add_peer(problem, data["gpu"], name, us, f"import {path.name}", uid)
                click.echo(f"{path}: times of others for {len(made)} of {len(known)} problems")
                continue
            found = from_table(data, path.name)
            click.echo(f"{path}: {trials.add(found)} new trials of {len(found)}")


@tune_group.command("merge")
@click.argument("databases", type=click.Path(path_type=Path), nargs=-1, required=True)
@_database
def merge_command(databases: tuple[Path, ...], database: Path | None) -> None:
    """Add the trials of other databases."""
    with _open(database, create=True) as trials:
        for path in databases:
            click.echo(f"{path}: {trials.merge(path)} new trials")


@tune_group.command("prune")
@click.option("--gpu", help="Only trials of this GPU.")
@click.option("--failed", is_flag=True, help="Only trials without a time.")
@click.option("--stale", is_flag=True, help="Only trials of other sources of the library than these.")
@click.option("--older-than", "days", type=Number(0, 1e6), help="Only trials older than so many days.")
@_database
def prune_command(gpu: str | None, failed: bool, stale: bool, days: float | None, database: Path | None) -> None:
    """Delete trials: those that match every condition that is given, and at least one is needed."""
    from terrazzo.lowering.sources import package_digest

    if not (gpu or failed or stale or days is not None):
        raise click.UsageError("name what to delete: --gpu, --failed, --stale or --older-than")
    before = None if days is None else time.time() - days * 86400
    with _open(database) as trials:
        done = trials.prune(gpu, package_digest()[:16] if stale else None, before, failed)
    click.echo(f"{done} trials deleted")


@tune_group.command("throughput")
@click.option("--workers", type=Counts(), help="Numbers of processes to try. Default: 1, 2, 4, ... up to the CPUs.")
@click.option("--target", default="sm_90a", show_default=True, help="What is compiled for.")
@json_option
def throughput_command(workers: tuple[int, ...] | None, target: str, as_json: bool) -> None:
    """Compile light kernels in 1, 2, 4, ... processes: kernels a second, and how well that scales. Needs no GPU."""
    from terrazzo.autotune import throughput
    from terrazzo.lowering.targets import Target

    cpus = len(os.sched_getaffinity(0))
    tried = workers or sorted({*(1 << at for at in range(cpus.bit_length()) if 1 << at <= cpus), cpus})
    wanted = throughput.requests(throughput.ROUNDS * max(tried), Target.parse(target))
    rows: list[dict[str, Any]] = []
    for count in tried:
        found = throughput.measure(count, wanted)
        row = {"workers": count, "kernels": found.kernels, "seconds": round(found.seconds, 2)}
        base = rows[0]["per_second"] / rows[0]["workers"] if rows else found.per_second / count
        row |= {"per_second": round(found.per_second, 3), "efficiency": round(found.per_second / count / base, 3)}
        rows.append(row)
        if not as_json:
            click.echo(
                f"{count:3} processes: {row['per_second']:.2f} kernels/s, {row['efficiency']:.0%} of "
                f"{rows[0]['workers']}-process speed for each"
            )
    if as_json:
        print_json({"cpus": cpus, "target": target, "rows": rows})


@tune_group.command("report")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("tuning.html"))
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the overview to this file.")
@click.option("--gpu", help="Its name. Default: the one with the latest trial.")
@_database
def report_command(output: Path, png: Path | None, gpu: str | None, database: Path | None) -> None:
    """Write one self-contained HTML page: rooflines, gains, search curves, what is slow and why."""
    from terrazzo.autotune.database import best
    from terrazzo.autotune.report import write_report

    check_writable("--output", output)
    check_writable("--png", png)
    with _open(database) as trials:
        count = write_report(trials, output, png, gpu)
        gains = _gains(best(trials.trials(gpu=gpu)))
    for line in gains:
        click.echo(line)
    click.echo(f"{output}: {count} problems" + (f"; {png}" if png else ""))
