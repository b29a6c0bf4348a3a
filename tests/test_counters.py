"""Counters of the W4A8 pipelines: what is asked of Nsight Compute and read from it; a script stands for it."""

from __future__ import annotations

import json
import sys

import pytest
from terrazzo.lowering.targets import Target

from benchmarks import w4a8_ablation, w4a8_counters

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
ACTIVE, ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
HEADER = [
    "ID",
    "Kernel Name",
    "gpu__time_duration.sum",
    f"sm__pipe_tensor_op_gmma_cycles_active{ACTIVE}",
    f"sm__pipe_tensor_cycles_active{ACTIVE}",
    f"sm__inst_issued{ACTIVE}",
    f"gpu__dram_throughput{ELAPSED}",
    *(STALLED.format(name) for name in ("barrier", "wait", "selected", "gmma", "math_pipe_throttle")),
]
UNITS = ["", "", "ns", "%", "%", "%", "%", *["inst"] * 5]
VALUES = ["main_kernel", "12,500", "61.5", "n/a", "70.25", "33.0", "0.5", "2.5", "9.0", "1.5", "0.1"]

NCU = """#!{python}
import json, sys
if "--query-metrics" in sys.argv:
    for name in ("Device NVIDIA H200", "", "sm__inst_issued  # of", "dram__throughput  of", "gpu__time_duration  ns"):
        print(name)
    sys.exit()
json.dump(sys.argv, open({log!r}, "w"))
print({text!r})
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Function that puts an ncu, which answers with a text, alone on PATH; returns where it notes its call."""

    def install(text):
        log = tmp_path / "asked.json"
        program = tmp_path / "ncu"
        program.write_text(NCU.format(python=sys.executable, log=str(log), text=text))
        program.chmod(0o755)
        return log

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(w4a8_counters, "PLACES", ())
    return install


def csv(kernels: int) -> str:
    rows = [HEADER, UNITS, *([str(i), *VALUES] for i in range(kernels))]
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


def test_counters_of_every_pipeline(ncu, monkeypatch, tmp_path, capsys):
    from terrazzo.autotune import gemm_bench

    monkeypatch.setattr(Target, "detect", lambda *_: Target.parse("sm_90a"))
    monkeypatch.setattr(w4a8_ablation, "compile_all", lambda requests: None)
    monkeypatch.setattr(gemm_bench, "header", lambda *_: {"gpu": "NVIDIA H200"})
    asked, out = ncu(csv(len(w4a8_ablation.WAYS))), tmp_path / "counters.json"
    assert w4a8_ablation.main(["--ncu", "--m", "64,256", "--out", str(out)]) == 0
    command = json.loads(asked.read_text())
    metrics = command[command.index("--metrics") + 1].split(",")
    assert [name.partition(".")[0] for name in metrics] == ["sm__inst_issued", "dram__throughput", "gpu__time_duration"]
    assert command[command.index("--shape") + 1] == "22016x4096" and command[command.index("--m") + 1] == "256"
    assert command[command.index("--ways") + 1] == ",".join("/".join(way) for way in w4a8_ablation.WAYS)
    result = json.loads(out.read_text())
    assert (result["n"], result["k"], result["m"]) == (22016, 4096, 256)
    assert [row["way"] for row in result["counters"]] == [w4a8_ablation.column(way) for way in w4a8_ablation.WAYS]
    row = result["counters"][0]
    assert row["us"] == 12.5 and row["tensor"] == 61.5 and row["issue"] == 70.25 and row["dram"] == 33.0
    assert row["sm"] is None and list(row["stalls"].items()) == [("wait", 2.5), ("gmma", 1.5), ("barrier", 0.5)]
    assert "| imfp_xor | 12.5 | 61.5 | 70.2 |  | 33.0 | wait 2.50, gmma 1.50, barrier 0.50 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "ncu was not found"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "ERR_NVGPUCTRPERM"),
        (csv(2), "2 kernels for 7 pipelines"),
    ],
)
def test_what_ncu_refuses_is_one_line(ncu, monkeypatch, capsys, text, words):
    monkeypatch.setattr(Target, "detect", lambda *_: Target.parse("sm_90a"))
    monkeypatch.setattr(w4a8_ablation, "compile_all", lambda requests: None)
    if text is not None:
        ncu(text)
    assert w4a8_ablation.main(["--ncu"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_the_program_names_its_arguments():
    with pytest.raises(SystemExit):
        w4a8_counters.main(["--m", "4"])
