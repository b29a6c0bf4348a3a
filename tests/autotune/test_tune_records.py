"""Trials in the database, tables of records, and what operators make of them."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path

import pytest
import terrazzo
from terrazzo.autotune import database as store
from terrazzo.autotune import jobs
from terrazzo.autotune.database import Database, Machine, Problem, Trial
from terrazzo.autotune.operators import get_operator
from terrazzo.lowering.errors import ArgumentError, CacheError
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import requests
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op as attention
from terrazzo.ops.attention.prefilling import prefill_op
from terrazzo.ops.call import plans
from terrazzo.ops.w4a8 import op as w4a8
from terrazzo.ops.w4a8.w8a8 import op as w8a8
from terrazzo.ops.w4ax import op as w4ax
from terrazzo.ops.weight_only import op as weight_only
from terrazzo.schedules import linear_spaces, records
from terrazzo.schedules.problem import Gemm

pytestmark = pytest.mark.usefixtures("without_records")
SHIPPED = Path(records.__file__).parent / "tuned"
H200, H100 = Target.parse("nvidia/nvidia-h200"), Target.parse("nvidia/nvidia-h100")
A100 = Target.parse("nvidia/nvidia-a100")
HERE = Machine("sm_90a", H200.name, 132, "1", "13.0", "2", "0.1.15", "0.1.0", "abc")
PLAN = weight_only.Facts(6144, 4096, group_size=128, symmetric=False, scale_dtype="float16", dtype="float16")
FACTS = PLAN.tuned()
FAST = dict(token_tiles=1, kc=2, nc=60, warps=8, chunk=2, stages=2, cluster=1)
SLOW = dict(FAST, warps=16)
ROW = dict(op="w4a16", facts=FACTS, m=8, program="small_batch", schedule=FAST, us=5.0)


def trial(params=FAST, us=5.0, m=8, uid="1", **changes) -> Trial:
    made = Trial(Problem.of("w4a16", FACTS, m), "small_batch", tuple(sorted(params.items())), HERE, "ok", us, 0.01)
    return dataclasses.replace(made, uid=uid, **changes)


@pytest.fixture
def trials(tmp_path):
    with Database(tmp_path / "trials.db") as made:
        yield made


def table(rows=None, gpu=H200.name, sms=132, **version) -> records.Table:
    own = dict(terrazzo="0.1.0", tilelang="0.1.15") | version
    data = {"schema": 1, "gpu": gpu, "sms": sms, "records": [row | own for row in rows or [ROW]]}
    return records.Table(data, "a table")


def test_trials_come_back_as_they_went(trials):
    given = [trial(), trial(SLOW, None, uid="2", status="crash", error="died", spread=None, bound="load", bound_us=2.5)]
    assert trials.add(given) == 2 and trials.add(given) == 0
    assert trials.trials() == given
    assert trials.trials(status="crash") == given[1:] and trials.trials(m=9) == []
    assert trials.link.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_trial_of_an_unknown_status_is_refused(trials):
    with pytest.raises(ArgumentError, match=r"^status = 'lost': must be one of ok, compile, .*error"):
        trials.add([trial(), trial(SLOW, None, uid="2", status="lost", error="?")])
    assert trials.trials() == []


def test_the_best_is_a_median_of_confirmed_schedules(trials):
    trials.add(
        [trial(SLOW, 6.0, uid="h", role="heuristic"), trial(FAST, 5.0), trial(dict(FAST, kc=1), 4.9, uid="lucky")]
    )
    (best,) = store.best(trials.trials())
    assert best.trial.us == 4.9 and best.heuristic_us == 6.0 and (best.tried, best.failed) == (3, 0)
    trials.add([trial(FAST, 5.2, uid="c1", role="confirm"), trial(SLOW, 6.4, uid="c2", role="confirm")])
    (best,) = store.best(trials.trials())
    assert dict(best.trial.params) == FAST and best.trial.us == pytest.approx(5.1)
    assert best.heuristic_us == pytest.approx(6.2)
    trials.add([trial(SLOW, 9.0, uid="new", machine=dataclasses.replace(HERE, tilelang="0.2.0"))])
    (best,) = store.best(trials.trials())
    assert best.trial.us == 9.0  # other versions are another question


def test_merge_import_export_and_prune(trials, tmp_path):
    trials.add([trial(), trial(SLOW, None, uid="2", status="hang", error="slow", created=1.0)])
    with Database(tmp_path / "other.db") as other:
        assert other.merge(trials.path) == 2 and other.merge(trials.path) == 0
        assert other.prune() == 0
        assert other.prune(failed=True, before=0.5) == 0 and other.prune(failed=True, before=2.0) == 1
        assert other.prune(sources="abc") == 0 and other.prune(sources="def") == 1
        data = json.loads(json.dumps(store.table(store.best(trials.trials()), H200.name, 132)))
        (row,) = data["records"]
        assert row["schedule"] == FAST and row["us"] == 5.0 and row["tilelang"] == "0.1.15" and row["driver"] == "1"
        assert other.add(store.from_table(data, "x.json")) == 1 and other.add(store.from_table(data, "x.json")) == 0
        assert store.best(other.trials())[0].trial.us == 5.0
        for base, program in ((5.0, row["program"]), (6.5, store.UNKNOWN)):  # the heuristic's time and schedule
            again = {**data, "records": [row | {"heuristic_us": base}]}
            with Database(tmp_path / f"{base}.db") as one:
                assert one.add(store.from_table(again, "x.json")) == 2
                assert {it.program for it in one.trials() if it.role == "heuristic"} == {program}
                (kept,) = store.table(store.best(one.trials()), H200.name, 132)["records"]
                assert (kept["us"], kept["heuristic_us"], kept["schedule"]) == (5.0, base, FAST)
                (space,) = store.spaces_of(one.trials())["problems"]
                assert list(space["programs"]) == [row["program"]]
        with pytest.raises(CacheError, match="is no file"):
            other.merge(tmp_path / "nothing.db")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("this is no database" * 100)
    with pytest.raises(CacheError, match="cannot be used"):
        Database(tmp_path / "text")
    link = sqlite3.connect(tmp_path / "new.db")
    link.execute("PRAGMA user_version=99")
    link.close()
    with pytest.raises(CacheError, match="version 99"):
        Database(tmp_path / "new.db")
    with sqlite3.connect(tmp_path / "notes.db") as link:
        link.execute("CREATE TABLE notes (text TEXT)")
    link.close()
    before = (tmp_path / "notes.db").read_bytes()
    with pytest.raises(CacheError, match="no such trial database: .* holds none"):
        Database(tmp_path / "notes.db")
    assert (tmp_path / "notes.db").read_bytes() == before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "schema"),
        ({"schema": 7}, "schema = 7"),
        ({"schema": 1, "gpu": "x", "records": []}, "gpu, sms"),
        ({"schema": 1, "gpu": "x", "sms": 1, "records": [{"op": "w4a16"}]}, "facts"),
        *(
            ({"schema": 1, "gpu": "x", "sms": 1, "records": [ROW | {"m": m}]}, rf"m = {m}: is not an integer from 1")
            for m in (0, -1)
        ),
    ],
)
def test_damaged_tables_say_what_is_wrong(data, words, tmp_path):
    with pytest.raises(ArgumentError, match=words):
        records.Table(data, "t")
    with pytest.raises(ArgumentError, match="cannot be read"):
        records.Table.read(tmp_path / "nothing.json")


def test_what_is_no_table_is_refused():
    for path in (None, 5, b"x"):
        with pytest.raises(ArgumentError, match="must be the path of a table"):
            records.Table.read(path)
    for one in (None, 5, "x"):
        with pytest.raises(ArgumentError, match="must be a Table"):
            records.use(one)


TILE = dict(block_tokens=64, warpgroups=2, row_blocks=1, stages=4, stage_k=64, raster=8, per_sm=1, cluster=1)


@pytest.mark.parametrize("name", TILE)
def test_schedules_of_no_size_do_not_fit(name):
    space, heuristic = (
        get_operator("w4a16").space(Problem.of("w4a16", FACTS, 64)),
        plans.plan(64, PLAN, H200),
    )
    assert not space.revive("stream_k", TILE, H200, 64)[1]
    for value in (0, -1):
        schedule, why = space.revive("stream_k", TILE | {name: value}, H200, 64)
        assert schedule is None and f"{name} = {value}, a count below one" in why
        records.use(
            table([dict(op="w4a16", facts=FACTS, m=64, program="stream_k", schedule=TILE | {name: value}, us=1.0)])
        )
        assert plans.plan(64, PLAN, H200).request == heuristic.request
        records.clear()


def test_damaged_schedules_serve_no_neighbours():
    made = table([ROW | {"m": 64, "schedule": {"row_tiles": 0, "min_blocks": 1}}])
    assert made.find("w4a16", FACTS, 60)[0] is None
    none = table([ROW | {"m": 64, "program": "multistage", "schedule": {"block_tokens": 0}}])
    assert all(none.find("w4a16", FACTS, m)[1] or m <= 64 for m in range(1, 200))  # no tile divides by zero
    for damage in ({"row_tiles": "x", "min_blocks": 1}, {"tokens": "x"}, {"tokens": 1.0}, {"tokens": 2**31}, []):
        with pytest.raises(ArgumentError, match=r"records\[0\].schedule = .*: is not an object of integers"):
            table([ROW | {"m": 64, "schedule": damage}])


def schedule_of(m: int, target: Target = H200, **changes) -> dict:
    params = dict(plans.plan(m, dataclasses.replace(PLAN, **changes), target).request.params)
    return {name: params.get(name) for name in FAST}


def test_operators_take_exact_records_and_those_of_the_bucket(monkeypatch):
    monkeypatch.setattr(records, "SHARED", {})
    heuristic = schedule_of(8)
    assert heuristic != FAST
    records.use(table())
    assert schedule_of(8) == schedule_of(3) == FAST  # dropped plans are made again
    assert schedule_of(9) != FAST  # another bucket
    assert schedule_of(8, H100) == heuristic  # another GPU
    assert schedule_of(8, numerics="exact") != FAST and schedule_of(8, dtype="bfloat16", scale_dtype="bfloat16") != FAST
    assert schedule_of(8, bias=True) == FAST
    records.clear()
    assert schedule_of(8) == heuristic


def test_records_of_a_gpu_serve_another_one_by_rule(monkeypatch):
    """Of the operators that were compared, on a GPU of as many SMs, behind that GPU's own tables."""
    heuristic = schedule_of(8, H100)
    monkeypatch.setattr(records, "SHARED", {H100.name: {H200.name: ("w4a16",)}})
    records.use(table())
    assert schedule_of(8, H100) == FAST != heuristic
    assert records.tokens("w4a16", FACTS, H100) == records.tokens("w4a16", FACTS, H200) != []
    for op, target in (("w4a8", H100), ("w4a16", dataclasses.replace(H100, sms=114)), ("w4a16", A100)):
        found, (reason, *_) = records.explain(op, FACTS, 8, target)
        said = f"measured on NVIDIA H200 with 132 SMs, this is {target.name} with {target.sms}"
        assert found is None and said in reason and not records.tokens(op, FACTS, target)
        assert ("shared are those of w4a16" in reason) == (op == "w4a8")
    shipped = {name: table(gpu=name) for name in (H100.name, H200.name)}
    monkeypatch.setattr(records, "_shipped", shipped.get)
    records.clear()
    assert records.tables(H100.name) == [shipped[H100.name], shipped[H200.name]]
    assert records.tables(H200.name) == [shipped[H200.name]]


