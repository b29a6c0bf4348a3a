"""A folder as models are published in: random weights, a tokenizer of single bytes, a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END, VOCABULARY = 256, 258


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte, so that most characters beyond ASCII take several; 256 ends a text, 257 is padding."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary |= {"</s>": END, "<pad>": END + 1}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    return fast


def write_folder(folder: Path) -> Path:
    """A Llama of one layer in 16 bits, its config and its tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=VOCABULARY, eos_token_id=END, pad_token_id=END + 1, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
