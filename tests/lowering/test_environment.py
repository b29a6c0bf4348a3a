"""The environment report: complete, JSON-able, and honest about what is missing."""

import json

from terrazzo.lowering import environment_report


def test_report_is_json_and_says_where_things_are(cache_dir):
    report = environment_report()
    assert json.loads(json.dumps(report)) == report
    assert report["cache"] == {"path": str(cache_dir), "entries": 0, "bytes": 0}
    assert set(report) >= {
        "terrazzo",
        "python",
        "torch",
        "tilelang",
        "tvm_ffi",
        "nvcc",
        "host_compiler",
        "disassembler",
        "driver",
        "devices",
    }
    assert all(set(row) == {"what", "needed_for", "remedy"} for row in report["missing"])


def test_missing_tools_come_with_a_remedy(cache_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = {row["what"]: row["remedy"] for row in environment_report()["missing"]}
    assert "terrazzo[compile]" in missing["nvcc"] and "a C++ compiler" in missing


def test_a_broken_nvcc_is_reported_not_raised(cache_dir, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "a working nvcc" in {row["what"] for row in environment_report()["missing"]}