@pytest.mark.parametrize(("here", "answer"), [("0.1.3", True), ("0.2.0", True), ("0.3.0", False), ("0.10.0", False)])
def test_records_serve_versions_whose_schedules_mean_the_same(here, answer, monkeypatch):
    own = lambda name: {"terrazzo": here, "tilelang": "0.1.15"}[name]
    monkeypatch.setattr(records, "package_version", own)
    for made in ("0.1.0", "0.2.1", "0.2"):
        records.clear()
        records.use(table(terrazzo=made))
        assert (records.explain("w4a16", FACTS, 8, H200)[0] is not None) == answer
    records.clear()
    records.use(table(terrazzo="0.21.0"))
    assert records.explain("w4a16", FACTS, 8, H200)[0] is None


def test_the_version_of_the_package_is_among_those_of_the_shipped_records():
    """A release that forgets this would lose every shipped record; one whose schedules mean others has new tables."""
    made = {row["terrazzo"] for path in SHIPPED.glob("*.json") for row in json.loads(path.read_text())["records"]}
    same = {version for version in made if ".".join(version.split(".")[:2]) in records.SAME_SCHEDULES}
    assert made and same == made and ".".join(terrazzo.__version__.split(".")[:2]) == records.SAME_SCHEDULES[-1]


def test_a_kept_plan_asks_nothing(monkeypatch):
    records.use(table())
    schedule_of(8)
    monkeypatch.setattr(records, "explain", lambda *_: pytest.fail("asked again"))
    assert schedule_of(8) == FAST


