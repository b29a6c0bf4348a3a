"""Tensors of a checkpoint that no module reads: each is refused by name, unless it is known to change nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from terrazzo.lowering.errors import ArgumentError

HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.\w+$"  # angles, which the config states
    r"|\.self_attn\.((attn|[qkv]_proj)\.)?(q|k|v|kv|prob|attn|output)_(scale|zero_point)$"  # of caches in 8 bits
    r"|^(model\.)?mtp[._]"  # layers that only guess further tokens
)
"""Tensors that a model computes the same without."""


class Leftovers:
    """Tensors by the decoder layer that they belong to.

    Args:
        kind: the model's `model_type`, for messages. names: of all tensors. root: what stands before "layers.0.".
        heads: names of the head. layers: how many the config has. cut: whether the caller's own config may have fewer
            layers than the tensors.
    """

    def __init__(
        self, kind: str, names: Iterable[str], root: str, heads: Collection[str], layers: int, cut: bool
    ) -> None:
        self.kind, self.layers = kind, layers
        self.of_layer: dict[int, list[str]] = {}
        self.others: list[str] = []
        place = re.compile(rf"{re.escape(root)}layers\.(\d+)\.")
        known = (f"{root}embed_tokens.weight", f"{root}norm.weight", *(f"{head}." for head in heads))
        for name in names:
            if root not in ("", "model.") and not name.startswith(root):  # of the parts that see or hear
                continue
            if HARMLESS.search(name) or name.startswith(known):
                continue
            found = place.match(name)
            index = None if found is None else int(found[1])
            if index is not None and index < layers:
                self.of_layer.setdefault(index, []).append(name)
            elif index is None or not cut:
                self.others.append(name)

    def check(self) -> None:
        """Refuse tensors that belong to no part of the model.

        Raises:
            ArgumentError: names one of them.
        """
        self._refuse(self.others)

    def check_layer(self, index: int, read: Collection[str]) -> None:
        """Refuse tensors of a decoder layer that are not in `read`.

        Raises:
            ArgumentError: names one of them.
        """
        self._refuse([name for name in self.of_layer.pop(index, ()) if name not in read])

    def _refuse(self, names: list[str]) -> None:
        if names:
            more = f", nor are {len(names) - 1} others" if len(names) > 1 else ""
            model = f"a {self.kind} with num_hidden_layers = {self.layers}"
            constraint = f"is read by no part of {model}{more}: it may change what the model computes"
            remedy = "take the config.json of this checkpoint; merge adapters into their model first"
            raise ArgumentError("name", names[0], constraint, remedy)
