"""Run by an interpreter that has transformers and compressed-tensors: logits of folders, as JSON on a line of its own.

echo '{"folders": [...], "tokens": [[1, 2]]}' | python published_reader.py
"""

from __future__ import annotations

import json
import os
import sys

ANSWER = "answers: "


def main() -> None:
    asked = json.load(sys.stdin)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    import compressed_tensors
    import torch
    import transformers

    answers = {}
    for folder in asked["folders"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        try:
            with torch.no_grad():
                logits = model(torch.tensor(asked["tokens"])).logits
        except RuntimeError as error:
            answers[folder] = dict(error=f"{type(error).__name__}: {error}")
            continue
        kinds = {name: type(each).__name__ for name, each in model.named_modules() if name.endswith("down_proj")}
        answers[folder] = dict(logits=logits.float().tolist(), kinds=kinds)
    versions = {each.__name__: each.__version__ for each in (transformers, compressed_tensors)}
    print("\n" + ANSWER + json.dumps(dict(folders=answers, versions=versions)), flush=True)


if __name__ == "__main__":
    main()
