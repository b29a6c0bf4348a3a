"""What of a model would run on our kernels inside of an engine, from its files alone: without the engine, or a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from terrazzo.integrations.engines.attention import Caches
from terrazzo.integrations.engines.weights import ACTIVATIONS, Wanted
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.checkpoints.config import Config
from terrazzo.ops.model_layers import Linear, joined, split
from terrazzo.ops.model_requests import Weights, of_folder
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import BY_RECORD

_PARTS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj", "w1": "w13", "w3": "w13"}  # fmt: skip
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(\w+)")


@dataclass(frozen=True)
class Row:
    """Layers of one kind.

    Attributes:
        leaf: last part of their names, as the engine joins them. count: how many. n, k: of a rank's shard.
        experts: of each layer, 0 for none. operator: ours, "w4a16", "w4a8", "w4a8_fp8", or "" for the engine's own.
        reason: why it is not ours, or "". example: one of the names.
    """

    leaf: str
    count: int
    n: int | None
    k: int | None
    experts: int
    operator: str
    reason: str
    example: str


@dataclass(frozen=True)
class Checker:
    """What an engine asks our kernels for.

    Attributes:
        name: of the engine. methods: of quantization, as a config says it. caches: cache dtypes that we serve.
        alone: products of compressed-tensors' layers that it asks for where activations keep 16 bits.
    """

    name: str
    methods: tuple[str, ...]
    caches: Caches
    alone: tuple[Product, ...] = ()

    def check(self, folder: str | Path, target: Target, ranks: int = 1) -> list[Row]:
        """The linear layers and experts of a Hugging Face folder.

        Args:
            target: what the engine runs on. ranks: of tensor parallelism.

        Raises:
            ArgumentError: no folder, or one that tells neither layers nor an architecture, or that Terrazzo packed.
        """
        self._check_not_packed(Path(folder))
        model = of_folder(folder, Weights(), all_skipped=True)
        config = Config.of_folder(Path(folder))
        heads = model.architecture.kv_heads if model.architecture is not None else ranks
        layers = joined(split(model.layers, ranks, heads))
        every = {name for names in layers.kinds.values() for name in names}
        rows = []
        for kind, names in layers.kinds.items():
            whole = [name for name in dict.fromkeys(names) if not _is_part(name, every)]
            if whole:
                reason = self._refusal(kind, config, whole[0], model.dtype, target) if model.stored else self._float()
                operator, count = "" if reason else kind.operator, model.times(whole)
                rows.append(Row(kind.leaf, count, kind.n, kind.k, kind.experts, operator, reason or "", whole[0]))
        for reason in dict.fromkeys(layers.skipped.values()):
            names = [name for name, why in layers.skipped.items() if why == reason and name != "attention"]
            if names:
                leaf = names[0].rpartition(".")[2]
                rows.append(Row(leaf, len(names), None, None, 0, "", reason, names[0]))
        return rows

    def cache_refusals(self, folder: str | Path, target: Target) -> dict[str, str]:
        """Cache dtypes -> why our attention does not take them for a folder's model, "" where it does."""
        model = of_folder(folder, Weights(), all_skipped=True)
        return {} if model.architecture is None else self.caches.refusals(model.architecture, model.dtype, target)

    def _float(self) -> str:
        return f"weights are not quantized: `terrazzo quantize FOLDER -o OUT` makes a folder for {self.name}"

    def _check_not_packed(self, folder: Path) -> None:
        """Engines have no method for packed weights."""
        try:
            Config.of_folder(folder)
        except ArgumentError as error:
            if (error.argument, error.value) != ("quant_method", "terrazzo"):
                raise
            name, read = self.name, "terrazzo.load alone reads them"
            constraint = f"says that Terrazzo packed these layers: {read}, and {name} does not"
            remedy = (
                f"give {name} a folder in AWQ, GPTQ or compressed-tensors, as `terrazzo quantize` writes them of the "
                f"float model; outside of {name} `terrazzo generate` runs this one, and terrazzo.prepare compiles its "
                "kernels"
            )
            raise ArgumentError("quant_method", "terrazzo", constraint, remedy) from None

    def _refusal(self, kind: Linear, config: Config, name: str, dtype: str, target: Target) -> str | None:
        own = f"{self.name} quantizes the activations of these layers, and has kernels of its own for that"
        if config.method not in self.methods:
            return f"{self.name} has no kernels to choose from for {config.method or 'this format'}"
        product = BY_RECORD[kind.operator]
        if product in self.alone:
            return None if config.method == "compressed-tensors" else own
        stated = config.layer(_of_checkpoint(name))
        if product.direct:
            return own
        activations = next((key for key, operator in ACTIVATIONS.items() if operator == kind.operator), None)
        if activations is None:
            return f"{self.name} has no method for {kind.operator}"
        wanted = Wanted(
            n=kind.n, k=kind.k, full_k=kind.k, group_size=kind.group_size,
            zero_points=config.method != "gptq" and not kind.symmetric and product.wide,
            act_order=bool(stated.desc_act), dtype=dtype, activations=activations,
            weight="uint4b8" if kind.symmetric or not product.wide else "uint4", experts=kind.experts,
        )  # fmt: skip
        if config.method == "gptq" and product.wide and stated.symmetric is False:
            return f"{self.name} reads symmetric GPTQ only"
        return wanted.refusal(target)


def _is_part(name: str, every: set[str]) -> bool:
    """Whether an engine makes a larger layer of it: qkv, gate_up, or all experts of a layer."""
    prefix, _, leaf = name.rpartition(".")
    if leaf in _PARTS and f"{prefix}.{_PARTS[leaf]}" in every:
        return True
    found = _EXPERT.fullmatch(name)
    if found is not None:
        return f"{found[1]}.{found[2]}" in every
    stack = f"{prefix}.{_PARTS[leaf]}" if leaf in _PARTS else ""
    return bool(prefix.endswith("experts") and stack in every)


def _of_checkpoint(name: str) -> str:
    """A name that the checkpoint has, of what an engine joined."""
    name = name.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj").replace("w13", "w1")
    return re.sub(r"\bexperts\.(?!\d)", "experts.0.", name)
