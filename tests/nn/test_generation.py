"""Decoding loops on the CPU, by the operators' reference: tests/gpu/test_generation_gpu.py runs the graphs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from small_model import VOCABULARY, SmallModel
from terrazzo.lowering import replacing
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import generation
from terrazzo.nn.generation import NotFiniteError, Sampling, generate
from terrazzo.ops import launching
from terrazzo.ops.attention import CacheFullError

PROMPTS = [[5, 9, 2], [17, 3, 8, 44, 90, 1, 30]]


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


@pytest.fixture(scope="module")
def greedy(model) -> list[list[int]]:
    return [tokens.tolist() for tokens in generate(model, PROMPTS, max_new_tokens=4)]


def test_greedy_tokens_are_those_of_the_whole_text_computed_anew(model, greedy):
    """Steps over the cache, ragged batch and all, against one prefill of each prefix."""
    for prompt, made in zip(PROMPTS, greedy):
        text = list(prompt)
        for token in made:
            logits = model.recomputed(text)
            assert token == int(logits.argmax())
            text.append(token)


def test_sequences_of_a_batch_do_not_touch_each_other(model, greedy):
    assert generate(model, PROMPTS[1:], max_new_tokens=4)[0].tolist() == greedy[1]


def test_an_end_token_ends_its_sequence_alone(model, greedy):
    end = greedy[0][1]
    assert end not in greedy[0][:1] and end not in greedy[1]
    short, long = generate(model, PROMPTS, max_new_tokens=4, eos_token_id=end)
    assert short.tolist() == greedy[0][:2] and long.tolist() == greedy[1]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_any_of_several_end_tokens_ends_its_sequence(model, greedy, at):
    """On the device, too: what a sequence writes behind its end is no token while another one goes on."""
    end = greedy[0][1]
    ends = sorted({*range(VOCABULARY)} - {*greedy[0], *greedy[1]})[:2]
    ends.insert(at, end)
    seen = []
    short, long = generate(model, PROMPTS, max_new_tokens=4, eos_token_id=ends, on_tokens=seen.append)
    assert short.tolist() == greedy[0][:2] and long.tolist() == greedy[1]
    assert [first for first, _ in seen] == [*greedy[0][:2], None, None]


def test_nothing_is_computed_behind_the_last_end_token(model, greedy):
    seen = []
    made = generate(model, [PROMPTS[0]], max_new_tokens=40, eos_token_id=[greedy[0][0]], on_tokens=seen.append)
    assert [tokens.tolist() for tokens in made] == [greedy[0][:1]] and seen == [[greedy[0][0]]]


def test_tokens_are_handed_on_in_order(model, greedy):
    seen = []
    generate(model, PROMPTS, max_new_tokens=4, on_tokens=seen.append)
    assert seen == [list(step) for step in zip(*greedy)]


def test_a_listener_that_returns_true_stops_the_loop(model, greedy):
    seen = []
    made = generate(model, PROMPTS, max_new_tokens=4, on_tokens=lambda row: seen.append(row) or len(seen) == 2)
    assert [tokens.tolist() for tokens in made] == [tokens[:2] for tokens in greedy] and len(seen) == 2


def test_one_candidate_left_is_greedy(model, greedy):
    pytest.importorskip("transformers", reason="sampling takes its processors")
    made = generate(model, PROMPTS, max_new_tokens=4, sampling=Sampling(temperature=0.7, top_k=1))
    assert [tokens.tolist() for tokens in made] == greedy


def test_a_seed_fixes_what_is_drawn(model):
    draw = lambda seed: [
        t.tolist() for t in generate(model, PROMPTS, sampling=Sampling(1.0, seed=seed), max_new_tokens=4)
    ]
    assert draw(1) == draw(1) != draw(2)


def test_a_low_bit_cache_gives_tokens_close_to_its_own_recomputation():
    """Steps read what earlier steps stored: with int8 the logits stay near those of a prefill with f16 keys."""
    model = SmallModel(("int8", "int8"))
    made = generate(model, [PROMPTS[1]], max_new_tokens=3)[0].tolist()
    exact = SmallModel().recomputed(PROMPTS[1])
    assert made[0] == int(exact.argmax())


def test_sequences_are_given_back_whatever_happens(model):
    cache = model.new_cache(2, 64)
    generate(model, PROMPTS, max_new_tokens=2, cache=cache)
    assert cache.usage().sequences == 0 and cache.usage().free_pages == cache.usage().pages
    with pytest.raises(CacheFullError):
        generate(model, PROMPTS, max_new_tokens=100, cache=cache)
    assert cache.usage().sequences == 0 and cache.usage().free_pages == cache.usage().pages


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(prompts=[]), "prompts"),
        (dict(prompts="Hello"), "prompts"),
        (dict(prompts=[[1, VOCABULARY]]), "prompts"),
        (dict(prompts=[[-1]]), "prompts"),
        (dict(prompts=[[]]), "prompts"),
        (dict(prompts=[[1.5]]), "prompts"),
        (dict(prompts=[object()]), "prompts"),
        (dict(prompts=3), "prompts"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=2.0), "max_new_tokens"),
        (dict(eos_token_id="x"), "eos_token_id"),
    ],
)
def test_bad_calls_name_the_argument(model, given, named):
    with pytest.raises(ArgumentError, match=named):
        generate(model, **{"prompts": PROMPTS, "max_new_tokens": 2, **given})


@pytest.mark.parametrize(
    "given",
    [
        dict(temperature=-1),
        dict(temperature=1e-45),
        dict(temperature=float("inf")),
        dict(temperature=float("nan")),
        dict(temperature=10**400),
        dict(min_p=1.5),
        dict(min_p=float("nan")),
        dict(repetition_penalty=0),
        dict(repetition_penalty=float("inf")),
        dict(top_p=float("nan")),
        dict(top_k=-1),
        dict(top_p=0),
        dict(top_p=1.5),
        dict(top_k="a"),
        dict(seed=True),
        dict(seed="1"),
        dict(seed=1 << 64),
    ],
)
def test_bad_sampling_names_the_argument(given):
    with pytest.raises(ArgumentError, match=next(iter(given))):
        Sampling(**given)


@pytest.mark.parametrize(
    ("compiling", "expected"),
    [([], "eager graph graph"), ([1], "eager eager eager graph"), ([1, 2], "eager eager eager eager graph")],
    ids=["never", "behind the first step", "behind the second, too"],
)
def test_a_step_is_captured_behind_one_that_ran_each_layers_own_kernel(model, monkeypatch, compiling, expected):
    """A graph keeps what it captured: not a kernel that stands in for one that is being compiled."""
    step = generation.DecodeStep(model, model.new_cache(1, 64).extend({}))
    step.tokens, step.batch = SimpleNamespace(is_cuda=True), SimpleNamespace(advance=lambda lengths: None)
    log: list[str] = []

    def capture():
        step.graph = SimpleNamespace(stream=0, replay=lambda: log.append("graph"))

    monkeypatch.setattr(launching, "current_stream", lambda tokens: 0)
    monkeypatch.setattr(replacing, "wait", lambda timeout: len(log) not in compiling)
    monkeypatch.setattr(step, "_capture", capture)
    monkeypatch.setattr(step, "_run", lambda first: log.append("eager"))
    for _ in expected.split():
        step()
    assert log == expected.split()
    if compiling:
        return
    monkeypatch.setattr(launching, "current_stream", lambda tokens: 7)  # where others hold the graph's workspaces
    step()
    assert log[-1] == "eager" and step.graph is None


def broken(model, token: int):
    """The same model, whose embedding of one token is NaN."""
    import copy

    made = copy.deepcopy(model)
    made.decoder.embed_tokens.weight.data[token] = torch.nan
    return made


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7, top_k=1, top_p=0.9, min_p=0.1)])
def test_a_sequence_whose_logits_are_not_finite_ends_alone(model, greedy, sampling):
    """At its first token, or at a later one; the others go on, and are those of a batch without it."""
    late = greedy[0][1]
    assert late not in greedy[1] + PROMPTS[0] + PROMPTS[1] and late != greedy[0][0]
    seen = []
    with pytest.raises(NotFiniteError, match=r"sequences \[0, 2\] are not finite.*dtype=torch.bfloat16") as caught:
        generate(broken(model, late), [*PROMPTS, [late, 5]], max_new_tokens=4, sampling=sampling, on_tokens=seen.append)
    assert caught.value.rows == [0, 2]
    assert [tokens.tolist() for tokens in caught.value.results] == [greedy[0][:2], greedy[1], []]
    first = [[greedy[0][0], greedy[1][0], None], [late, greedy[1][1], None]]
    assert seen == first + [[None, token, None] for token in greedy[1][2:]]


def test_a_listener_ends_sequences_by_their_numbers(model, greedy):
    """The token that is being computed meanwhile is dropped, and nothing runs once all have ended."""
    seen, ends = [], {0: [1], 2: [0]}
    made = generate(model, PROMPTS, max_new_tokens=4, on_tokens=lambda row: seen.append(row) or ends.get(len(seen) - 1))
    assert [tokens.tolist() for tokens in made] == [greedy[0][:3], greedy[1][:1]]
    assert seen == [[greedy[0][0], greedy[1][0]], [greedy[0][1], None], [greedy[0][2], None]]


@pytest.mark.random
def test_tokens_are_chosen_as_transformers_processors_choose_them(seed):
    """Its own lists of processors for the same options, on the same logits and texts, beside ours; ragged prompts."""
    transformers = pytest.importorskip("transformers", reason="sampling takes its processors")
    draw = random.Random(seed)
    host = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    for _ in range(20):
        options = dict(temperature=draw.choice([0, 0.3, 1.0, 2.0]), top_k=draw.choice([0, 5]))
        options |= dict(top_p=draw.choice([1.0, 0.7]), min_p=draw.choice([0.0, 0.2]))
        options |= dict(repetition_penalty=draw.choice([1.0, 1.3, 0.8]))
        prompts = [torch.randint(0, 40, (draw.randrange(1, 6),)) for _ in range(3)]
        text = generation._texts(prompts, 2)
        logits, number = torch.randn(3, 40).half() * 5, draw.randrange(1 << 30)
        got = Sampling(**options, seed=number).chooser(torch.device("cpu"))(logits, text[:, : text.shape[1] - 2])
        sample = bool(options["temperature"])
        config = transformers.GenerationConfig(do_sample=sample, **options if sample else dict(
            repetition_penalty=options["repetition_penalty"]))  # fmt: skip
        config.min_p = config.min_p or None  # its processor of 0 keeps all tokens
        scores = [
            host._get_logits_processor(config, input_ids_seq_length=len(p))(p[None], row.float())
            for p, row in zip(prompts, logits[:, None])
        ]
        scores = torch.cat(scores)
        probabilities, drawn = scores.softmax(-1), torch.Generator().manual_seed(number)
        wanted = torch.multinomial(probabilities, 1, generator=drawn)[:, 0] if sample else scores.argmax(-1)
        assert got.tolist() == wanted.tolist(), (options, prompts)


@torch.no_grad()
def test_a_repetition_penalty_reads_prompts_and_new_tokens(model):
    """Each token is the best of logits that are divided by hand, of prompts of unequal length."""
    made = generate(model, PROMPTS, max_new_tokens=4, sampling=Sampling(repetition_penalty=3.0))
    for prompt, tokens in zip(PROMPTS, made):
        text = list(prompt)
        for token in tokens.tolist():
            logits = model.recomputed(text).float()
            seen = sorted(set(text))
            logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 3, logits[seen] / 3)
            assert token == int(logits.argmax())
            text.append(token)


@pytest.mark.parametrize("kind", ["uint16", "uint8", "int16", "int32", "uint64"])
def test_prompts_may_be_of_any_integers(model, greedy, kind):
    prompts = [torch.tensor(p).to(getattr(torch, kind)) for p in PROMPTS]
    assert generate(model, prompts, max_new_tokens=1)[0].tolist() == greedy[0][:1]


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor(5), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.ones(1, 2, 3, dtype=torch.int64),
        [torch.tensor(5)], [[1 << 70]], [torch.tensor([1 << 63], dtype=torch.uint64)], [["a"]], [[None]], {"a": 1},
        [torch.ones(3, dtype=torch.complex64)], torch.ones(2, 3, device="meta", dtype=torch.int64), [[True]],
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_prompt_is_named(model, prompts):
    with pytest.raises(ArgumentError, match="^prompts"):
        generate(model, prompts, max_new_tokens=1)


@pytest.mark.parametrize("given", [1 << 63, [1.5], torch.tensor(0.5), True])
def test_what_is_no_end_token_is_named(model, given):
    with pytest.raises(ArgumentError, match="^eos_token_id"):
        generate(model, PROMPTS, max_new_tokens=1, eos_token_id=given)
