"""Sentences of a Markdown document, as a reader meets them: code, tables' numbers and links' addresses are no words."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_WORDS = 25
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|no|fig|sec|eq|al)\.", re.IGNORECASE)
GENERATED = re.compile(r"<!-- generated: (\S+) -->.*?<!-- end: \1 -->", re.DOTALL)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Pairs (line of its paragraph, sentence). The end of a paragraph, list item or table cell ends one, too."""
    text = GENERATED.sub(lambda found: "\n" * found.group().count("\n"), text)
    block: list[str] = []
    begun, fenced = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.strip()
        if bare.startswith(("```", "~~~")):
            fenced = not fenced
            bare = ""
        elif fenced or (line.startswith("    ") and not block):
            continue
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare):
                yield from ((number, it) for it in _split(cell))
            bare = ""
        item = re.match(r"([-*+]|\d+\.)\s|#|!!!|\?\?\?|===|<", bare)
        if (not bare or item) and block:
            yield from ((begun, it) for it in _split(" ".join(block)))
            block = []
        if bare and not bare.startswith(("#", "<")):
            begun = begun if block else number
            block.append(re.sub(r"^([-*+]|\d+\.)\s+", "", bare))


def _split(text: str) -> list[str]:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = ABBREVIATIONS.sub(lambda found: found.group(1), text)
    parts = re.split(r"(?<=[.?!])[)\"'*]*\s+|(?<=[.?!]\*\*)\s+", text)
    return [part for part in (part.strip() for part in parts) if part]


def words(sentence: str) -> int:
    """How many words: tokens with a letter, and numbers, but no marks."""
    return len(re.findall(r"[^\W_](?:[\w'’./,%+-]*\w)?", sentence))


def clauses(doc: str) -> Iterator[str]:
    """Of a docstring's sentences, between semicolons and colons, without what stands in parentheses; no formulas."""
    for _, sentence in sentences(doc):
        parts = re.split(r"[;:](?=\s)", re.sub(r"\([^()]*\)", "", sentence))
        yield from (part for part in parts if not re.search(r"[\[=*]", part))


def too_long(text: str) -> list[str]:
    """Lines "12: 31 words: ..." of sentences above `MOST_WORDS`."""
    found = ((line, words(it), it) for line, it in sentences(text))
    return [f"{line}: {count} words: {it[:90]}" for line, count, it in found if count > MOST_WORDS]
