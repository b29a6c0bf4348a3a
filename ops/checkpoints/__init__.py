"""Published checkpoints: their files, what their config says of each layer, and importers by convention.

    checkpoint = terrazzo.ops.checkpoints.Checkpoint("model/")
    checkpoint.layers()                       # {"model.layers.0.mlp.down_proj": "awq", ...}
    checkpoint.layer(name).skip               # "" or the reason why it cannot be read
    checkpoint.tensors(name, device)          # {"qweight": ..., "scales": ..., ...}
    checkpoint.others()                       # every other tensor -> what it is

Families put their own names on it: `w4a16.load_layer`, `w4a8.load_model`, ... Names are resolved on first use.
"""

from __future__ import annotations

from terrazzo.ops import lazy

_HOME = {
    "Checkpoint": "reader",
    "TensorFiles": "files",
    "Config": "config",
    "LayerConfig": "config",
    "FORMATS": "config",
    "Family": "loaders",
    "Layer": "loaders",
    "Model": "loaders",
}

__all__, __getattr__, __dir__ = lazy.names(__name__, _HOME)
