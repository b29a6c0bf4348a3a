"""The command: every verb, every exit code, one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terrazzo.cli import main
from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.request import KernelRequest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COMPILE = ("compile", "--shape", "128x64", "--target", "sm_80")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


@pytest.fixture
def small_kernels(monkeypatch):
    """kernel_requests answers with one tiny GEMM (what it was asked is kept): the verb is what is tested."""
    from terrazzo.ops import w4a16

    monkeypatch.syspath_prepend(str(TESTS / "lowering"))
    asked = []

    def kernel_requests(n, k, *, target, m, group_size, symmetric, scale_dtype, dtype, numerics):
        asked.append({"n": n, "k": k, "m": m, "target": target.arch, "group_size": group_size, "symmetric": symmetric})
        asked[-1] |= {"scale_dtype": scale_dtype, "dtype": dtype, "numerics": numerics}
        return [KernelRequest("small.gemm", f"programs:{kernel_requests.entry}", (("n", n),), target)]

    kernel_requests.entry = "gemm"
    kernel_requests.asked = asked
    monkeypatch.setitem(vars(w4a16), "kernel_requests", kernel_requests)
    return kernel_requests


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_info_says_which_operators_are_tested_on_each_gpu(capsys, monkeypatch):
    from terrazzo.lowering import environment
    from terrazzo.ops.registry import REGISTRY, STATUS

    shared = {"memory_bytes": 1 << 34, "sms": 80, "l2_bytes": 1, "problem": ""}
    archs = ("sm_90a", "sm_86", None)
    gpus = [shared | {"index": i, "name": "A GPU", "target": arch} for i, arch in enumerate(archs)]
    report = {**environment.environment_report(), "devices": gpus}
    monkeypatch.setattr(environment, "environment_report", lambda: {**report, "devices": [dict(gpu) for gpu in gpus]})
    devices = json.loads(run(capsys, "info", "--json")[1])["devices"]
    for device, arch in zip(devices, archs):
        said = {
            (operator, format): status
            for status, operators in device["operators"].items()
            for operator, formats in operators.items()
            for format in formats
        }
        wanted = {(it.operator, it.format): it.targets.get(arch, "refused") for it in REGISTRY}
        assert said == (wanted if arch else {}) and set(device["operators"]) <= {*STATUS, "refused"}
    code, text, _ = run(capsys, "info")
    assert code == 0 and "  tested" in text and "compressed_tensors_e4m3" in " ".join(text.split("refused")[1].split())
    assert text.index("GPU 0") < text.index("  tested") < text.index("GPU 1") < text.index("  refused")


@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        ("ops",),
        ("ops", "--target", "sm_90a"),
        ("layout",),
        ("layout", "marlin_u4"),
        ("cache", "list"),
        ("cache", "verify"),
        ("cache", "clear"),
    ],
    ids=" ".join,
)
def test_tables_come_as_text_and_as_json(capsys, arguments):
    code, text, _ = run(capsys, *arguments)
    assert code == 0 and text.strip()
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    json.loads(out)
    assert not text.lstrip().startswith(("{", "["))


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("frob",), "frob"),
        (("layout", "nonsense"), "nonsense"),
        (("layout", "--svg", "x.svg"), "INSTANCE"),
        (("layout", "marlin_u4", "--svg", "/dev/null/x.svg"), "cannot be written"),
        (("ops", "--target", "sm_70"), "sm_70"),
        (("ops", "--op", "w9a9"), "w9a9"),
        (("compile", "--target", "sm_80"), "--shape"),
        ((*COMPILE[:3], "--target", "sm_75"), "sm_75"),
        (("compile", "--shape", "12y3", "--target", "sm_80"), "12y3"),
        (("compile", "--shape", "0x3", "--target", "sm_80"), "0x3"),
        ((*COMPILE, "--m", "1,x"), "1,x"),
        ((*COMPILE, "--m", "0"), "'0'"),
        ((*COMPILE, "--m", "²"), "'²' is no list of positive numbers"),
        ((*COMPILE, "--group", "²"), "'²' is no group size"),
        (
            ("compile", "--op", "attention", "--kv", "int4/int4", "--heads", "²/1", "--target", "sm_80"),
            "query/kv heads",
        ),
        ((*COMPILE, "--dtype", "f8"), "f8"),
        ((*COMPILE, "--group", "wide"), "wide"),
        ((*COMPILE, "--op", "w9a9"), "w9a9"),
        ((*COMPILE, "--model", "gpt-9"), "gpt-9"),
        ((*COMPILE, "--numerics", "sloppy"), "sloppy"),
        (("demo", "--targets", "sm_10"), "sm_10"),
        (("demo", "--data", "absent.safetensors"), "absent.safetensors"),
        (("bench", "--shape", "3"), "'3'"),
        (("bench", "--model", "gpt-9"), "gpt-9"),
        (("bench", "--out", "/dev/null/x.json"), "--out /dev/null/x.json cannot be written"),
        (("demo", "--targets", " ,"), "at least one"),
        ((*COMPILE, "--group", "0"), "--group 0: must be one of (32, 64, 128)"),
        ((*COMPILE, "--group", ""), "--group"),
        ((*COMPILE[:1], "--shape", "99999999999x64", *COMPILE[3:]), "--shape: n 99999999999: must be"),
        ((*COMPILE, "-o", "/dev/null/bundle"), "--output /dev/null/bundle cannot be written"),
        ((*COMPILE, "-o", "/proc/bundle"), "--output /proc/bundle cannot be written: nothing can be made in /proc"),
        ((*COMPILE, "-o", "/dev/null"), "exists"),
        ((*COMPILE, "-o", "/dev", "--replace"), "/dev is no bundle"),
        ((*COMPILE, "--kv", "int4/int4"), "--kv is no option of w4a16"),
        ((*COMPILE, "--prefill"), "--prefill is no option of w4a16"),
        (("tune", "frob"), "No such command 'frob'"),
        (("tune", "--shape", "64x128", "--within", "nan"), "'--within': 'nan' is no number"),
        (("tune", "--shape", "64x128", "--group", "0"), "'--group': 0 is not in the range 1<=x"),
        (("tune", "--shape", "64x128", "--page", "-1"), "'--page': -1 is not in the range 0<=x"),
        (("tune", "--op", "attention", "--cache", "8x33/8x4k"), "multiple of the kv heads"),
        (("tune", "--op", "attention", "--cache", "0x32/8x4k", "--dry-run"), "cache of positive numbers"),
        (("tune", "--shape", "64x128", "--gpus", "x", "--dry-run"), "--gpus 'x' names no CUDA devices"),
        (("tune", "--shape", "64x128", "--gpus", "0,", "--dry-run"), "--gpus '0,' names no CUDA devices"),
        (("tune", "--shape", "64x128", "--gpus", "²", "--executor", "ray", "--dry-run"), "a number of workers"),
        (("tune", "--shape", "64x128", "--export", "/dev/null/t.json"), "--export /dev/null/t.json cannot be written"),
        (("tune", "export", "-o", "/dev/null/t.json"), "--output /dev/null/t.json cannot be written"),
        (("tune", "space", "-o", "/dev/null/s.json"), "--output /dev/null/s.json cannot be written"),
        (("tune", "report", "--png", "/dev/null/r.png"), "--png /dev/null/r.png cannot be written"),
        (("tune", "prune", "--older-than", "-1"), "--older-than"),  # would delete everything
        (("tune", "prune", "--older-than", "nan"), "--older-than"),
        (("tune", "--job", "absent.toml"), "absent.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("terrazzo: ") and words in err


def test_files_that_cannot_be_written_are_one_line(capsys, monkeypatch):
    """Whatever a verb did not see coming: a full disk, a folder that is someone else's."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere/file")

    monkeypatch.setattr("terrazzo.lowering.cache.list_entries", refuse)
    code, out, err = run(capsys, "cache", "list")
    assert (code, out) == (2, "")
    assert err == "terrazzo: /somewhere/file: Permission denied; name another file or folder\n"


