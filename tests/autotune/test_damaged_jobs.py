"""Job files from elsewhere: whatever stands in one is a job, or an error that names the file and the field."""

from __future__ import annotations

import json
from random import Random

import mutation
import pytest
from terrazzo.autotune import jobs
from terrazzo.autotune.jobs import Job
from terrazzo.autotune.operators import get_operator
from terrazzo.cli import main
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

JOB = {
    "op": ["w4a16", "w4a8"],
    "models": ["llama-3-8b"],
    "shapes": ["28672x4096"],
    "m": [8, 64],
    "dtype": "f16",
    "group": 128,
    "symmetric": False,
    "strategy": "top-k",
    "budget": "10m",
    "trials": 24,
    "patience": 24,
    "measure_ms": 15.0,
    "within": 1.6,
    "head_dim": 128,
    "part": [
        {"op": "w4a8_grouped", "shapes": ["1536x2048"], "experts": [128]},
        {"op": "attention", "caches": ["8x32/8x32k"], "formats": ["int4/int4"], "pages": [0, 128], "q_len": [1, 4]},
        {"op": ["w4ax", "attention_prefill"], "shapes": ["4096x4096"], "m": 16},
    ],
}
TEXT = "\n".join(f"{name} = {json.dumps(value)}" for name, value in JOB.items() if name != "part").encode()


def use(job: Job, random: Random) -> None:
    """The problems of a job, and schedules of one of them."""
    problems = job.problems()
    problem = random.choice(problems)
    operator, target = get_operator(problem.op), Target.parse("sm_90a")
    (first, *_) = operator.space(problem).candidates(target, problem.m, most=1)
    operator.request(problem, first.program, first.params, target)
    operator.roofline(problem, target)


def test_damaged_jobs_are_refused_or_run(tmp_path, tries):
    path, refused = tmp_path / "job.toml", []
    for at, random in enumerate(tries(80)):
        if at % 4:
            data = mutation.value(JOB, random)
            call = lambda data=data, random=random: use(jobs.job_of(data, "job"), random)
        else:
            path.write_bytes(mutation.data(TEXT, random))
            call = lambda random=random: use(jobs.read_job(path), random)
        refused.append(not mutation.survives(call))
    assert sum(refused) > len(refused) / 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m = " + mutation.DIGITS, "cannot be read: "),
        ("m = " + "[" * 50_000, "cannot be read: .* nested too deeply"),
        ("m = [99999999999]", "must be integers, at least 1 and at most 2147483647"),
        ('shapes = ["' + mutation.DIGITS + 'x8"]', "is no shape"),
        ('budget = "' + mutation.DIGITS + 's"', "is no time"),
        ("measure_ms = inf", "must be positive, at most 60000"),
        ("seed = 1e999", "must be int"),
        ('caches = ["8x32/8x' + mutation.DIGITS + '"]', "is no cache"),
        ('shapes_file = "a\\u0000b"', "cannot be read: "),
    ],
)
def test_numbers_without_end_are_refused_by_their_field(text, said, tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        jobs.read_job(path).problems()
    assert main(["tune", "--job", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert len(said) < 1200 and (str(path) in said or "shapes" in said)


def test_shapes_files_have_numbers_of_32_bits(tmp_path):
    path = tmp_path / "shapes.txt"
    for line in (f"{mutation.DIGITS}x8", f"8x8 {mutation.DIGITS}", "8x8 0", "8x8 4294967296"):
        path.write_text(line)
        with pytest.raises(ArgumentError, match="is no shape|no numbers"):
            jobs.read_shapes(path)
    path.write_bytes(b"8x8\xff")
    with pytest.raises(ArgumentError, match="cannot be read"):
        jobs.read_shapes(path)
