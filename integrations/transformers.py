"""transformers' `from_pretrained` gives the models of `terrazzo.load`.

    import terrazzo.integrations.transformers as terrazzo_transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)  # that a Terrazzo model's save_pretrained wrote
    config = terrazzo_transformers.TerrazzoConfig(quantize="w4a16-g128", kv="int8")
    model = AutoModelForCausalLM.from_pretrained(float_folder, quantization_config=config)

Importing this module imports transformers and registers config and quantizer with it under "terrazzo", by its public
functions; none of its modules is changed. Attention, experts and cache are part of the model (see `terrazzo.load`).
For architectures that `terrazzo.load` does not know, attention and experts are registered as functions, too:
`pack`, `new_cache` and `model.set_attn_implementation("terrazzo")`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError, ToolchainError

OLDEST = (5, 5)
"""The first release of transformers whose interfaces are used."""


def _check(found: str) -> None:
    """Refuse a release that is too old.

    Raises:
        ToolchainError: with what to install.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ToolchainError(f"transformers {found} is older than {wanted}; pip install 'transformers>={wanted}'")


try:
    import transformers as _transformers
except ImportError as error:
    reason = f"this module needs transformers ({error}); pip install 'terrazzo[transformers]'"
    raise ToolchainError(reason) from error
_check(_transformers.__version__)

import torch  # noqa: E402
from terrazzo.integrations import transformers_functions as functions  # noqa: E402
from terrazzo.integrations.transformers_functions import FunctionCache, new_cache, pack  # noqa: E402
from terrazzo.nn import foreign  # noqa: E402
from terrazzo.nn.causal import class_of  # noqa: E402
from terrazzo.nn.folders import METHOD, VERSION  # noqa: E402
from terrazzo.ops.weights import path_of  # noqa: E402
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

if TYPE_CHECKING:
    from terrazzo.nn.causal import Causal
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "PUBLISHED", "FunctionCache", "TerrazzoConfig", "TerrazzoQuantizer", "config_of", "new_cache", "pack", "register",
    "take_over",
]  # fmt: skip

Place = str | int | torch.device
Option = str | int | tuple[str, str] | list[str] | Mapping[str, Any] | None
PUBLISHED = ("awq", "compressed-tensors", "gptq")
"""`quant_method` of folders that `take_over` can take."""


def __dir__() -> list[str]:
    return sorted(__all__)


class TerrazzoConfig(QuantizationConfigMixin):
    """What `from_pretrained(quantization_config=...)` hands on to `terrazzo.load`.

    Args:
        quantize: format for layers that the folder has in float, as "w4a16-g128"; None keeps them in 16 bits.
        kv: format of keys and values, one name or a pair; None keeps the model's dtype, or what was saved.
        format: of the folder's 4-bit layers, whatever its config says.
        options: of the quantizer. target: architecture to pack for; None the device's.
        max_tokens: of a sequence in the caches that forward makes; None takes `terrazzo.load`'s.
        version: of a saved folder's form; there alone.
        published: ignored: what a folder of another method says of itself (`terrazzo.load` reads it from the folder).
    """

    def __init__(
        self,
        quantize: str | None = None,
        kv: str | tuple[str, str] | list[str] | None = None,
        format: str | None = None,
        options: Mapping[str, Any] | None = None,
        target: str | None = None,
        max_tokens: int | None = None,
        version: int | None = None,
        quant_method: str = METHOD,
        **published: object,
    ) -> None:
        if published and quant_method == METHOD:
            known = "quantize, kv, format, options, target, max_tokens"
            name = next(iter(published))
            raise ArgumentError(name, published[name], "is no argument of TerrazzoConfig", f"it has {known}")
        self.quant_method = METHOD
        self.quantize = None if quantize is None else str(quantize)
        self.kv = list(kv) if isinstance(kv, tuple) else kv
        self.format, self.options, self.target, self.max_tokens = format, dict(options or {}), target, max_tokens
        self.version = version

    def loading(self) -> dict[str, Any]:
        """Keyword arguments of `terrazzo.load`."""
        names = ("quantize", "kv", "format", "options", "target", "max_tokens")
        found = {name: getattr(self, name) for name in names if getattr(self, name)}
        return found | ({"kv": tuple(self.kv)} if isinstance(self.kv, list) else {})


