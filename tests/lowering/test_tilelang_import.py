"""tilelang imports its own TVM, whatever else is called `tvm` in the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from terrazzo.lowering.toolchain import package_folder


@pytest.mark.skipif(package_folder("tilelang") is None, reason="tilelang is not installed")
def test_an_installed_tvm_does_not_stand_in_for_tilelangs(tmp_path):
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text("raise ImportError('the wrong TVM was imported')")
    vendored = package_folder("tilelang") / "3rdparty" / "tvm" / "python"
    code = f"""
import sys
sys.path.append({str(vendored)!r})  # where a worker finds what its parent had first
from terrazzo.lowering.toolchain import import_tilelang, loaded_tvm
import_tilelang()
assert loaded_tvm() == "tilelang", sys.modules["tvm"].__file__
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
