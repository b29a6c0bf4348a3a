"""A small Llama trained from scratch on benchmarks.accuracy_data's text: weights that no format has rounded before.

    python -m benchmarks.train_small DATA OUT                    head_dim 64, 27M parameters; a minute on one GPU
    python -m benchmarks.train_small DATA OUT --head-dim 128
    python -m benchmarks.train_small DATA OUT --steps 20 --layers 2      a trial on a CPU

OUT becomes a Hugging Face folder (f16 safetensors, byte-level BPE of 4096 tokens). Trained on: the speeches, the first
four fifths of the novel and of the news; `held_out` gives the rest. Sizes are multiples of 256. The seed
fixes data order and initial weights; two GPUs of one kind need not give the same bits, as atomic sums of torch differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

TEXTS = ("news", "novel", "speeches")
VOCABULARY, WINDOW = 4096, 512
HELD_OUT = 5
"""One part in so many of news and novel, the last, is never trained on."""


def texts(data: Path) -> dict[str, str]:
    """Name -> text of a folder of benchmarks.accuracy_data."""
    return {name: (data / f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS}


def trained_on(text: str) -> str:
    return text[: len(text) - len(text) // HELD_OUT]


def held_out(text: str) -> str:
    """The part of news or novel that no model of this file was trained on."""
    return text[len(text) - len(text) // HELD_OUT :]


def train_tokenizer(parts: list[str], vocabulary: int = VOCABULARY):
    """A byte-level BPE tokenizer of transformers; the same text gives the same tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])


def make_config(head_dim: int, layers: int, hidden: int = 512, ffn: int = 1536):
    """LlamaConfig: as many query heads as fill `hidden`, half as many kv heads."""
    from transformers import LlamaConfig

    heads = hidden // head_dim
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


def train(ids, config, steps: int, batch: int, rate: float, seed: int, device: str, budget=math.inf, log=print):
    """(LlamaForCausalLM in float32, its steps of AdamW with cosine decay, bf16 products).

    Args:
        ids: [tokens] of the text to train on. budget: seconds after which the last step is taken, `steps` or not.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(device)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    warm = max(1, steps // 20)
    share = lambda step: min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    ids, order = ids.to(device), torch.Generator().manual_seed(seed)
    start = time.time()
    for step in range(steps):
        at = torch.randint(len(ids) - WINDOW, (batch, 1), generator=order).to(device)
        rows = ids[at + torch.arange(WINDOW, device=device)]
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            log(f"step {step:5d}  loss {loss.item():.3f}  {time.time() - start:5.1f} s")
            if time.time() - start > budget:
                log("the budget is spent")
                break
    return model.eval(), step + 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_small", description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of benchmarks.accuracy_data")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--head-dim", type=int, default=64, choices=(64, 128))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of training; fewer steps then")
    o = parser.parse_args(argv)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = texts(o.data)
    parts = [text if name == "speeches" else trained_on(text) for name, text in parts.items()]
    tokenizer = train_tokenizer(parts)
    ids = torch.cat([tokenizer(text, return_tensors="pt").input_ids[0] for text in parts])
    print(f"{len(ids)} tokens to train on, {o.steps * o.batch * WINDOW / len(ids):.1f} times each", flush=True)
    facts = (o.steps, o.batch, o.rate, o.seed, device, o.budget)
    model, steps = train(ids, make_config(o.head_dim, o.layers), *facts)
    model.half().save_pretrained(o.out)
    tokenizer.save_pretrained(o.out)
    facts = {"seed": o.seed, "steps": steps, "batch": o.batch, "rate": o.rate, "torch": torch.__version__}
    (o.out / "training.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"{o.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
