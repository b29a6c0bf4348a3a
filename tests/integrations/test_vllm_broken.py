"""The vLLM plug-in in a broken environment: what is missing is said in one line, and vLLM goes on."""

from __future__ import annotations

import builtins
import logging
import os
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
from terrazzo.integrations import vllm as plugin
from terrazzo.integrations.engines import kernels
from terrazzo.integrations.engines.weights import Wanted
from terrazzo.lowering.errors import ToolchainError
from terrazzo.lowering.targets import Target

from tests.integrations import vllm_double

VERSIONS = ("0.26.0", "0.27.1rc1", "0.28.0", "0.33.0")
ODD_VERSIONS = ("", "dev", "0", "0.x", "1!0.26", "9" * 5000, "0." + "9" * 5000, "0.26\n", "²", None, 26, b"0.26")
LEFT = "terrazzo leaves {} to vLLM"
MACHETE = [vllm_double.Machete]


@pytest.fixture
def install(monkeypatch):
    """`install(version)`: the double of vLLM, and what the plug-in finds of it."""
    monkeypatch.setattr(plugin, "_registered", [])

    def made(version: object) -> vllm_double.Engine:
        plugin._registered.clear()
        engine = vllm_double.install(monkeypatch)
        module = ModuleType("experts")  # asks vLLM for more than the double has
        module.register = lambda: None
        monkeypatch.setitem(sys.modules, "terrazzo.integrations.vllm.experts", module)
        monkeypatch.setattr(plugin, "experts", module, raising=False)
        monkeypatch.setattr(metadata, "version", lambda name: version)
        return engine

    return made


def said(caplog) -> str:
    text = "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert not any(record.exc_info for record in caplog.records if record.levelno > logging.DEBUG)
    caplog.clear()
    return text


@pytest.mark.parametrize("version", VERSIONS)
def test_a_whole_environment_registers_without_a_word(install, caplog, version):
    engine = install(version)
    plugin.register()
    plugin.register()
    names = [each.__name__ for each in engine.kernels[vllm_double.PlatformEnum.CUDA]]
    assert names == ["TerrazzoLinearKernel", "Machete"] and not said(caplog)
    assert vllm_double.AttentionBackendEnum.CUSTOM in vllm_double.OVERRIDES


OF_OURS = "terrazzo.integrations.engines.weights"


@pytest.mark.parametrize("name", ["safetensors", "numpy", "torch", OF_OURS, "vllm.config"])
def test_a_missing_dependency_is_named_and_vllm_goes_on(install, monkeypatch, caplog, name):
    engine, real = install("0.33.0"), builtins.__import__

    def without(wanted, *args, **options):
        if wanted == name or wanted.startswith(f"{name}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(wanted, *args, **options)

    for held in list(sys.modules):
        if held.startswith(("terrazzo.integrations.vllm.", "terrazzo.integrations.engines.")):
            monkeypatch.delitem(sys.modules, held)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        plugin.register()
    text = said(caplog)
    if text:  # the others are imported when a layer is taken
        assert f"(ModuleNotFoundError: No module named {name!r})" in text and "VLLM_PLUGINS" in text
        assert engine.kernels[vllm_double.PlatformEnum.CUDA] == MACHETE
    assert bool(text) == (name in ("torch", OF_OURS, "vllm.config"))


def test_a_part_that_is_broken_leaves_the_others(install, caplog):
    engine = install("0.26.0")
    del sys.modules["vllm.model_executor.kernels.linear"]._POSSIBLE_MXFP4_KERNELS
    sys.modules["terrazzo.integrations.vllm.experts"].register = lambda: [][1]
    plugin.register()
    text = said(caplog)
    assert LEFT.format("layers of MXFP4 and FP8") in text and "_POSSIBLE_MXFP4_KERNELS" in text
    assert LEFT.format("experts") + " (IndexError: list index out of range)" in text and text.count("\n") == 1
    assert len(engine.kernels[vllm_double.PlatformEnum.CUDA]) == 2
    assert vllm_double.AttentionBackendEnum.CUSTOM in vllm_double.OVERRIDES
    plugin.register()
    assert not said(caplog)


def test_a_vllm_that_is_another_than_its_version_says_is_named(install, monkeypatch, caplog, tries):
    """Modules and names that are gone, or of another kind."""
    odd = (None, 5, "x", (), {}, object(), SimpleNamespace(), lambda *_: 1 / 0)
    named = 0
    for random in tries(100):
        with monkeypatch.context() as patch:
            engine = install(random.choice(VERSIONS))
            modules = [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
            for _ in range(random.choice((1, 1, 2, 4))):
                module = sys.modules.get(random.choice(modules))
                names = [name for name in vars(module or SimpleNamespace()) if not name.startswith("__")]
                kind = random.choice(("module", "name", "name", "odd", "odd"))
                if kind == "module" or not names:
                    patch.setitem(sys.modules, random.choice(modules), None)
                elif kind == "name":
                    patch.delattr(module, random.choice(names))
                else:
                    patch.setattr(module, random.choice(names), random.choice(odd))
            plugin.register()
            text = said(caplog)
            named += bool(text)
            assert all(line.startswith("terrazzo leaves ") for line in text.splitlines())
            assert vllm_double.Machete in engine.kernels[vllm_double.PlatformEnum.CUDA]
    assert named > 0


@pytest.mark.parametrize("version", ODD_VERSIONS, ids=lambda it: repr(it)[:12])
def test_odd_versions_of_vllm_are_left_alone(install, caplog, version):
    engine = install(version)
    plugin.register()
    text = said(caplog)
    known = version in ("0.26\n",)
    assert known or engine.kernels[vllm_double.PlatformEnum.CUDA] == MACHETE
    assert known or not version or "does not know vLLM" in text or LEFT.format("everything") in text


def test_broken_metadata_of_an_installation_is_named(install, monkeypatch, caplog):
    for error in (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), KeyError("Version"), PermissionError(13, "no")):
        engine = install("0.33.0")
        monkeypatch.setattr(metadata, "version", lambda name, error=error: (_ for _ in ()).throw(error))
        plugin.register()
        assert LEFT.format("everything") + f" ({type(error).__name__}: " in said(caplog)
        assert engine.kernels[vllm_double.PlatformEnum.CUDA] == MACHETE


def test_a_cache_that_cannot_be_used_leaves_layers_to_vllm(tmp_path, monkeypatch):
    """With a reason; whether there is a compiler or none."""
    layer = Wanted(4096, 4096, 4096, 128, False, False, "bfloat16", "16", "uint4b8")
    wanted = kernels.requests_of(layer, True, False, 1, Target.parse("sm_90a"))
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "loop").symlink_to("loop")
    for missing in ((), ("nvcc",)):
        monkeypatch.setattr(kernels, "compiler", lambda missing=missing: SimpleNamespace(missing=missing))
        for bad in ("file", "open", "loop", "file/below", "a" * 300):
            monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / bad))
            assert "kernel cache" in kernels.lacking(wanted) and "set TERRAZZO_CACHE_DIR" in kernels.lacking(wanted)
        monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "new"))
        assert (kernels.lacking(wanted) is None) == (not missing)
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", "/proc/absent")
    monkeypatch.setattr(kernels, "compiler", lambda: SimpleNamespace(missing=()))
    assert "cannot be made" in kernels.lacking(wanted)
    monkeypatch.setattr(kernels, "compiler", lambda: (_ for _ in ()).throw(ToolchainError("its settings are damaged")))
    assert kernels.lacking(wanted) == "its settings are damaged"
    assert os.environ["TERRAZZO_CACHE_DIR"]