def test_bench_without_a_gpu_says_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = run(capsys, "bench")
    assert code == 2 and "GPU" in err


def test_help_and_version(capsys):
    assert run(capsys, "--version")[1].startswith("terrazzo")
    for verb in ("info", "ops", "layout", "compile", "cache", "demo", "bench"):
        code, out, _ = run(capsys, verb, "--help")
        assert code == 0 and "Usage" in out
    assert run(capsys)[0] == 0


def test_python_m_terrazzo():
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo", "layout", "nope"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("terrazzo: ") and "Traceback" not in done.stderr


def test_layout_writes_the_picture(capsys, tmp_path):
    code, out, _ = run(capsys, "layout", "w4a16_wgmma", "--svg", str(tmp_path / "new" / "a.svg"))
    assert code == 0 and "a.svg" in out
    assert (tmp_path / "new" / "a.svg").read_text().startswith("<svg")


def test_compile_writes_a_bundle(capsys, tmp_path, small_kernels, private_cache):
    from terrazzo.lowering import load_bundle

    bundle = tmp_path / "bundle"
    code, out, err = run(capsys, *COMPILE, "-o", str(bundle), "--m", "1,16", "--group", "K", "--dtype", "bf16")
    assert code == 0, err
    assert "HMMA.16816" in out and "bundle of 1 kernels for sm_80" in out
    assert small_kernels.asked[-1] == {
        "n": 128,
        "k": 64,
        "m": (1, 16),
        "target": "sm_80",
        "group_size": 64,
        "symmetric": False,
        "scale_dtype": "bfloat16",
        "dtype": "bfloat16",
        "numerics": "auto",
    }
    loaded = load_bundle(bundle, target="sm_80")
    assert len(loaded.requests) == 1 and loaded.layouts

    code, out, _ = run(capsys, "info", str(bundle))
    assert code == 0 and "sm_80" in out and "CUDA 1" in out and "1 small.gemm" in out
    said = json.loads(run(capsys, "info", str(bundle), "--json")[1])
    assert said["driver_needed"] == loaded.driver and said["kernels"] == {"small.gemm": 1}
    assert run(capsys, "info", str(tmp_path))[0] == 2

    code, out, _ = run(capsys, *COMPILE, "-o", str(bundle), "--replace", "--json")
    said = json.loads(out)
    assert code == 0 and said["bundle"] == str(bundle) and said["kernels"][0]["spill_stores"] == 0
    code, _, err = run(capsys, *COMPILE, "-o", str(bundle))
    assert code == 2 and "exists" in err

    code, out, _ = run(capsys, "cache", "list", "--json")
    (entry,) = json.loads(out)
    assert entry["name"] == "small.gemm"
    assert "small.gemm" in run(capsys, "cache", "list")[1]
    (private_cache / "v2" / "kernels" / entry["key"] / "kernel.cu").write_text("altered")
    code, out, _ = run(capsys, "cache", "verify")
    assert code == 1 and entry["key"] in out and "0 of 1 entries are intact" in out


