"""Eight threads that generate with one model on one GPU, as a web server has them: cold, warm, on streams of their own.

Kernels are compiled before, in parallel, and loaded by the threads: the first test of a format is cold.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
from terrazzo.lowering import graphs
from terrazzo.nn.generation import Sampling, generate
from terrazzo.nn.loading import load

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from tiny_text import byte_tokenizer, write_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
THREADS, NEW, SECONDS = 8, 12, 60
TEXTS = [f"{number}abcdefg"[: 5 + number % 4] for number in range(THREADS)]
GREEDY = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
FORMATS = [("w4a16-g64", "int8"), ("w4a8-g64", "int4")]


@pytest.fixture(scope="module", params=FORMATS, ids=[form for form, _ in FORMATS])
def model(request, tmp_path_factory):
    form, kv = request.param
    made = load(write_folder(tmp_path_factory.mktemp("tiny")), device="cuda", quantize=form, kv=kv)
    terrazzo.prepare(made, [1, *range(5, 9)], quiet=True)
    return made


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
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return [found[number] for number in range(THREADS)]


class Requests:
    """What a thread asks of a model: text, tokens, tokens by a seed, transformers' own loop, and draws.

    Args:
        own: numbers of the threads with a stream of their own, all of one handle in every call.
    """

    def __init__(self, model, own: tuple[int, ...] = ()) -> None:
        self.model, self.tokenizer = model, byte_tokenizer()
        self.ids = [self.tokenizer.encode(text) for text in TEXTS]
        self.streams = {number: torch.cuda.Stream() for number in own}

    def __call__(self, number: int) -> tuple:
        stream = self.streams.get(number)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            ids = torch.tensor([self.ids[number]], device="cuda")
            mask = torch.ones_like(ids)
            greedy = generate(self.model, [self.ids[number]], max_new_tokens=NEW)[0].tolist()
            sampling = Sampling(2.0, top_k=50, seed=number)
            seeded = generate(self.model, [self.ids[number]], max_new_tokens=NEW, sampling=sampling)[0].tolist()
            text = terrazzo.generate(self.model, TEXTS[number], tokenizer=self.tokenizer, max_new_tokens=NEW)
            theirs = self.model.generate(ids, attention_mask=mask, **GREEDY).tolist()
            # draws of torch's own generator, which differ from run to run
            generate(self.model, [self.ids[number]], max_new_tokens=NEW, sampling=Sampling(2.0))
            drawn = self.model.generate(ids, attention_mask=mask, **GREEDY | dict(do_sample=True, temperature=2.0))
            assert drawn.shape == (1, len(self.ids[number]) + NEW)
        return greedy, seeded, text, theirs


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """Handles of the streams on which graphs were launched."""
    seen: list[int] = []
    own = graphs.Graph.replay

    def replay(self) -> None:
        seen.append(torch.cuda.current_stream().cuda_stream)
        assert seen[-1] == self.stream
        own(self)

    monkeypatch.setattr(graphs.Graph, "replay", replay)
    return seen


def test_cold_and_warm_threads_give_what_each_call_gives_alone(model, replays):
    ask = Requests(model)
    cold = together(ask)
    alone = [ask(number) for number in range(THREADS)]
    assert cold == alone
    for _ in range(3):
        assert together(ask) == alone
    # all steps of a call but the first two, and its prefill: six calls of a thread, four runs together, one alone
    assert len(replays) >= 5 * THREADS * 5 * (NEW - 3)


def test_threads_with_streams_of_their_own_do_not_touch_each_other(model, replays):
    """Each second thread has one: graphs that run at the same time have workspaces of their own."""
    alone = [Requests(model)(number) for number in range(THREADS)]
    ask = Requests(model, own=tuple(range(0, THREADS, 2)))
    replays.clear()
    for _ in range(4):
        assert together(ask) == alone
    assert {stream.cuda_stream for stream in ask.streams.values()} < set(replays)


def test_a_thread_that_moves_to_another_stream_captures_anew(model, replays):
    """`past_key_values` of a caller's own loop, whose steps change their stream."""
    tokens = torch.tensor([byte_tokenizer().encode("moving")], device="cuda")
    side, logits = torch.cuda.Stream(), {}
    for way in ("one", "two"):
        out, rows = model(tokens, use_cache=True), []
        for at in range(9):
            moved = side if way == "two" and 3 <= at < 6 else torch.cuda.current_stream()
            moved.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(moved):
                step = torch.full((1, 1), at, device="cuda")
                out = model(step, past_key_values=out.past_key_values, use_cache=True)
                rows.append(out.logits.clone())
            torch.cuda.current_stream().wait_stream(moved)
        logits[way] = torch.cat(rows)
    torch.cuda.synchronize()
    assert torch.equal(logits["one"], logits["two"])
    assert side.cuda_stream in replays


def test_graphs_die_with_their_calls(model):
    ask = Requests(model)
    live = lambda: sum(isinstance(it, torch.cuda.CUDAGraph) for it in gc.get_objects())
    for _ in range(2):
        together(ask)
        gc.collect()
    assert live() <= len(graphs._dropped) <= 1 and not graphs.standing and not graphs.lock.locked()
