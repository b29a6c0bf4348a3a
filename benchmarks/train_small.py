"""A small Llama trained from scratch on text and Python sources: weights that no format has rounded before.

    python -m benchmarks.train_small DATA OUT                    27M parameters, head_dim 64; a minute on one GPU
    python -m benchmarks.train_small DATA OUT --size 110m --code --tasks --steps 0 --budget 420
    python -m benchmarks.train_small DATA OUT --steps 20 --layers 2      a trial on a CPU

OUT becomes a Hugging Face folder (f16 safetensors, byte-level BPE). Trained on: the speeches, the first four fifths of
the novel and of the news of benchmarks.accuracy_data; `held_out` gives the rest. `--code` adds the Python sources of
this interpreter's packages, whose list is hashed into training.json; every 32nd file is OUT/code.txt instead, which no
step reads. `--tasks` mixes in items of benchmarks.tasks, and a quarter of the steps has windows of LONG tokens.
The seed fixes data order and initial weights; two GPUs of one kind need not give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks import tasks

TEXTS = ("news", "novel", "speeches")
WINDOW, LONG = 512, 4096
SIZES = {"27m": (4096, 512, 1536, 8, 2), "110m": (8192, 768, 3072, 12, 3)}
"""Vocabulary, hidden, intermediate, layers, query heads of a kv head."""
CODE_BYTES, CODE_SHARE, TASK_SHARE = 200_000_000, 0.7, 0.15
"""Sources read at most; the shares of code, and of rows of items, among the rows of a step."""
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


def python_sources(root: Path, most: int = CODE_BYTES) -> tuple[list[str], list[str], str]:
    """(texts to train on, held-out texts, SHA-256 of the list of files) of the packages below `root`, in the order of
    their paths, as far as `most` bytes go. The list has each file's path and its SHA-256."""
    kept: tuple[list[str], list[str]] = ([], [])
    listed, size = hashlib.sha256(), 0
    for index, path in enumerate(sorted(root.rglob("*.py"))):
        data = path.read_bytes()
        size += len(data)
        if size > most:
            break
        listed.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(data).hexdigest()}\n".encode())
        kept[index % 32 == 31].append(data.decode("utf-8", "replace"))
    return *kept, listed.hexdigest()


def train_tokenizer(parts: list[str], vocabulary: int, marks: tuple[str, ...] = ()):
    """A byte-level BPE tokenizer of transformers; the same text gives the same tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *marks]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])


def make_config(size: str, head_dim: int, layers: int | None = None):
    """LlamaConfig of one of SIZES: as many query heads as fill the hidden size."""
    from transformers import LlamaConfig

    vocabulary, hidden, ffn, depth, group = SIZES[size]
    heads = hidden // head_dim
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=heads // group,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


class Rows:
    """(tokens, labels) of a step after another, int64 [rows, window].

    Args:
        streams: tokens of each kind of text, and the share of rows that is cut from it. made: items' makers, or None.
    """

    def __init__(self, streams, made: tasks.Tasks | None, batch: int, seed: int, device: str) -> None:
        import torch

        self.streams = [(ids.to(device), share) for ids, share in streams]
        self.made, self.batch, self.device = made, batch, device
        self.order = torch.Generator().manual_seed(seed)

    def __call__(self, step: int):
        import torch

        window = LONG if self.made and step % 4 == 3 else WINDOW
        rows = max(1, self.batch * WINDOW // window)
        items = max(1, round(rows * TASK_SHARE)) if self.made else 0
        parts, left = [], rows - items
        for index, (ids, share) in enumerate(self.streams):
            count = left if index == len(self.streams) - 1 else min(left, round((rows - items) * share))
            left -= count
            at = torch.randint(len(ids) - window, (count, 1), generator=self.order).to(self.device)
            cut = ids[at + torch.arange(window, device=self.device)]
            parts.append((cut, cut))
        if items:
            task = ("copy", "lookup", "close")[step // 4 % 3] if window == WINDOW else "lookup"
            least, most = {"copy": (32, window), "lookup": (96, window), "close": (48, 192)}[task]
            size = int(torch.randint(least, most + 1, (1,), generator=self.order))
            made = self.made.packed(task, items, window, size, self.order)
            parts.append(tuple(x.to(self.device) for x in made))
        return tuple(torch.cat([part[i] for part in parts]) for i in (0, 1))


def train(rows, config, steps: int, rate: float, seed: int, device: str, budget=math.inf, log=print):
    """(LlamaForCausalLM in float32, its steps of AdamW with cosine decay, bf16 products).

    Args:
        rows: step -> (tokens, labels). budget: seconds of training, in place of `steps` where they end first: the rate
            then decays over the budget.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(device)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    start = time.time()
    for step in range(steps):
        done = max(step / steps, (time.time() - start) / budget)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 100, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        tokens, labels = rows(step)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            log(f"step {step:5d}  loss {loss.item():.3f}  {time.time() - start:5.1f} s")
    return model.eval(), step + (done < 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_small", description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of benchmarks.accuracy_data")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--size", choices=SIZES, default="27m", help="parameters")
    parser.add_argument("--head-dim", type=int, default=64, choices=(64, 128))
    parser.add_argument("--layers", type=int, help="fewer than the size has")
    parser.add_argument("--code", action="store_true", help="Python sources of this interpreter's packages, too")
    parser.add_argument("--tasks", action="store_true", help="items of benchmarks.tasks, and longer windows, too")
    parser.add_argument("--steps", type=int, default=700, help="0: as many as fit in --budget")
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of training")
    o = parser.parse_args(argv)
    if not o.steps and o.budget == math.inf:
        parser.error("--steps 0 needs --budget")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = texts(o.data)
    parts = [text if name == "speeches" else trained_on(text) for name, text in parts.items()]
    config, facts = make_config(o.size, o.head_dim, o.layers), {"size": o.size, "head_dim": o.head_dim}
    o.out.mkdir(parents=True, exist_ok=True)
    code: list[str] = []
    if o.code:
        code, held, facts["code_files"] = python_sources(Path(sysconfig.get_paths()["purelib"]))
        (o.out / "code.txt").write_text("\n".join(held), encoding="utf-8")
    tokenizer = train_tokenizer([*parts, *code[::16]], config.vocab_size, tasks.MARKS if o.tasks else ())
    streams = []
    for made, share in ((code, CODE_SHARE), (parts, 1.0)):
        if made:
            ids = tokenizer(made, verbose=False).input_ids
            streams.append((torch.cat([torch.tensor(part, dtype=torch.int64) for part in ids]), share))
    facts["tokens"] = [len(ids) for ids, _ in streams]
    print(f"{facts['tokens']} tokens to train on", flush=True)
    rows = Rows(streams, tasks.Tasks(tokenizer) if o.tasks else None, o.batch, o.seed, device)
    model, steps = train(rows, config, o.steps or 1 << 30, o.rate, o.seed, device, o.budget)
    model.half().save_pretrained(o.out)
    tokenizer.save_pretrained(o.out)
    facts |= {"seed": o.seed, "steps": steps, "batch": o.batch, "rate": o.rate, "torch": torch.__version__}
    facts |= {"parameters": sum(p.numel() for p in model.parameters()), "tasks": o.tasks}
    (o.out / "training.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"{o.out}: {facts['parameters'] / 1e6:.1f}M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
