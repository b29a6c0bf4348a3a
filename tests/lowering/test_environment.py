"""The environment report: complete, JSON-able, and honest about what is missing."""

import json

import pytest
from terrazzo.lowering import environment, environment_report
from terrazzo.lowering.toolchain import Toolchain


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


@pytest.mark.parametrize(("driver", "missing"), [("12.9", True), ("13.0", False), (None, False)])
def test_a_driver_that_is_too_old_for_nvcc_is_missing(cache_dir, monkeypatch, driver, missing):
    said = {**environment.compiler_report(), "toolchain": Toolchain("0.1.15", "0.1.12", "13.3.1", "13.3").as_dict()}
    monkeypatch.setattr(environment, "compiler_report", lambda: said)
    monkeypatch.setattr(environment, "driver_version", lambda: driver)
    report = environment_report()
    rows = {row["what"]: row for row in report["missing"]}
    assert report["driver"] == driver and report["nvcc"]["driver"] == "13.0"
    assert ("a driver for CUDA 13.0 or newer" in rows) == missing
    if missing:
        row = rows["a driver for CUDA 13.0 or newer"]
        assert row["needed_for"] == "running what nvcc of CUDA 13.3 makes" and "CUDA 12.9" in row["remedy"]


def test_a_cache_that_must_not_be_trusted_is_reported_not_raised(cache_dir):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    assert any("may be written by others" in row["remedy"] for row in environment_report()["missing"])