@pytest.mark.usefixtures("without_records")  # which may name other programs
def test_a_model_is_all_of_its_layers_and_its_attention(capsys, monkeypatch):
    monkeypatch.setattr("terrazzo.building.Build.run", lambda self: [CompileError("no")] * len(self.requests))
    given = ("compile", "--model", "llama-3-8b", "--target", "nvidia/nvidia-h100", "--max-tokens", "1", "--json")
    code, out, _ = run(capsys, *given, "--kv", "int4/int4", "--kv", "int8/int4")
    kernels = json.loads(out)["kernels"]
    assert code == 1 and {kernel["target"] for kernel in kernels} == {"sm_90a"}
    single, joined = {(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)}, {(6144, 4096), (28672, 4096)}
    linear = [it["params"] for it in kernels if it["kernel"] == "w4a16.small_batch"]  # stream_k's serve any n and k
    assert {(it["n"], it["k"]) for it in linear} == single | joined
    formats = {it["params"]["k_format"] for it in kernels if it["kernel"] == "attention.decode"}
    assert formats == {"int4", "int8"}
    without = json.loads(run(capsys, *given, "--kv", "none", "--shape", "64x128")[1])["kernels"]
    linear = [it["params"] for it in without if it["kernel"] == "w4a16.small_batch"]
    assert {(it["n"], it["k"]) for it in linear} == single | joined | {(64, 128)}
    alone = json.loads(run(capsys, *given, "--op", "attention")[1])["kernels"]
    assert {it["kernel"].split(".")[0] for it in alone} == {"attention"}
    assert {it["params"].get("k_format", "float16") for it in alone} == {"float16"}
    for op in ("w4a8", "w4ax"):
        kernels = json.loads(run(capsys, *given, "--op", op)[1])["kernels"]
        assert {it["kernel"].split(".")[0] for it in kernels} == {op, "norm", "activation", "rope"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama-3-8b", "--heads", "32/8"), "--heads is no option of a whole model"),
        (("--shape", "64x64", "--tensor-parallel", "2"), "--tensor-parallel is no option of w4a16"),
        (("--shape", "64x64", "--max-tokens", "2"), "--max-tokens is no option of w4a16"),
        (("--model", "llama-3-8b", "--max-tokens", "2", "--m", "1"), "give one"),
        (("--model", "llama-3-8b", "--tensor-parallel", "3"), "--tensor-parallel 3: attn.q_proj has N = 4096"),
        (("/no/such/folder",), "/no/such/folder"),
        (("/dev",), "/dev"),
        (("--model", "llama-3-8b", "--kv", "none", "--op", "attention"), "nothing to compile"),
    ],
)
def test_options_of_whole_models_are_checked(capsys, arguments, words):
    code, out, err = run(capsys, "compile", "--target", "sm_90a", *arguments)
    assert code == 2 and not out and words in err and err.count("\n") == 1


