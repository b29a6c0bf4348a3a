"""A folder in, text out.

    python examples/generate.py Llama-3.1-8B-Instruct-AWQ-INT4/ "Why is the sky blue?"
    torchrun --nproc-per-node 2 examples/generate.py Llama-3.1-70B-Instruct-AWQ-INT4/ "Why is the sky blue?"

The folder is one of Hugging Face's: 4-bit (AWQ, GPTQ, compressed-tensors, QServe) or 16-bit, with a chat template.
"""

import sys

import terrazzo

folder, prompt = (*sys.argv[1:], "Why is the sky blue?")[:2]
ranks = terrazzo.nn.TensorParallel.from_torchrun()  # None for one process
model = terrazzo.load(folder, kv="int8", tensor_parallel=ranks)  # quantize="w4a16-g128" packs 16-bit weights
terrazzo.generate(model, prompt, chat=True, max_new_tokens=64, stream=True)  # printed while it comes, by one rank