def test_refused_records_have_a_reason_and_the_heuristic_answers():
    heuristic = schedule_of(8)
    for made, reason in (
        (table(gpu=H100.name), "measured on NVIDIA H100 80GB HBM3 with 132 SMs, this is NVIDIA H200"),
        (table(sms=114), "with 114 SMs"),
        (table(tilelang="0.1.14"), "made with tilelang 0.1.14, this is 0.1.15"),
        (table(terrazzo="0.3.0"), "made with terrazzo 0.3.0"),
        (table(terrazzo=""), "(unknown)"),
    ):
        records.clear()
        records.use(made)
        found, reasons = records.explain("w4a16", FACTS, 8, H200)
        assert found is None and any(reason in said for said in reasons), reasons
        assert schedule_of(8) == heuristic
    records.clear()
    illegal = dict(op="w4a16", facts=FACTS, m=8, program="small_batch", schedule=dict(FAST, warps=40), us=1.0)
    records.use(table([illegal]))
    assert schedule_of(8) == heuristic


def test_a_record_serves_no_more_tokens_than_its_kernel_holds():
    row = dict(op="w4a16", facts=FACTS, program="small_batch", us=1.0)
    made = table([row | {"m": m, "schedule": dict(FAST, tokens=m)} for m in (1, 4)])
    assert [made.find("w4a16", FACTS, m)[0].m for m in (1, 2, 3, 4)] == [1, 4, 4, 4]
    assert made.find("w4a16", FACTS, 5)[0] is None
    made = table([row | {"m": 4, "schedule": FAST}])
    assert [made.find("w4a16", FACTS, m)[0].m for m in (1, 8)] == [4, 4]


