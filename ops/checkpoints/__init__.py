"""Published checkpoints: their files, what their config says of each layer, and importers by convention.

    checkpoint = terrazzo.ops.checkpoints.Checkpoint("model/")
    checkpoint.layers()                       # {"model.layers.0.mlp.down_proj": "awq", ...}
    checkpoint.layer(name).skip               # "" or the reason why it cannot be read
    checkpoint.tensors(name, device)          # {"qweight": ..., "scales": ..., ...}
    checkpoint.others()                       # every other tensor -> what it is

Families put their own names on it: `w4a16.load_layer`, `w4a8.load_model`, ... Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = ["FORMATS", "Checkpoint", "Config", "Layer", "LayerConfig", "Model", "TensorFiles"]

if TYPE_CHECKING:
    from terrazzo.ops.checkpoints.config import Config
    from terrazzo.ops.checkpoints.conventions.base import LayerConfig
    from terrazzo.ops.checkpoints.conventions.table import FORMATS
    from terrazzo.ops.checkpoints.files import TensorFiles
    from terrazzo.ops.checkpoints.loaders import Layer, Model
    from terrazzo.ops.checkpoints.reader import Checkpoint
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "config": "Config",
            "conventions.base": "LayerConfig",
            "conventions.table": "FORMATS",
            "files": "TensorFiles",
            "loaders": "Layer Model",
            "reader": "Checkpoint",
        },
    )