class TerrazzoQuantizer(HfQuantizer):
    """Puts the decoder, head and cache of `terrazzo.load` into the model that `from_pretrained` makes.

    transformers makes the model on meta and finds no parameter to load in it; what its folder has is read afterwards,
    layer by layer. Without a device_map the model goes to the GPU where there is one.
    """

    requires_calibration = False

    def __init__(self, quantization_config: TerrazzoConfig, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None
        self.folder: Path | None = None

    def update_device_map(self, device_map: Place | dict[str, Place] | None) -> None:
        """One device; transformers itself moves nothing."""
        places = list(dict.fromkeys(device_map.values())) if isinstance(device_map, dict) else [device_map]
        if len(places) != 1 or places[0] in ("disk", "meta"):
            constraint = "must name one device: models are not split"
            raise ArgumentError("device_map", device_map, constraint, 'pass device_map="cuda:0"')
        found = places[0]
        self.device = None if found in (None, "auto", "balanced", "sequential") else _device(found)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """16 bits: in the place of others what `terrazzo.load` takes by default."""
        self.dtype = dtype if dtype in (torch.float16, torch.bfloat16) else None
        return self.dtype or torch.float16

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: object
    ) -> None:
        if not checkpoint_files:
            remedy = "pass a folder to from_pretrained, or the tensors to terrazzo.load"
            raise ArgumentError("state_dict", None, "is not read by this quantizer, which needs files", remedy)
        if model.config.get_text_config(decoder=True) is not model.config:
            remedy = "use terrazzo.load, which takes the text model alone"
            raise ArgumentError("model", type(model).__name__, "has parts beside its text model", remedy)
        self.folder = Path(checkpoint_files[0]).parent
        for name, _ in list(model.named_children()):
            setattr(model, name, torch.nn.Module())
        model.all_tied_weights_keys = {}
        held = model._keys_to_ignore_on_load_unexpected  # a list or a set, by release
        model._keys_to_ignore_on_load_unexpected = [".*"] if held is None else type(held)([".*"])

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> Causal:
        from terrazzo.nn.loading import load
        from terrazzo.nn.reading import name_ends, weights_name

        stated: TerrazzoConfig = self.quantization_config
        config = deepcopy(model.config)
        del config.quantization_config
        if stated.version is not None:
            config.quantization_config = {"quant_method": METHOD, "version": stated.version, "kv": stated.kv}
        written = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        asked = None if written.get("dtype", written.get("torch_dtype")) == weights_name(self.dtype) else self.dtype
        made = load(self.folder, config=config, device=self.device, dtype=asked, **stated.loading())
        model.__class__ = class_of(type(model))
        model.model, model.lm_head = made.model, made.lm_head
        model.config.dtype, model.name_or_path = made.config.dtype, made.name_or_path
        name_ends(model, self.folder, config)
        stated.version, stated.kv = VERSION, list(made.model.formats)
        return model

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
        """True: the model's `save_pretrained` writes packed weights."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: operators have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """False: `model.generate` captures its own CUDA graph, and needs no torch.compile."""
        return False


def _device(found: Place) -> torch.device:
    return torch.device("cuda", found) if type(found) is int else torch.device(found)


def register() -> None:
    """Make "terrazzo" known to transformers: config, quantizer, attention, masks, experts. Importing this module has
    done it, and doing it again changes nothing.

    Raises:
        ToolchainError: something else is registered under this name.
    """
    for mapping, add, mine in (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config, TerrazzoConfig),
        (AUTO_QUANTIZER_MAPPING, register_quantizer, TerrazzoQuantizer),
    ):
        held = mapping.get(METHOD)
        if held is None:
            add(METHOD)(mine)
        elif held is not mine and (held.__module__, held.__qualname__) != (mine.__module__, mine.__qualname__):
            raise ToolchainError(
                f"{METHOD!r} is registered with transformers already, as {held}; import only one of them"
            )
    functions.register()


def take_over(*methods: str, **options: Option) -> None:
    """Have `from_pretrained` load published 4-bit folders as Terrazzo models from now on, in this process.

    Args:
        methods: of `PUBLISHED`; none means all. options: of `TerrazzoConfig`, for all such folders.

    Raises:
        ArgumentError: a method that no operator reads, an option that there is not.
    """
    TerrazzoConfig(**options)
    for method in methods or PUBLISHED:
        if method not in PUBLISHED:
            raise ArgumentError("methods", method, f"must be of {PUBLISHED}", "load it with transformers alone")

    class Taken(TerrazzoConfig):
        @classmethod
        def from_dict(
            cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: object
        ) -> TerrazzoConfig | tuple[TerrazzoConfig, dict[str, object]]:
            made = TerrazzoConfig(**options)
            return (made, kwargs) if return_unused_kwargs else made

    for method in methods or PUBLISHED:
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = Taken


def config_of(folder: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """transformers config of a folder without its quantization config, which `from_pretrained` prefers to yours.

    from_pretrained(folder, config=config_of(folder), quantization_config=TerrazzoConfig(kv="int8"))

    Args:
        trust_remote_code: run Python code of the folder that describes its config. False runs none.
    """
    foreign.check_trust(trust_remote_code)
    config = foreign.config_of(path_of(folder), trust_remote_code)
    for each in (config, config.get_text_config(decoder=True)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return config


register()
