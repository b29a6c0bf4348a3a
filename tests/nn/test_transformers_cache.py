"""What transformers' callers do to a cache between steps, and columns of padding, beside whole texts computed anew."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import transformers_cache  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.nn.transformers_cache import TerrazzoCache  # noqa: E402
from terrazzo.ops.attention import CacheFullError  # noqa: E402

TOKENS = torch.randint(1, 64, (3, 14), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(TOKENS)
MASK[0, :4] = 0
MASK[2, 6] = 0  # a pause
BOUNDS = {"float16": 3e-3, "int4": 6e-2}
SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
    vocab_size=64, head_dim=64, max_position_embeddings=256, initializer_range=0.2,
)  # fmt: skip


def made(kv):
    torch.manual_seed(0)
    exact = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    return load(exact.state_dict(), config=exact.config, device="cpu", kv=kv, max_tokens=16)


@pytest.fixture(scope="module", params=BOUNDS)
def model(request):
    return made(request.param)


@pytest.fixture(scope="module")
def plain():
    return made(None)


def begun(model, columns: int = 9, rows: int = 3):
    """The cache of the first columns, the last three of them fed one by one."""
    held = None
    for a, b in ((0, columns - 3), *((at, at + 1) for at in range(columns - 3, columns))):
        held = model(TOKENS[:rows, a:b], attention_mask=MASK[:rows, :b], past_key_values=held).past_key_values
    return held


@torch.no_grad()
def wanted(model, row: int, end: int = 14, then: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits of a row's tokens up to a column, and of some behind it, without padding and without a cache."""
    tokens = torch.cat([TOKENS[row, :end][MASK[row, :end].bool()], torch.tensor(then, dtype=torch.int64)])
    return model(tokens[None], use_cache=False).logits[0]


def check(model, got: torch.Tensor, row: int, columns: range, **then) -> None:
    """Logits [columns, vocabulary] of a row, where these are no padding, are those of the whole text."""
    count = len(columns) - len(then.get("then", ()))
    kept = torch.cat([MASK[row, columns.start : columns.start + count].bool(), torch.ones(len(columns) - count).bool()])
    whole = wanted(model, row, columns.start + count, **then)[-int(kept.sum()) :]
    off = float((got[kept] - whole).norm() / whole.norm())
    assert off < BOUNDS["float16" if model.model.formats == ("float16", "float16") else "int4"], off


@pytest.mark.parametrize("width", [1, 5])
@torch.no_grad()
def test_columns_of_padding_count_for_nothing_however_many_come_at_once(model, width):
    held, found = None, []
    for a in range(0, 14, width):
        b = min(a + width, 14)
        step = model(TOKENS[:, a:b], attention_mask=MASK[:, :b], past_key_values=held)
        held, found = step.past_key_values, [*found, step.logits]
    for row in range(3):
        check(model, torch.cat(found, 1)[row], row, range(14))
    assert [held.kv.length(s) for s in held.sequences] == MASK.sum(1).tolist()


@torch.no_grad()
def test_a_row_pauses_and_goes_on(plain):
    """Columns of padding in one row, and in all of them, behind steps that count all rows."""
    held, mask = begun(plain), MASK[:, :9]
    for counts in ([1, 0, 1], [0, 0, 0], [1, 1, 1]):
        mask = torch.cat([mask, torch.tensor(counts)[:, None]], 1)
        step = plain(torch.full((3, 1), 7), attention_mask=mask, past_key_values=held)
    for row, then in enumerate([(7, 7), (7,), (7, 7)]):
        whole = wanted(plain, row, 9, then)[-1]
        assert float((step.logits[row, 0] - whole).norm() / whole.norm()) < BOUNDS["float16"]
        assert held.kv.length(held.sequences[row]) == int(MASK[row, :9].sum()) + len(then)
    assert held.get_seq_length() == 12


@torch.no_grad()
def test_reset_forgets_all(plain):
    held = begun(plain)
    held.reset()
    assert held.get_seq_length() == 0 and held.kv.usage().tokens == 0
    got = plain(TOKENS, attention_mask=MASK, past_key_values=held).logits
    for row in range(3):
        check(plain, got[row], row, range(14))


@pytest.mark.parametrize("kept", [7, -5])
@torch.no_grad()
def test_crop_forgets_the_newest_columns(model, kept):
    """Across a pause, and into what came as several columns."""
    held = begun(model)
    held.crop(kept)
    columns = kept if kept > 0 else 9 + kept
    assert held.get_seq_length() == columns
    got = model(TOKENS[:, columns:], attention_mask=MASK, past_key_values=held).logits
    for row in range(3):
        check(model, got[row], row, range(columns, 14))