def test_the_nearest_record_of_a_bucket_does_not_pad_more():
    schedule = dict(block_tokens=256, warpgroups=2, row_blocks=1, stages=4, stage_k=64, raster=8)
    row = dict(op="w4a16", facts=FACTS, program="stream_k", schedule=schedule, us=9.0)
    made = table([row | {"m": 512}, row | {"m": 2048}])
    assert made.find("w4a16", FACTS, 500)[0].m == 512
    assert made.find("w4a16", FACTS, 300)[0] is None  # 256-token tiles would compute 512 for 300
    assert made.find("w4a16", FACTS, 1900)[0].m == 2048 and made.find("w4a16", FACTS, 128)[0] is None
    assert [records.bucket(m) for m in (1, 8, 9, 64, 65, 5000, 90000)] == [8, 8, 16, 64, 128, 8192, 8192]


@pytest.mark.parametrize("tokens", [8, 72, 144, 512])
def test_a_record_with_a_tile_that_no_program_has_leaves_the_choice_to_the_heuristic(tokens):
    target, tile = Target.parse("nvidia/nvidia-h200"), dict(warpgroups=2, row_blocks=1, stages=3)
    of = Gemm.of_bytes(6144, 4096, 64)
    for space, more in (
        (linear_spaces.of(Gemm(6144, 4096, 1, 192)), {"stage_k": 64}),
        (linear_spaces.of(of), {}),
    ):
        schedule, why = space.revive("stream_k", {"block_tokens": tokens, **tile, **more}, target, 64)
        assert schedule is None and f"no tile of {tokens} tokens" in why
    assert (
        "no program" in linear_spaces.of(of).revive("basic", {"block_tokens": 128, **tile}, target, 160)[1]
    )  # once tuned


def test_every_m_includes_the_records_kernels():
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16")
    before = weight_only.kernel_requests(6144, 4096, **facts, target=H200)
    row = dict(op="w4a16", facts=FACTS, m=5, program="small_batch", schedule=FAST, us=5.0)
    records.use(table([row]))
    after = weight_only.kernel_requests(6144, 4096, **facts, target=H200)
    assert set(after) - set(before) == {plans.plan(5, PLAN, H200).request}


def test_w4a8_asks_too():
    product = w4a8.Facts(6144, 4096, group_size=64, out_dtype="float16", dequantization="auto")
    facts = product.tuned()
    schedule = dict(block_tokens=64, warpgroups=3, row_blocks=1, stages=5, raster=8)
    records.use(table([dict(op="w4a8", facts=facts, m=64, program="stream_k", schedule=schedule, us=5.0)]))
    found = dict(plans.plan(64, product, H200).request.params)
    assert {name: found[name] for name in schedule} == schedule
    other = dict(plans.plan(64, dataclasses.replace(product, pipeline="imfp"), H200).request.params)
    assert other["warpgroups"] != 3 or other["stages"] != 5


