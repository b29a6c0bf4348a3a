"""Devices as the driver says them, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from terrazzo.lowering import driver, environment
from terrazzo.lowering.targets import Target

H200 = {16: 132, 38: 60 << 20, 75: 9, 76: 0, 81: 228 << 10, 82: 65536, 97: 227 << 10}


class FakeDriver:
    """libcuda.so.1 with devices of some names; `fails` names the call that answers with an error."""

    def __init__(self, *names: bytes, attributes: dict[int, int] = H200, fails: str = "") -> None:
        self.names, self.attributes, self.fails = names, attributes, fails

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            if name == self.fails:
                return 999
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = len(self.names)
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = arguments[1]
            elif name == "cuDeviceGetName":
                arguments[0].value = self.names[arguments[2].value]
            elif name == "cuDeviceTotalMem_v2":
                arguments[0]._obj.value = 141 << 30
            elif name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.attributes[arguments[1]]
            elif name == "cuDriverGetVersion":
                arguments[0]._obj.value = 13000
            else:
                assert name == "cuInit"
            return 0

        return call


def pretend(monkeypatch, library) -> None:
    monkeypatch.setattr(driver, "open_driver", lambda: library)
    monkeypatch.setattr(environment, "open_driver", lambda: library)
    monkeypatch.setattr(environment, "_torch_cuda", lambda: "13.0")


def test_a_target_of_what_the_driver_says(monkeypatch):
    pretend(monkeypatch, FakeDriver(b"NVIDIA H200", b"NVIDIA H200"))
    first, second = driver.device_properties()
    assert first == second and first.total_memory == 141 << 30
    target, known = Target.of_properties(first), Target.parse("sm_90a")
    assert target == known
    report = environment.environment_report()
    assert [device["target"] for device in report["devices"]] == ["sm_90a"] * 2 and report["driver"] == "13.0"


def test_a_device_that_is_not_supported_has_its_problem(monkeypatch):
    pretend(monkeypatch, FakeDriver(b"Tesla V100", attributes=H200 | {75: 7}))
    (device,) = environment.environment_report()["devices"]
    assert device["target"] is None and "sm_70" in device["problem"]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_has_no_devices(monkeypatch, fails):
    pretend(monkeypatch, FakeDriver(b"NVIDIA H200", fails=fails))
    assert driver.device_properties() is None
    report = environment.environment_report()
    assert report["devices"] == [] and "a CUDA device" in {row["what"] for row in report["missing"]}


def test_no_driver_has_no_devices(monkeypatch):
    pretend(monkeypatch, None)
    assert driver.device_properties() is None and environment.driver_version() is None


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = None\n", None),
        ("cuda: Optional[str] = '13.0'\n", "13.0"),
        ('cuda = "12.8"\n', "12.8"),
        ("", None),
    ],
)
def test_torch_says_its_cuda_without_being_imported(tmp_path, monkeypatch, text, cuda):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{text}hip: Optional[str] = None\n")
    monkeypatch.setattr(environment, "package_folder", lambda name: tmp_path)
    assert environment._torch_cuda() == cuda


def test_it_is_what_torch_itself_says():
    torch = pytest.importorskip("torch")
    assert environment._torch_cuda() == torch.version.cuda
    if not torch.cuda.is_available():
        return
    for index, seen in enumerate(driver.device_properties()):
        assert Target.of_properties(seen) == Target.detect(index)
        assert seen.total_memory == torch.cuda.get_device_properties(index).total_memory


def test_info_imports_no_heavy_package():
    code = "import sys\nfrom terrazzo.cli import main\nassert main(['info', '--json']) == 0\n"
    code += "heavy = {'torch', 'tilelang', 'tvm', 'tvm_ffi', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
