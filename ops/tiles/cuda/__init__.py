"""The CUDA text of all tile programs; `text` says how a program asks for it."""