OTHERS = {
    "w4a16": dict(shapes=((6144, 4096),), m=(60,)),
    "w4a8": dict(shapes=((6144, 4096),), m=(60,)),
    "w4ax": dict(shapes=((6144, 4096),), m=(60,)),
    "w4a8_fp8": dict(shapes=((6144, 4096),), m=(60,)),
    "mxfp4_fp8": dict(shapes=((6144, 4096),), m=(60,)),
    "mxfp4_mxfp8": dict(shapes=((6144, 4096),), m=(60,)),
    "w4a16_grouped": dict(shapes=((4096, 7168),), m=(480,)),
    "w4a8_grouped": dict(shapes=((4096, 7168),), m=(480,)),
    "w4a8_fp8_grouped": dict(shapes=((4096, 7168),), m=(480,)),
    "w4ax_grouped": dict(shapes=((4096, 7168),), m=(480,)),
    "w8a8_grouped": dict(shapes=((4096, 7168),), m=(480,)),
    "w8a8_fp8_grouped": dict(shapes=((4096, 7168),), m=(480,)),
    "attention_prefill": dict(formats=("int4/int4",)),
    "attention": dict(caches=("60x32/8x4k",), formats=("int4/int4",)),
}


def product_of(op: str, facts: dict) -> plans.Facts:
    """What a linear operator plans for the facts of its records."""
    sizes, own = (facts["n"], facts["k"]), dict(experts=facts.get("experts", 0))
    if op.startswith("w4a16"):
        own |= {name: facts[name] for name in ("symmetric", "scale_dtype", "dtype")}
        return weight_only.Facts(*sizes, **own, group_size=facts["group"], bias="experts" in facts)
    own["out_dtype"] = facts["out_dtype"]
    if op.startswith("w4ax"):
        own |= dict(blocks8=facts["blocks8"], two_level=facts["scales"] == "two_level")
        return w4ax.Facts(*sizes, **own, bias="experts" not in facts)
    if op.startswith("w8a8"):
        return w8a8.Facts(*sizes, **own, numerics=facts["dequantization"])
    return w4a8.Facts(*sizes, **own, group_size=facts["group"], dequantization=facts["dequantization"])


