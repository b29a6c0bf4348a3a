"""Chat templates, which are programs of a model's folder: filled in by a process with bounds on time, memory and text.

A thread cannot be stopped in a loop of jinja2's, and no signal reaches one; a process can be. It starts with the first
chat, imports no torch, and stays: a chat then takes about a millisecond.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.worker import search_path
from terrazzo.nn import foreign, template_child
from terrazzo.nn.template_child import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS, BYTES, CHARACTERS = 5, 1 << 30, 64 << 20
"""What a template may take: of a core's time, of memory, and of text that it writes."""
WAIT_S = 60.0
"""Until a process that does not answer is given up, whatever it does."""
REMEDY = "pass chat=False, or a tokenizer with another chat template"


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a chat in the tokenizer's template, with the beginning of the answer.

    Raises:
        ArgumentError: no template, or one that is damaged, refuses the messages, or takes more than its bounds.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("chat", True, "the tokenizer has no chat template", "pass chat=False")
    name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
    with foreign.explained("chat", name, "its chat template cannot be filled in", REMEDY):
        if not _usual(tokenizer):  # of code that the caller has chosen
            return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        template, facts = tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map)
        if not isinstance(template, str):
            raise ArgumentError("chat", name, f"its chat template is no text but a {type(template).__name__}", REMEDY)
        plain = [{key: value for key, value in it.items() if value is not None} for it in messages]
        asked = {"template": template, "messages": plain, "facts": facts}
        asked |= {"seconds": SECONDS, "bytes": BYTES, "most": CHARACTERS}
        said = _process.ask(json.dumps(asked, default=_plain).encode())
    if "error" in said:
        raise ArgumentError("chat", name, f"its chat template cannot be filled in ({said['error']})", REMEDY)
    return said["text"]


def _usual(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether transformers fills in the template of this tokenizer."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", None)
    own = getattr(type(tokenizer), "apply_chat_template", None)
    return base is not None and isinstance(tokenizer, base) and own is base.apply_chat_template


def _plain(value: object) -> Json:
    """What JSON does not know: mappings, and else the name of a type, as transformers shows it to templates."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


class _Process:
    """The process of `template_child`, started when it is asked, and again after it died. Threads take turns."""

    def __init__(self) -> None:
        self.lock, self.process = threading.Lock(), None

    def ask(self, message: bytes) -> dict[str, str]:
        """Its answer, or {"error": how it ended}."""
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                self.process.stdin.write(template_child.HEAD.pack(len(message)) + message)
                self.process.stdin.flush()
                said = self._answer(time.monotonic() + WAIT_S)
            except BrokenPipeError:
                said = None
            except BaseException:  # of a program that is stopped: what comes next is no answer to another question
                self._kill()
                raise
            return {"error": self._kill()} if said is None else json.loads(said)

    def _start(self) -> None:
        command = [sys.executable, "-I", template_child.__file__, *search_path()]
        environment = {**os.environ, "USE_TORCH": "0", "CUDA_VISIBLE_DEVICES": ""}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, bufsize=0, **pipes)

    def _answer(self, until: float) -> bytes | None:
        """The next message, None at its end or after the time."""
        got, size = b"", None
        while size is None or len(got) < size:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            part = self.process.stdout.read(1 << 20) if ready else b""
            if not part:
                return None
            got += part
            if size is None and len(got) >= template_child.HEAD.size:
                (size,) = template_child.HEAD.unpack(got[: template_child.HEAD.size])
                got = got[template_child.HEAD.size :]
        return got

    def _kill(self) -> str:
        """Stop it; how it ended."""
        process, self.process = self.process, None
        if process is None:
            return "its process did not start"
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)  # of one that died by itself
        ended = process.poll()
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        if ended == -signal.SIGXCPU or ended is None:
            return f"it took more than {SECONDS} s"
        return f"its process ended with status {ended}"

    def forget(self) -> None:
        """After a fork: the process is the parent's."""
        self.lock, self.process = threading.Lock(), None


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)
atexit.register(lambda: _process.process and _process._kill())