def test_a_dry_run_counts_and_estimates(capsys):
    given = ("compile", "--model", "llama-3.2-1b", "--target", "sm_90a", "--dry-run", "--workers", "4")
    code, out, err = run(capsys, *given)
    assert code == 0 and not err and "gate_up_proj" in out and "attention.decode" in out and "4 processes" in out
    said = json.loads(run(capsys, *given, "--json")[1])
    assert said["total"] == sum(said["kernels"].values()) > 50 and said["cached"] == 0 and 0.1 < said["minutes"] < 10


def test_a_folder_says_what_its_layers_are(capsys, tmp_path, monkeypatch):
    """The figure for a whole checkpoint: Llama-3-8B in AWQ, header and sizes only."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.compile_model import write_folder

    folder = write_folder(tmp_path / "llama", "llama-3-8b")
    given = ("compile", str(folder), "--target", "sm_90a", "--dry-run")
    code, out, err = run(capsys, *given)
    assert code == 0, err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "_proj" in line}
    assert rows["qkv_proj"] == ["w4a16", "6144", "4096", "128", "float16", "32"]
    assert rows["down_proj"][-1] == "32" and "left out" not in out
    for option in (("--group", "64"), ("--symmetric",), ("--scale-dtype", "f32")):
        code, _, err = run(capsys, *given, *option)
        assert code == 2 and f"{option[0]}: the layers of" in err


def test_operators_take_their_own_options(capsys, monkeypatch):
    monkeypatch.setattr("terrazzo.building.Build.run", lambda self: [CompileError("no")] * len(self.requests))
    given = ("compile", "--op", "w4a8", "--shape", "128x256", "--m", "4", "--target", "sm_90a", "--json")
    code, out, _ = run(capsys, *given, "--dequantization", "unsigned")
    kernels = {kernel["kernel"]: kernel["params"] for kernel in json.loads(out)["kernels"]}
    assert code == 1 and set(kernels) == {"w4a8.small_batch", "w4a8.quantize_rows"}
    assert kernels["w4a8.small_batch"]["dequantization"] == "unsigned" and kernels["w4a8.small_batch"]["group"] == 64
    code, out, _ = run(capsys, *given, "--dequantization", "e4m3", "--group", "K")
    kernels = {kernel["kernel"]: kernel["params"] for kernel in json.loads(out)["kernels"]}
    assert kernels["w4a8.stream_k"]["group"] == 128 and kernels["w4a8.quantize_rows"]["codes"] == "e4m3"
    for option in (("--symmetric",), ("--numerics", "post"), ("--scale-dtype", "f32")):
        code, _, err = run(capsys, *given, *option)
        assert code == 2 and f"{option[0]} is no option of w4a8" in err
    code, _, err = run(capsys, *COMPILE, "--dequantization", "xor")
    assert code == 2 and "--dequantization is no option of w4a16" in err


def operators_of_the_registry() -> list[str]:
    from terrazzo.ops.registry import REGISTRY

    return list(dict.fromkeys(support.operator for support in REGISTRY))


@pytest.mark.parametrize("op", operators_of_the_registry())
def test_every_operator_names_its_kernels_or_says_what_to_give(capsys, op):
    code, out, err = run(
        capsys, "compile", "--op", op, "--shape", "256x512", "--target", "sm_90a", "--dry-run", "--json"
    )
    if op in ("attention", "norm", "activation", "rope"):
        assert code == 2 and len(err.splitlines()) == 1 and ("--kv" in err or "--model" in err)
    else:
        family = "w4a8" if op in ("mxfp4_fp8", "mxfp4_mxfp8") else op  # whose programs take its weight format
        assert code == 0 and any(name.startswith(f"{family}.") for name in json.loads(out)["kernels"])


@pytest.mark.parametrize(
    ("given", "kernels"),
    [
        (("--shape", "256x512"), {"w8a8.stream_k", "w4a8.quantize_rows"}),
        (("--shape", "256x512", "--dequantization", "e4m3"), {"w8a8.stream_k", "w4a8.quantize_rows"}),
        (
            ("--shape", "256x512", "--dequantization", "e4m3", "--group", "128"),
            {"w8a8.stream_k", "w8a8.quantize_bytes"},
        ),
        (("--model", "qwen3-30b-a3b", "--dequantization", "e4m3"), {"w8a8.grouped", "w8a8.stream_k"}),
        (("--shape", "256x512", "--group", "128"), "must be K"),
        (("--shape", "256x512", "--dequantization", "xor"), "auto (int8) or e4m3"),
        (("--model", "llama-3-8b", "--dequantization", "unsigned"), "auto (int8) or e4m3"),
    ],
)
def test_w8a8_is_compiled_by_its_codes_and_groups(capsys, given, kernels):
    code, out, err = run(
        capsys, "compile", "--op", "w8a8", *given, "--target", "sm_90a", "--m", "16", "--dry-run", "--json"
    )
    if isinstance(kernels, str):
        assert code == 2 and kernels in err and len(err.splitlines()) == 1
    else:
        assert code == 0 and kernels <= set(json.loads(out)["kernels"])


def test_attention_is_compiled_by_formats_and_heads(capsys, monkeypatch):
    monkeypatch.setattr("terrazzo.building.Build.run", lambda self: [CompileError("no")] * len(self.requests))
    given = ("compile", "--op", "attention", "--target", "sm_90a", "--json")
    code, out, _ = run(
        capsys, *given, "--kv", "int4_channel64/int4", "--kv", "int8/int8", "--page", "64", "--q-len", "4"
    )
    kernels = json.loads(out)["kernels"]
    assert code == 1 and {kernel["kernel"] for kernel in kernels} == {"attention.decode", "attention.write"}
    assert {kernel["params"]["k_format"] for kernel in kernels} == {"int4_channel64", "int8"}
    assert all(kernel["params"]["page"] == 64 and kernel["params"].get("row_tiles", 2) == 2 for kernel in kernels)
    for option, word in (
        ((), "--kv"), (("--kv", "int5"), "did you mean"), (("--kv", "int4/int4", "--heads", "x/8"), "32/8"),
        (("--kv", "int4/int4", "--shape", "8x8"), "--shape"), (("--kv", "int4/int3"), "'int3'"),
        (("--kv", "int4/int4", "--heads", "7/2"), "kv_heads"),
        (("--kv", "int4/int4", "--page", "24"), "--page: page_size 24: must be a positive multiple of 16"),
        (("--kv", "int4/int4", "--group", "64"), "--group is no option of attention"),
        (("--kv", "int4/int4", "--m", "3"), "--m is no option of attention"),
    ):  # fmt: skip
        code, _, err = run(capsys, *given, *option)
        assert code == 2 and word in err


def test_a_kernel_that_fails_is_exit_code_1_and_no_bundle(capsys, tmp_path, small_kernels):
    small_kernels.entry = "absent"
    code, out, err = run(capsys, *COMPILE, "-o", str(tmp_path / "bundle"))
    assert code == 1 and "FAILED" in out and "no bundle was written, 1 of 1" in err
    assert not (tmp_path / "bundle").exists()