@torch.no_grad()
def test_a_crop_that_a_ring_forbids_changes_nothing():
    model = made(("int4_channel64", "int4"))
    tokens = TOKENS[:2].repeat(1, 10)
    held = model(tokens).past_key_values
    before = [held.kv.length(s) for s in held.sequences]
    assert not held.is_croppable
    with pytest.raises(ArgumentError, match=r"^length = .*residual ring"):
        held.crop(40)
    assert [held.kv.length(s) for s in held.sequences] == before and held.get_seq_length() == tokens.shape[1]


@pytest.mark.parametrize("rows", [[0, 0, 1, 1, 2, 2], [2, 0, 2]])
@torch.no_grad()
def test_rows_are_taken_repeated_and_reordered(model, rows):
    """Repeated ones part with their next tokens; more of them than the cache has slots."""
    held = begun(model)
    if rows == [0, 0, 1, 1, 2, 2]:
        held.batch_repeat_interleave(2)
    else:
        held.batch_select_indices(torch.tensor(rows))
    then = [tuple((3 * at + n) % 60 for n in range(2)) for at in range(len(rows))]
    got = [model(torch.tensor(then)[:, n : n + 1], past_key_values=held).logits for n in range(2)]
    for at, row in enumerate(rows):
        check(model, torch.cat(got, 1)[at], row, range(9, 11), then=then[at])
    held.crop(9)  # of the rows that there are now
    got = model(torch.full((len(rows), 1), 5), past_key_values=held).logits
    for at, row in enumerate(rows):
        check(model, got[at], row, range(9, 10), then=(5,))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda held: held.batch_select_indices(torch.tensor([3])), "indices"),
        (lambda held: held.batch_select_indices(torch.tensor([], dtype=torch.int64)), "indices"),
        (lambda held: held.batch_select_indices("x"), "indices"), (lambda held: held.crop(1.5), "tokens_to_remove"),
        (lambda held: held.batch_repeat_interleave(0), "repeats"), (lambda held: held.offload(0), "offload"),
        (lambda held: held.prefetch(0), "offload"), (lambda held: held.update(None, None, 0), "past_key_values"),
    ],
)  # fmt: skip
def test_what_a_cache_cannot_do_is_refused_by_name(plain, call, named):
    held = begun(plain, 4)
    with pytest.raises(ArgumentError, match=f"^{named}"):
        call(held)
    assert held.get_seq_length() == 4


@torch.no_grad()
def test_a_cache_of_others_keeps_its_size(plain):
    held = TerrazzoCache(plain.new_cache(2, 16), 2)
    plain(TOKENS[:2], past_key_values=held)
    with pytest.raises(CacheFullError, match="1 further sequence slots"):
        held.batch_select_indices(torch.tensor([0, 1, 1]))
    with pytest.raises(ArgumentError, match="at most 16 tokens"):
        plain(TOKENS[:2, :3], past_key_values=held)


@torch.no_grad()
def test_caches_grow_where_nobody_else_uses_them(model):
    """Past the first room, with what was stored before."""
    whole = TOKENS.repeat(1, 2)[:1, :20]
    held = model(whole[:, :15]).past_key_values
    assert held.kv.max_tokens == 16
    got = [model(whole[:, at : at + 1], past_key_values=held).logits for at in range(15, 20)]
    exact = model(whole, use_cache=False).logits[0, 15:]
    assert held.kv.max_tokens >= 20 and float((torch.cat(got, 1)[0] - exact).norm() / exact.norm()) < 6e-2


@torch.no_grad()
def test_generate_sizes_its_cache_by_the_call(plain, monkeypatch):
    """A second turn asks for its own room before it runs."""
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)
    with monkeypatch.context() as patch:
        patch.setattr(transformers_cache.PagedCache, "ask", lambda self, tokens: pytest.fail("grew"))
        first = plain.generate(TOKENS, max_new_tokens=5, num_return_sequences=2, **options | {"do_sample": True})
    held = first.past_key_values
    assert held.kv.max_tokens == 19 and len(held.sequences) == 6
    asked: list[int] = []
    monkeypatch.setattr(held, "ask", lambda tokens, ask=held.ask: asked.append(tokens) or ask(tokens))
    plain.generate(
        torch.cat([first.sequences, TOKENS[:1].expand(6, -1)], 1), past_key_values=held, max_new_tokens=3, **options
    )
    assert asked == [36] and held.kv.max_tokens == 36
    with pytest.raises(ArgumentError, match="^cache_implementation = 'quantized'.*kv="):
        plain.generate(TOKENS, max_new_tokens=2, cache_implementation="quantized")
