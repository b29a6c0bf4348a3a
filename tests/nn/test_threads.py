"""Eight threads that generate with one model, as a web server has them, on the CPU; tests/gpu/test_threads_gpu.py."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
from terrazzo.nn.loading import load
from tiny_text import byte_tokenizer, write_folder

THREADS, NEW, SECONDS = 8, 2, 120
TEXTS = [f"{number} " * (1 + number % 3) for number in range(THREADS)]


def together(run) -> list:
    """What `run` gives for each number, in a thread each that starts at the same time."""
    found, failed, start = {}, [], threading.Barrier(THREADS)

    def guarded(number: int) -> None:
        try:
            start.wait()
            found[number] = run(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return [found[number] for number in range(THREADS)]


@pytest.mark.parametrize("quantize", [pytest.param("w4a16-g64", marks=pytest.mark.slow), "w4a8-g64"])
def test_what_threads_generate_is_what_each_call_gives_alone(tmp_path, quantize):
    folder, tokenizer = write_folder(tmp_path), byte_tokenizer()
    make = lambda: load(folder, device="cpu", quantize=quantize, kv="int8")
    model = make()
    ids = [torch.tensor([tokenizer.encode(text)]) for text in TEXTS]
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)

    def request(number: int) -> tuple:
        text = terrazzo.generate(model, TEXTS[number], tokenizer=tokenizer, max_new_tokens=NEW)
        mask = torch.ones_like(ids[number])
        drawn = terrazzo.generate(
            model, TEXTS[number], tokenizer=tokenizer, max_new_tokens=NEW, temperature=2.0, seed=number
        )
        return text, model.generate(ids[number], attention_mask=mask, **options).tolist(), drawn

    cold = together(request)  # nothing of the model was ever used before
    alone = [request(number) for number in range(THREADS)]
    assert cold == alone
