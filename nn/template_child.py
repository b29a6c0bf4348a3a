"""The process that fills in chat templates for `templates.py`, within bounds: a script that imports transformers alone.

It reads and writes messages of eight bytes for their length and then JSON. A template is a program of somebody else's:
jinja2's sandbox keeps it from the process, and the bounds keep it from the machine.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
from typing import Any, BinaryIO

HEAD = struct.Struct("<Q")
Json = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


def read(stream: BinaryIO) -> Json:
    """The next message, None at the end."""
    head = stream.read(HEAD.size)
    return json.loads(stream.read(*HEAD.unpack(head))) if len(head) == HEAD.size else None


def answer(asked: dict[str, Any]) -> dict[str, str]:
    """The text of one chat, or what is wrong with its template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        made = render_jinja_template(
            conversations=[asked["messages"]], chat_template=asked["template"], add_generation_prompt=True,
            **asked["facts"],
        )  # fmt: skip
        (text,) = made[0] if isinstance(made, tuple) else made
        if len(text) > asked["most"]:
            return {"error": f"it wrote {len(text)} characters, and at most {asked['most']} are taken"}
        return {"text": text}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # whatever a template raises
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def bound(name: int, most: int) -> None:
    """Lower a limit of this process."""
    held = resource.getrlimit(name)[1]
    resource.setrlimit(name, (most if held == resource.RLIM_INFINITY else min(most, held), held))


def serve() -> None:
    """Answer until nobody asks."""
    import transformers.utils.chat_template_utils  # noqa: F401  # before the memory is bounded

    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    for name, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0)):
        bound(name, most)
    while (asked := read(sys.stdin.buffer)) is not None:
        bound(resource.RLIMIT_AS, mapped + asked["bytes"])
        used = resource.getrusage(resource.RUSAGE_SELF)
        bound(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + asked["seconds"])
        said = json.dumps(answer(asked)).encode()
        sys.stdout.buffer.write(HEAD.pack(len(said)) + said)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]
    serve()
