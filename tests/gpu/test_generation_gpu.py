"""Decoding loops on a GPU: tokens beside transformers' own, a graph for each step, captured steps beside eager ones."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.nn import generation  # noqa: E402
from terrazzo.nn.decoder import positions_of  # noqa: E402
from terrazzo.nn.generation import DecodeStep, generate  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY, NEW = 512, 12
PROMPTS = [
    torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 70, 33)
]


@pytest.fixture(scope="module")
def exact():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCABULARY, initializer_range=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).half().cuda().eval()


@pytest.fixture(scope="module")
def loaded(exact):
    return load(exact.state_dict(), config=exact.config, device="cuda", kv="float16")


@torch.no_grad()
def check_same(exact, prompt, made, wanted) -> None:
    """Greedy tokens are equal; where they part, float16 rounds two logits of the float model to a tie."""
    made, wanted = [torch.as_tensor(tokens).tolist() for tokens in (made, wanted)]
    at = next((i for i, (a, b) in enumerate(zip(made, wanted)) if a != b), None)
    if at is None:
        assert len(made) == len(wanted)
        return
    logits = exact(torch.tensor([[*prompt.tolist(), *made[:at]]]).cuda()).logits[0, -1].float()
    off = float((logits[made[at]] - logits[wanted[at]]).abs())
    assert off < 2**-8 * float(logits.abs().max()), (at, made, wanted, off)


def step_of(model, prompts):
    """A step behind a prefill, and the cache that it reads."""
    cache = model.new_cache(len(prompts), 128)
    sequences = [cache.new() for _ in prompts]
    batch = cache.extend({s: len(p) for s, p in zip(sequences, prompts)})
    with torch.no_grad():
        model.decoder(torch.cat(prompts).cuda(), positions_of(batch), batch)
    return DecodeStep(model, cache.extend(dict.fromkeys(sequences, 1), reserve=8)), cache


def test_greedy_tokens_of_16_bits_are_those_of_transformers(exact, loaded):
    made = generate(loaded, PROMPTS, max_new_tokens=NEW)
    for prompt, tokens in zip(PROMPTS, made):
        options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted = exact.generate(prompt[None].cuda(), attention_mask=torch.ones_like(prompt[None]).cuda(), **options)
        check_same(exact, prompt, tokens, wanted[0, len(prompt) :])


def test_sequences_of_unequal_prompts_do_not_touch_each_other(exact, loaded):
    together = generate(loaded, PROMPTS, max_new_tokens=NEW)
    for prompt, tokens in zip(PROMPTS, together):
        check_same(exact, prompt, generate(loaded, [prompt], max_new_tokens=NEW)[0], tokens)


@torch.no_grad()
def test_captured_steps_are_eager_steps_bit_for_bit(loaded, monkeypatch):
    token = torch.arange(len(PROMPTS)).cuda()
    logits = {}
    for way in ("captured", "eager"):
        with monkeypatch.context() as patch:
            if way == "eager":
                patch.setattr(DecodeStep, "_capture", lambda self: setattr(self, "_logits", self._run(first=False)))
            step, _ = step_of(loaded, PROMPTS)
            found = []
            for at in range(5):
                step.tokens.copy_(token + at)
                found.append(step().clone())
            logits[way] = torch.stack(found)
            assert step.replays == (4 if way == "captured" else 0)
    assert torch.equal(logits["captured"], logits["eager"])


CALLS = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")


def launches(run, new: int) -> list[int]:
    """How often each of CALLS, of the CUDA runtime or driver, is called by a warm run of so many new tokens."""
    run(new)  # compiles and loads
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        run(new)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    return [sum(name.startswith(call) for name in names) for call in CALLS]


def test_a_step_is_one_graph_launch_and_the_sampling(loaded):
    """What eight further steps launch: one graph each, and few kernels."""
    run = lambda new: generate(loaded, PROMPTS, max_new_tokens=new)
    counts = [launches(run, new) for new in (NEW, NEW + 8)]
    graphs, kernels, drivers = (more - less for less, more in zip(*counts))
    assert graphs == 8 and drivers == 0, counts
    assert 0 < kernels <= 8 * 12, counts  # tokens in, argmax, the row of tokens


def test_a_step_of_generate_of_transformers_is_one_graph_launch_the_head_and_its_own_loop(loaded):
    """The same of `model.generate`: its loop keeps masks and positions by small kernels, none of a layer."""
    rows = torch.stack([PROMPTS[1][:20], PROMPTS[2][:20]]).cuda()
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(rows))
    run = lambda new: loaded.generate(rows, max_new_tokens=new, **options)
    counts = [launches(run, new) for new in (NEW, NEW + 8)]
    graphs, kernels, drivers = (more - less for less, more in zip(*counts))
    assert graphs == 8 and drivers <= 8, counts  # the head's product may be launched by the driver
    assert 0 < kernels <= 8 * 30, counts


def test_sampling_of_transformers_draws_by_its_seed(loaded):
    rows = torch.stack([PROMPTS[1][:20], PROMPTS[2][:20]]).cuda()
    options = dict(do_sample=True, temperature=3.0, top_k=100, eos_token_id=None, pad_token_id=0)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made = loaded.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=NEW, **options)
        drawn.append(made[:, 20:].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("kv", ["int4", "int8", ("int4_channel64", "int4")])
def test_low_bit_caches_and_weights_run(exact, kv):
    model = load(exact.state_dict(), config=exact.config, device="cuda", kv=kv, quantize="w4a16-g64")
    made = generate(model, PROMPTS, max_new_tokens=NEW)
    assert all(len(tokens) == NEW for tokens in made)
    again = generate(model, PROMPTS, max_new_tokens=NEW, sampling=generation.Sampling(0.7, top_k=1))
    assert [t.tolist() for t in again] == [t.tolist() for t in made]  # one candidate left is greedy


def test_generate_of_transformers_gives_the_same_tokens(exact, loaded):
    width = max(map(len, PROMPTS))
    rows = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in PROMPTS]).cuda()
    lengths = torch.tensor([len(p) for p in PROMPTS]).cuda()
    mask = (torch.arange(width).cuda() >= width - lengths[:, None]).long()
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    made = loaded.generate(rows, attention_mask=mask, **options)[:, width:]
    for prompt, padded, tokens in zip(PROMPTS, made, generate(loaded, PROMPTS, max_new_tokens=NEW)):
        check_same(exact, prompt, padded.cpu(), tokens)


@torch.no_grad()
def test_functions_of_transformers_serve_another_architecture():
    """A small gpt-oss: sinks, windows, experts with biases. Attention beside eager modules, and packed experts beside
    the numbers that their codes stand for. All experts are chosen: rounding turns no choice between near ties."""
    from terrazzo.integrations.transformers import new_cache, pack

    config = transformers.GptOssConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=4, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], initializer_range=0.1, eos_token_id=None,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    own = lambda: type(config)(**config.to_diff_dict())  # models keep their implementations in it
    make = lambda: transformers.AutoModelForCausalLM.from_config(own(), dtype=torch.float16).cuda().eval()
    exact = make()
    for parameter in exact.parameters():
        parameter.data += torch.randn_like(parameter) * 0.02
    model = make()
    model.load_state_dict(exact.state_dict())
    exact.set_attn_implementation("eager")
    exact.set_experts_implementation("eager")
    pack(model, "w4a16-g64")
    theirs = dict(exact.named_modules())
    for path, module in model.named_modules():
        if type(module).__name__ == "Linear" and hasattr(module, "packed"):
            theirs[path].weight.data = module.packed.dequantize()
        if hasattr(module, "terrazzo"):
            for leaf, own in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj")):
                packed = getattr(module.terrazzo, own).packed
                weights = torch.stack([packed[e].dequantize().T for e in range(len(packed))])
                getattr(theirs[path], leaf).data = weights.contiguous()
    model.set_attn_implementation("terrazzo")
    rows = torch.stack([torch.nn.functional.pad(PROMPTS[0], (28, 0)), PROMPTS[2]]).cuda()
    mask = torch.ones_like(rows)
    mask[0, :28] = 0
    at = (mask.cumsum(1) - 1).clamp_min(0)
    wanted = exact(rows, attention_mask=mask, position_ids=at).logits[mask.bool()].float()
    cache = new_cache(model, 2, 64)
    parts = [
        model(
            rows[:, a:b], attention_mask=mask[:, :b], position_ids=at[:, a:b], past_key_values=cache, use_cache=True
        ).logits
        for a, b in ((0, 31), (31, 32), (32, 33))
    ]
    got = torch.cat(parts, 1)[mask.bool()].float()
    assert bool(got.isfinite().all())
    assert (got - wanted).norm() < 0.02 * wanted.norm(), float((got - wanted).norm() / wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize("kv", ["float16", "int4"])
def test_a_row_that_pauses_between_captured_steps_goes_on_where_it_was(exact, kv):
    """Steps of one column with a mask: graphs run where all rows count, and a column of padding is no token."""
    model = load(exact.state_dict(), config=exact.config, device="cuda", kv=kv)
    width, counts = 70, [[1, 1, 1]] * 5 + [[1, 0, 1], [0, 0, 0], [0, 1, 1]] + [[1, 1, 1]] * 5
    rows = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in PROMPTS]).cuda()
    lengths = torch.tensor([len(p) for p in PROMPTS]).cuda()
    mask = (torch.arange(width).cuda() >= width - lengths[:, None]).long()
    texts, held = [p.tolist() for p in PROMPTS], model(rows, attention_mask=mask).past_key_values
    replays = []
    for at, count in enumerate(counts):
        tokens = torch.tensor([[(7 * at + row) % VOCABULARY] for row in range(3)])
        for row in range(3):
            texts[row] += tokens[row].tolist() * count[row]
        mask = torch.cat([mask, torch.tensor(count).cuda()[:, None]], 1)
        step = model(tokens.cuda(), attention_mask=mask, past_key_values=held)
        replays.append(0 if held.steps is None else held.steps.replays)
    assert replays[4] >= 2 and replays[5:8] == [0, 0, 0] and replays[-1] >= 2
    for row, text in enumerate(texts):
        assert held.kv.length(held.sequences[row]) == len(text)
        whole = model(torch.tensor([text]).cuda(), use_cache=False).logits[0, -1].float()
        off = float((step.logits[row, 0].float() - whole).norm() / whole.norm())
        assert off < (0.01 if kv == "float16" else 0.2), (row, off)


@torch.no_grad()
def test_a_crop_between_captured_steps_takes_them_back(loaded):
    """What ran behind the crop leaves no trace: the same tokens again give the same logits, in graphs of their own."""
    prompt = PROMPTS[1][None].cuda()
    held = loaded(prompt).past_key_values
    step = lambda at: loaded(torch.tensor([[at]]).cuda(), past_key_values=held).logits.clone()
    first = [step(at) for at in range(6)]
    assert held.steps.replays >= 3
    held.crop(-6)
    assert held.get_seq_length() == prompt.shape[1]
    again = [step(at) for at in range(6)]
    assert held.steps.replays >= 3 and all(torch.equal(a, b) for a, b in zip(first, again))


@torch.no_grad()
def test_a_failed_sequence_ends_neither_a_sampled_batch_nor_the_context(exact):
    """torch.multinomial would end the process's use of the GPU: by both ways to generate, others get their tokens."""
    state = {name: value.clone() for name, value in exact.state_dict().items()}
    model = load(state, config=exact.config, device="cuda", kv="float16")
    model.decoder.embed_tokens.weight.data[3] = torch.nan
    bad, fine = torch.tensor([3, 5, 9, 11, 2]), PROMPTS[0]
    sampling = generation.Sampling(temperature=0.7, top_k=1)
    alone = generate(model, [fine], max_new_tokens=NEW, sampling=sampling)[0]
    with pytest.raises(generation.NotFiniteError) as caught:
        generate(model, [fine, bad], max_new_tokens=NEW, sampling=sampling)
    assert caught.value.rows == [1] and not len(caught.value.results[1])
    check_same(exact, fine, caught.value.results[0], alone)
    rows = torch.stack([fine, bad]).cuda()
    options = dict(do_sample=True, temperature=0.7, top_k=1, eos_token_id=None, pad_token_id=0)
    with pytest.raises(generation.NotFiniteError) as caught:
        model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=NEW, **options)
    assert caught.value.rows == [1]
    check_same(exact, fine, caught.value.results[0, len(fine) :].cpu(), alone)
    assert float(torch.ones(3, device="cuda").sum()) == 3  # the context is alive
