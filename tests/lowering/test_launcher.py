"""The launcher that is compiled into every kernel, driven by a CUDA driver that only takes notes."""

import pytest
from lowering_tools import DRIVE, needs_compiler, request_for, run_python

pytestmark = [needs_compiler, pytest.mark.compiles]


def test_launch_parameters_and_arguments(compiled, drive):
    code = """
stream = tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0x77)
with stream:
    launch(tensor(0x1000, (7, 256), 32), tensor(0x2000, (7, 256), 32), 5, 1.5)
launch(tensor(0x1000, (9, 256), 32), tensor(0x2000, (9, 256), 32), 6, 2.5)
"""
    load, function, first, second = drive(compiled(request_for("scale")), "ppfi", code)
    assert load == {"call": "load", "elf": 1} and function["name"] == "main_kernel"
    assert (first["grid"], first["block"], first["shared"], first["attributes"]) == ([7, 1, 1], [128, 1, 1], 0, [])
    assert second["grid"] == [9, 1, 1] and (first["stream"], second["stream"]) == (0x77, 0)
    assert set(first["params"][:2]) == {0x1000, 0x2000} and sorted(first["params"][2:]) == [1.5, 5]


def test_each_device_loads_its_own_copy(compiled, drive):
    code = """
for device in (0, 1, 1):
    launch(tensor(0x1000, (7, 256), 32, device=device), tensor(0x2000, (7, 256), 32, device=device), 5, 1.5)
"""
    notes = drive(compiled(request_for("scale")), "pp", code)
    assert [note["call"] for note in notes] == ["load", "function", "launch"] * 2 + ["launch"]
    assert [note["context"] for note in notes if note["call"] == "launch"] == [0x100, 0x101, 0x101]


def test_no_rows_is_no_launch(compiled, drive):
    notes = drive(
        compiled(request_for("scale")), "", "launch(tensor(0x1000, (0, 256), 32), tensor(0x2000, (0, 256), 32), 5, 1.5)"
    )
    assert [note["call"] for note in notes] == ["load", "function"]


def test_tensor_maps_reach_the_driver(compiled, drive):
    code = "launch(tensor(0x10000, (128, 256), 16), tensor(0x20000, (128, 256), 16))"
    notes = drive(compiled(request_for("tma_copy", "sm_90a")), "tt", code)
    maps = [note for note in notes if note["call"] == "encode"]
    assert [note["address"] for note in maps] == [0x10000, 0x20000]
    for note in maps:
        assert note["map_aligned"] and (note["type"], note["rank"]) == (6, 2)  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        assert (note["size"], note["stride"], note["box"], note["step"]) == ([256, 128], [512], [64, 64], [1, 1])
        assert note["modes"][:2] == [0, 3]  # no interleave, 128-byte swizzle
    assert notes[-1]["params"] == [0x10000, 0x20000] and notes[-1]["shared"] >= 2 * 64 * 64 * 2


def test_tensor_map_error_names_the_address(compiled, drive):
    done = drive(
        compiled(request_for("tma_copy", "sm_90a")),
        "tt",
        "launch(tensor(0x10008, (128, 256), 16), tensor(0x20000, (128, 256), 16))",
    )
    assert "no TMA descriptor" in done.stderr and "0x10008" in done.stderr and "size 256" in done.stderr


def test_clusters_and_dependent_launch(compiled, drive):
    code = "launch(tensor(0x10000, (128, 256), 16), tensor(0x20000, (128, 256), 16))"
    notes = drive(compiled(request_for("cluster", "sm_90a")), "pp", code)
    assert {"call": "attribute", "attribute": 14, "value": 1} in notes  # cluster sizes beyond the portable one
    assert notes[-1]["grid"] == [128, 2, 1] and notes[-1]["attributes"] == [[4, 2], [6, 1]]


def test_wrong_gpu_is_said(compiled, drive):
    code = "launch(tensor(0x1000, (7, 256), 32), tensor(0x2000, (7, 256), 32), 5, 1.5)"
    done = drive(compiled(request_for("scale")), "", code, FAKE_DRIVER_REFUSES="1")
    assert "cannot load kernel main_kernel: CUDA_ERROR_NO_BINARY_FOR_GPU" in done.stderr


def test_without_a_driver(compiled):
    launch = "launch(tensor(0x1000, (7, 256), 32), tensor(0x2000, (7, 256), 32), 5, 1.5)"
    hide = "import ctypes.util; assert ctypes.util.find_library('cuda') is None, 'has a driver'"
    done = run_python(f"{hide}\nFOLDER = {str(compiled(request_for('scale')))!r}\n{DRIVE}\n{launch}")
    if "has a driver" in done.stderr:
        pytest.skip("this machine has a CUDA driver")
    assert "the CUDA driver is absent or too old: no libcuda.so.1" in done.stderr
