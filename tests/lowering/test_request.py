"""A request's identity: everything that decides the code is in it, nothing else is."""

import dataclasses
import json
import pickle
import platform

import pytest
from lowering_tools import run_python
from terrazzo.lowering import KernelRequest, Target
from terrazzo.lowering.errors import ArgumentError, TargetError
from terrazzo.lowering.toolchain import Toolchain, toolchain

BASE = {
    "name": "a",
    "entry": "programs:scale",
    "params": {"n": 256, "b": None},
    "target": "sm_80",
    "pass_configs": {"tl.x": True},
    "flags": ("-lineinfo",),
}
TOOLS = Toolchain("0.1.15", "0.1.12", "13.0.88", "13.0")


def test_round_trips():
    request = KernelRequest(**BASE)
    assert (
        pickle.loads(pickle.dumps(request))
        == request
        == KernelRequest.from_dict(json.loads(json.dumps(request.as_dict())))
    )
    assert request.params == (("b", None), ("n", 256)) and str(request) == "a(b=None, n=256) for sm_80"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "b"},
        {"entry": "programs:gemm"},
        {"params": {"n": 256}},
        {"target": "sm_86"},
        {"pass_configs": {}},
        {"flags": ()},
        {"params": {"n": "256"}},
    ],
)
def test_every_field_is_in_the_identity(change):
    assert KernelRequest(**BASE).identity() != KernelRequest(**{**BASE, **change}).identity()


def test_order_and_device_are_not():
    swapped = KernelRequest(
        **{**BASE, "params": {"b": None, "n": 256}, "target": dataclasses.replace(Target.parse("sm_80"), sms=7)}
    )
    assert swapped == KernelRequest(**BASE) and swapped.identity() == KernelRequest(**BASE).identity()
    assert swapped.target.sms == 108


def test_identity_is_equal_in_another_process():
    done = run_python(f"from terrazzo.lowering import KernelRequest\nprint(KernelRequest(**{BASE!r}).identity())")
    assert done.stdout.strip() == KernelRequest(**BASE).identity(), done.stderr


def test_the_toolchain_is_in_the_key_only():
    request = KernelRequest(**BASE)
    keys = {
        request.cache_key(dataclasses.replace(TOOLS, **{field.name: "other"})) for field in dataclasses.fields(TOOLS)
    }
    assert len(keys | {request.cache_key(TOOLS)}) == 6


def test_the_host_is_in_the_toolchain():
    tools = toolchain()
    assert tools.machine == platform.machine() and tools.as_dict()["machine"] == tools.machine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"entry": "programs.scale"}, "module:function"),
        ({"name": 5}, "name = 5: must be a string"),
        ({"entry": 5}, "entry = 5: must be 'module:function'"),
        ({"params": {"n": [1]}}, "int, float, str, bool or None"),
        ({"params": 5}, "params = 5: must map names"),
        ({"params": {1: 2, "a": 3}}, "params = {1: 2}: must map names"),
        ({"pass_configs": "ab"}, "pass_configs = 'ab': must map names"),
        ({"flags": 5}, "flags = 5: must be a tuple of strings"),
        ({"flags": "-lineinfo"}, "must be a tuple of strings"),
        ({"flags": (5,)}, "must be a tuple of strings"),
        ({"flags": ("ptx=compute_90",)}, "its own virtual architecture"),
        ({"flags": ("ptx=compute_90a",), "target": "sm_90a"}, "no portable PTX"),
    ],
)
def test_bad_requests_are_refused(change, words):
    with pytest.raises(ArgumentError, match=words):
        KernelRequest(**{**BASE, **change})


@pytest.mark.parametrize("data", [5, {"name": "a"}, {**BASE, "bogus": 1}], ids=str)
def test_data_that_is_no_request_is_refused(data):
    with pytest.raises(ArgumentError, match="is no kernel request"):
        KernelRequest.from_dict(data)


def test_bad_targets_and_modules_are_refused():
    with pytest.raises(TargetError):
        KernelRequest(**{**BASE, "target": "sm_70"})
    with pytest.raises(ArgumentError, match="no such module"):
        KernelRequest(**{**BASE, "entry": "no_such_module_anywhere:f"}).identity()
