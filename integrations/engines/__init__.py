"""What a serving engine needs of ours: packed weights of its tensors, attention over its pages, kernels in time,
settings, and a check of a model's files. Nothing here imports an engine; packages like `vllm` do.
"""