def asked(op: str, m: int, target: Target = H200, **changes) -> dict:
    """The schedule that the operator itself takes, through its own plan."""
    facts = dict(jobs.Job(ops=(op,), **OTHERS[op]).problems()[0].facts) | changes
    if op == "attention":
        layout = CacheLayout(facts["k_format"], facts["v_format"], facts["head_dim"])
        own = dict(dtype="float16", page=facts["page"], residual=facts["residual"], sinks=False)
        tokens = facts["tokens"] - 1000  # of the same bucket
        made = attention.plan(layout, m // 8, 8, 4, tokens, **own, softcap=changes.get("softcap", False), target=target)
    elif op == "attention_prefill":
        layout = CacheLayout(facts["k_format"], facts["v_format"], facts["head_dim"])
        own = dict(dtype="float16", page=facts["page"], residual=facts["residual"], fresh=facts["fresh"], sinks=False)
        made = prefill_op.plan(layout, **own, softcap=changes.get("softcap", False), target=target)
    else:
        made = plans.plan(m, product_of(op, facts), target)
    return dict(made.request.params)


@pytest.mark.parametrize("op", OTHERS)
def test_every_operator_asks_its_records(op, monkeypatch):
    """Exact, nearest of the bucket, another bucket, another GPU, another version: by the operator's own plan."""
    monkeypatch.setattr(records, "SHARED", {})
    (problem,) = jobs.Job(ops=(op,), **OTHERS[op]).problems()
    found = get_operator(op).space(problem).candidates(H200, problem.m)
    base, elsewhere = asked(op, problem.m), asked(op, problem.m, H100)
    assert found[0].schedule.params().items() <= base.items()
    same = [it for it in found if it.program == found[0].program]
    other = next(it for it in same if not it.schedule.params().items() <= base.items())
    row = dict(op=op, facts=dict(problem.facts), m=problem.m, program=other.program, schedule=other.params, us=5.0)
    records.use(table([row]))
    wanted = other.schedule.params().items()
    near = problem.m + 8
    assert wanted <= asked(op, problem.m).items()
    assert wanted <= asked(op, near - 4 if op != "attention" else near).items()
    far = asked(op, 4 * problem.m)
    if op != "attention_prefill":  # one kernel for every batch: its M is always 1
        assert not wanted <= far.items()
    assert asked(op, problem.m, H100) == elsewhere  # a table of another GPU
    if "attention" in op:
        assert not wanted <= asked(op, problem.m, softcap=True).items()
    records.clear()
    records.use(table([row], tilelang="0.1.14"))
    assert asked(op, problem.m) == base
    found, reasons = records.explain(op, dict(problem.facts), problem.m, H200)
    assert found is None and "made with tilelang 0.1.14" in reasons[0]


def test_records_of_attention_are_kernels_for_every_batch():
    (problem,) = jobs.Job(ops=("attention",), **OTHERS["attention"]).problems()
    own = dict(heads=32, kv_heads=8, target=H200, page=0)
    before = requests.kernel_requests("int4", "int4", **own)
    schedule = dict(row_tiles=1, warps=6, tiles=1, stages=4, min_blocks=2)
    row = dict(op="attention", facts=dict(problem.facts), m=problem.m, program="decode", schedule=schedule, us=5.0)
    records.use(table([row]))
    (new,) = set(requests.kernel_requests("int4", "int4", **own)) - set(before)
    assert schedule.items() <= dict(new.params).items()


def test_a_decode_record_answers_where_its_waves_are_as_full():
    schedule = dict(row_tiles=1, warps=4, tiles=1, stages=5, min_blocks=4)  # 528 CTAs at a time
    facts = dict(rows=4, tokens=4096)
    made = table([dict(op="attention", facts=facts, program="decode", schedule=schedule, us=9.0, m=512)])
    assert made.find("attention", facts, 480)[0].m == 512
    assert made.find("attention", facts, 320)[0] is None  # some SMs have three CTAs, most two
    made = table([dict(op="attention", facts=facts, program="decode", schedule=schedule, us=9.0, m=1024)])
    assert made.find("attention", facts, 1000)[0].m == 1024
    assert made.find("attention", facts, 600)[0] is None  # two waves, the second one nearly empty


def test_plans_of_an_h100_differ_from_the_heuristic_only_where_its_table_has_a_faster_schedule(monkeypatch):
    table, other = (records.Table.read(SHIPPED / name) for name in ("h100.json", "h200.json"))
    found = [(Problem.of(row["op"], row["facts"], m), row) for rows in table.rows.values() for m, row in rows.items()]
    planned = lambda: [get_operator(problem.op).plan(problem, H100).request for problem, _ in found]
    monkeypatch.setenv(records.VARIABLE, "off")
    records.changed()
    heuristics = planned()
    monkeypatch.delenv(records.VARIABLE)
    monkeypatch.setattr(records, "_shipped", {H100.name: table, H200.name: other}.get)
    records.changed()
    for (problem, row), before, after in zip(found, heuristics, planned(), strict=True):
        taken = records.pick(row["op"], row["facts"], row["m"], H100)
        assert (taken.how, taken.program, taken.params) == ("exact", row["program"], row["schedule"]), str(problem)
        assert (after != before) == (row["us"] < row["heuristic_us"]), str(problem)


def test_the_environment_names_a_table_or_none(tmp_path, monkeypatch):
    made = table()
    path = tmp_path / "mine.json"
    data = {"schema": 1, "gpu": made.gpu, "sms": made.sms, "records": [made.rows[records.key("w4a16", FACTS)][8]]}
    path.write_text(json.dumps(data))
    monkeypatch.setenv(records.VARIABLE, str(path))
    records.changed()
    assert schedule_of(8) == FAST
    monkeypatch.setenv(records.VARIABLE, "off")
    records.use(made)
    assert schedule_of(8) != FAST
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "gone.json"))
    records.changed()
    with pytest.raises(ArgumentError, match=r"gone\.json"):
        schedule_of(8)


def test_shipped_tables_are_whole():
    """Every record of every shipped table is one that its operator takes."""
    for path in records.FOLDER.glob("*.json"):
        made = records.Table.read(path)
        assert path.stem == records.slug(made.gpu)
        target = next(t for t in (H200, H100) if t.name == made.gpu)
        for rows in made.rows.values():
            for m, row in rows.items():
                problem = Problem.of(row["op"], row["facts"], m)
                _, reason = get_operator(row["op"]).space(problem).revive(row["program"], row["schedule"], target, m)
                assert not reason, (path.name, str(problem), reason)
    assert records.slug(H100.name) == "h100" and records.slug("NVIDIA H100 PCIe") == "h100_pcie"
    assert records.slug("NVIDIA H200") == "h200" and records.slug("NVIDIA GeForce RTX 4090") == "4090"
