"""What the host side asks of a kind of linear layer: facts of records, plans of kernels, the kernels of a model's."""
