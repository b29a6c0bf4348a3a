r"""Run by an interpreter that has llm-compressor, in a process of its own: quantizes a float folder to another one.

It imports nothing of terrazzo, which that environment need not have. What is asked for is JSON on standard input:
`folder`, `out`, `method`, `group` (a config group of compressed-tensors), `ignore`, `tokens` [sequences, length],
`dtype`, `trust`, `shard` (size of a file) and `iterations` (of AutoRound). Lines on standard output that begin with
ANSWER say how far it is, with the relative error of each layer's weight.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ANSWER = "quantizer: "
METHODS = ("gptq", "awq", "autoround")


def say(**facts: Any) -> None:
    print(ANSWER + json.dumps(facts), flush=True)


def recipe(asked: dict[str, Any]) -> list[Any]:
    """Modifiers of a method, and around the one that quantizes those that watch it."""
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor.modifiers import Modifier
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    before: dict[str, Any] = {}

    def quantized(state: Any, modules: Any) -> list[tuple[str, Any]]:
        chosen = set(modules)
        named = [(name, each) for name, each in state.model.named_modules() if each in chosen]
        return [(name, each) for name, each in named if getattr(each, "quantization_scheme", None) is not None]

    class Before(Modifier):
        """Keeps the weights of the layers at hand as they are before they are rounded."""

        def on_initialize(self, state: Any, **more: Any) -> bool:
            return True

        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any = (), **more: Any) -> None:
            before.clear()
            before.update({name: each.weight.detach().clone() for name, each in quantized(state, modules)})

    class After(Modifier):
        """Tells the error that rounding them made, and that they are done."""

        layer: int = 0

        def on_initialize(self, state: Any, **more: Any) -> bool:
            return True

        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any = (), **more: Any) -> None:
            from compressed_tensors.quantization.lifecycle.forward import forward_quantize

            errors = {}
            for name, each in quantized(state, modules):
                weight, scheme = before[name].double(), each.quantization_scheme
                made = forward_quantize(each, each.weight.detach(), "weight", scheme.weights)
                norm = float(weight.norm())
                errors[name] = float((made.double() - weight).norm()) / norm if norm else 0.0
            self.layer += bool(modules)
            say(layer=self.layer, errors=errors)

        def on_finalize(self, state: Any, **more: Any) -> bool:
            return True

    scheme = QuantizationScheme(**asked["group"])
    given = {"config_groups": {"group_0": scheme}, "ignore": asked["ignore"]}
    method = {"gptq": GPTQModifier, "autoround": AutoRoundModifier}.get(asked["method"], QuantizationModifier)
    first = [AWQModifier(duo_scaling="both")] if asked["method"] == "awq" else []
    more = {"iters": asked["iterations"]} if asked.get("iterations") and asked["method"] == "autoround" else {}
    return [*first, Before(), method(**given, **more), After()]


def main() -> None:
    asked = json.load(sys.stdin)
    os.environ |= {name: "1" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    if not torch.accelerator.is_available():  # llm-compressor 0.14 pins memory there, which torch refuses
        IntermediatesCache.pin_memory = lambda self, *given, **more: None
    options = dict(local_files_only=True, use_safetensors=True, trust_remote_code=asked["trust"])
    model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=getattr(torch, asked["dtype"]), **options)
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in torch.tensor(asked["tokens"])]
    oneshot(
        model=model, recipe=recipe(asked), dataset=DataLoader(rows, batch_size=1), num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]["input_ids"]), trust_remote_code_model=asked["trust"], pipeline="sequential",
    )  # fmt: skip
    model.save_pretrained(asked["out"], save_compressed=True, max_shard_size=asked["shard"])
    say(done=True)


if __name__ == "__main__":
    main()
