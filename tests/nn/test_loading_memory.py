"""Memory of load and quantize: the packed model and two float layers at most, by what the process itself holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.nn.loading import load  # noqa: E402

LAYERS, HIDDEN = 16, 512
RUN = """
import json, sys, threading, time
import torch
from terrazzo.nn import loading, quantizing

torch.set_num_threads(1)

def held():
    with open("/proc/self/status") as status:  # pages of mapped files are the system's, which takes them back at will
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def run(folder, name):
    if how == "load":
        return loading.load(folder, device="cpu", quantize="w4a16-g64", options={"clip_steps": 2})
    options = dict(device="cpu", options={"clip_steps": 2})
    return quantizing.quantize_folder(folder, f"{out}/{name}", "w4a16-g64", **options)

how, small, large, out = sys.argv[1:]
run(small, "small")  # imports, and what first calls keep
before, peak, done = held(), [0], threading.Event()

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], held() - before)

thread = threading.Thread(target=watch)
thread.start()
made = run(large, "large")
done.set()
thread.join()
print(json.dumps(peak[0]))
"""


def write(folder, layers: int, hidden: int):
    """A float16 Llama; bytes of one layer."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, head_dim=64, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).half()
    model.save_pretrained(folder)
    return sum(2 * parameter.numel() for parameter in model.model.layers[0].parameters())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
@pytest.mark.parametrize("how", ["load", "quantize"])
def test_no_more_is_held_than_the_packed_model_and_two_layers(tmp_path, how):
    write(tmp_path / "small", 1, 128)
    layer = write(tmp_path / "large", LAYERS, HIDDEN)
    state = load(tmp_path / "large", device="cpu", quantize="w4a16-g64", options={"clip_steps": 1}).state_dict()
    packed = sum(t.numel() * t.element_size() for t in state.values())
    command = [sys.executable, "-c", RUN, how, *(str(tmp_path / name) for name in ("small", "large", "out"))]
    # freed memory goes back to the system at once, so that the process holds what is in use
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert said.returncode == 0, said.stderr
    peak = json.loads(said.stdout.splitlines()[-1])
    assert packed < (LAYERS + 1) * layer / 3  # else the bound says nothing
    assert peak < packed + 2 * layer, (peak, packed, layer)
    assert how == "quantize" or peak > packed  # else nothing was measured
