"""Chat templates are programs of others: what they take is bounded, and what they write is what transformers writes."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mutation  # noqa: E402
import terrazzo  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import templates  # noqa: E402
from tiny_text import byte_tokenizer, write_folder  # noqa: E402

CHAT = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "déjà vu \N{GRINNING FACE} \ud800"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1.5, "y": (1, 2)}}]},
]
PUBLISHED = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama": "{{ bos_token }}{% for m in messages if m.content is string %}[INST] {{ m['content'] | trim }} [/INST]"
    "{{ eos_token }}{% endfor %}",
    "tools": "{%- for m in messages %}{%- if m.tool_calls %}"
    "{{ m.tool_calls | tojson(indent=2) }}{% endif %}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "spans": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "names": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}{{ tools is none }}{{ missing }}{{ dict(a=1) }}",
}
NAMED = {
    "no syntax": "{% for %}", "an unknown filter": "{{ messages | nope }}", "an attribute of nothing": "{{ a.b.c }}",
    "its own refusal": "{{ raise_exception('roles must take turns') }}", "a division": "{{ 1 // 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "a way out": "{{ messages.__class__.mro() }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
}  # fmt: skip
TOO_MUCH = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 10) }}", "spaces": "{{ [[1]] | tojson(indent=10 ** 9) }}",
    "a width": "{{ '%2000000000d' % 1 }}",
    "a product": "{{ 'a' * 10 ** 11 }}", "text": "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "a list": "{% set ns = namespace(l=[0]) %}{% for a in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_tokenizer()
    made.bos_token = "<s>"
    return made


def filled(tokenizer, template, messages=CHAT):
    tokenizer.chat_template = template
    return templates.chat_text(tokenizer, messages)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_chat_is_what_transformers_makes_of_it(tokenizer, name):
    found = filled(tokenizer, PUBLISHED[name])
    assert found == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) and found


@pytest.mark.parametrize("kind", NAMED)
def test_a_template_that_fails_is_a_named_error(tokenizer, kind):
    with pytest.raises(ArgumentError, match="chat template cannot be filled in .*pass chat=False"):
        filled(tokenizer, NAMED[kind])


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_a_template_takes_is_bounded(tokenizer, monkeypatch, kind):
    monkeypatch.setattr(templates, "SECONDS", 1)
    before = time.monotonic()
    with pytest.raises(ArgumentError, match=r"cannot be filled in \(it (took more than|needs too much|wrote)"):
        filled(tokenizer, TOO_MUCH[kind])
    assert time.monotonic() - before < 30
    assert filled(tokenizer, "{{ messages[0].role }}") == "system"  # the next chat is served


@pytest.mark.parametrize("template", [5, ["{{ 1 }}"], {"other": "{{ 1 }}"}, {"default": 5}], ids=str)
def test_a_template_that_is_no_text_is_named(tokenizer, template):
    with pytest.raises(ArgumentError, match="chat"):
        filled(tokenizer, template)


def test_threads_and_forks_have_their_own_answers(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    ask = lambda text: templates.chat_text(tokenizer, [{"role": "user", "content": text}])
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, map(str, range(200)))) == list(map(str, range(200)))
    if not (child := os.fork()):
        os._exit(0 if ask("of the child") == "of the child" else 1)
    assert ask("of the parent") == "of the parent" and os.waitpid(child, 0)[1] == 0


def test_a_process_that_was_killed_is_started_again(tokenizer):
    assert filled(tokenizer, "{{ 1 }}") == "1"
    os.kill(templates._process.process.pid, signal.SIGKILL)
    templates._process.process.wait()
    assert filled(tokenizer, "{{ 2 }}") == "2"


def test_a_chat_takes_milliseconds_after_the_first(tokenizer):
    filled(tokenizer, PUBLISHED["chatml"])
    taken = []
    for _ in range(20):
        before = time.perf_counter()
        filled(tokenizer, PUBLISHED["chatml"], CHAT[:2])
        taken.append(time.perf_counter() - before)
    assert min(taken) < 0.02


def test_a_folders_template_is_bounded_where_text_is_generated(tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 1)
    folder = write_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TOO_MUCH["loops"])
    with pytest.raises(ArgumentError, match="it took more than 1 s"):
        terrazzo.generate(folder, "Hi", chat=True, max_new_tokens=1, load=dict(device="cpu"))


def test_damaged_templates_are_refused_or_filled_in(tokenizer, monkeypatch, tries):
    monkeypatch.setattr(templates, "SECONDS", 1)
    good, refused = list(PUBLISHED.values()), 0
    words = (
        "{%",
        "%}",
        "{{",
        "}}",
        "|",
        "(",
        ")",
        "for",
        "range(9)",
        "*",
        "10",
        ".",
        "messages",
        "'",
        "tojson",
        "loop",
    )
    for random in tries(200):
        text = random.choice(good)
        for _ in range(random.randrange(1, 4)):
            at, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
            part = random.choice((*words, text[at:end], ""))
            text = text[:at] + part + text[random.choice((at, min(end, at + 5))) :]
        refused += not mutation.survives(lambda text=text: filled(tokenizer, text))
    assert refused > 20
