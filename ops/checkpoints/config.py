"""A checkpoint's quantization config: which method wrote it, and what it states about each layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.spelling import did_you_mean
from terrazzo.ops.checkpoints import fields, files
from terrazzo.ops.checkpoints.conventions.base import LayerConfig
from terrazzo.ops.checkpoints.conventions.table import ALIASES, CONVENTIONS, FORMATS, METHODS, STATED
from terrazzo.ops.checkpoints.fields import Stated

_FILES = (
    "config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json",
)  # fmt: skip
_KINDS = {
    "dynamic": dict, "config_groups": dict, "extra_config": dict, "version": str, "checkpoint_format": str,
    "format": str, "packing_format": str,
}  # fmt: skip
"""Fields of a config whose kind is checked at once."""


class Config:
    """A checkpoint's quantization config, resolved layer by layer.

    Args:
        raw: the `quantization_config` object of config.json, or the content of quantize_config.json /
            quant_config.json.
        format: what the caller says that the layers are stored as, one of FORMATS; it is obeyed whatever `raw` says.

    Attributes:
        method: "awq", "gptq", "compressed-tensors", "qserve", "auto-round", or "" for none.

    Raises:
        ArgumentError: another `quant_method` and no `format`, a folder that Terrazzo packed, or a field of another kind
            than exporters write.
    """

    def __init__(self, raw: Stated | None = None, *, format: str | None = None) -> None:
        self.raw, self.format = {} if raw is None else raw, _format(format)
        if not isinstance(self.raw, dict):
            raise fields.bad("quantization_config", self.raw, "must be an object")
        if self.raw.get("quant_method") == "terrazzo":
            remedy = "give what terrazzo.load makes of it to terrazzo.prepare, which compiles its kernels"
            constraint = "says that Terrazzo packed these layers: terrazzo.load alone reads them"
            raise ArgumentError("quant_method", "terrazzo", constraint, remedy)
        for name, kind in _KINDS.items():
            if not isinstance(self.raw.get(name), kind | None):
                wanted = "must be an object" if kind is dict else "must be a string"
                raise fields.bad(name, self.raw[name], wanted)
        method = self.raw.get("quant_method") or self.raw.get("method") or ""
        method = method.lower() if isinstance(method, str) else type(method).__name__
        if not method:  # files older than quant_method
            method = next((one.name for one in METHODS.values() if one.unnamed(self.raw)), "")
        self._method = METHODS.get(ALIASES.get(method, ""))
        self.method = "" if self._method is None else self._method.name
        self._known: dict[str, LayerConfig] = {}
        if self.raw and self._method is None and self.format is None:
            remedy = "quantize() the float checkpoint, export it in one of these formats, or pass format="
            raise ArgumentError("quant_method", method[:80] or None, f"must be one of {', '.join(METHODS)}", remedy)

    @property
    def by_tensors(self) -> bool:
        """Whether layers that it excludes are quantized all the same, where their tensors are codes."""
        return self._method is not None and self._method.by_tensors

    @classmethod
    def of_folder(cls, folder: Path, format: str | None = None) -> Config:
        """Read config.json (its quantization_config), else quantize_config.json or quant_config.json.

        Of those that are not chosen, fields that change a layer and that the chosen one does not have are kept.
        """
        chosen, changing = None, {}
        for name in _FILES:
            if (path := files.member(folder, name)) is None:
                continue
            try:
                raw = files.read_object(path)
            except ArgumentError:
                if chosen is None:
                    raise
                continue
            if name == "config.json":  # models of several modalities state it in the text model's part
                parts = [raw, *(raw[part] for part in ("text_config", "llm_config") if isinstance(raw.get(part), dict))]
                found = (part.get("quantization_config") or part.get("compression_config") for part in parts)
                raw = next(filter(None, found), None)
            writer = next((one.name for one in METHODS.values() if one.file == name), None)
            if writer is not None and isinstance(raw.get("quantization"), dict):
                raw = {"quant_method": writer, **raw["quantization"]}
            if raw and chosen is None:
                chosen = raw
            elif isinstance(raw, dict):
                changing = {field: raw[field] for field in fields.CHANGING if field in raw} | changing
        return cls(changing | chosen if isinstance(chosen, dict) else chosen, format=format)

    def layer(self, name: str) -> LayerConfig:
        """The config of one layer, by the rules of its method (overrides, ignore lists and targets included)."""
        if name not in self._known:
            self._known[name] = self._layer(name)
        return self._known[name]

    def _layer(self, name: str) -> LayerConfig:
        stated, reason, facts = LayerConfig(), "", self.raw
        if self._method is not None:
            stated, facts = self._method.layer(self.raw, name), self.raw | self._method.own(self.raw, name)
            reason = fields.unknown(self._method.known, facts)
        reason = reason or fields.changed(facts, name)
        if self.format is not None:
            stated = self._named(stated)
        if reason and (stated.excluded or not stated.skip):
            stated = replace(stated, skip=reason, excluded=False)
        return stated

    def _named(self, stated: LayerConfig) -> LayerConfig:
        """Of the caller's format, with what the config says beside its own."""
        same = stated.format is not None and FORMATS[stated.format] == FORMATS[self.format]
        kept = same and CONVENTIONS[FORMATS[self.format]].versioned
        return replace(
            stated,
            format=STATED[self.format],
            version=stated.version if kept else None,
            symmetric=stated.symmetric if same else None,
            desc_act=stated.desc_act if same else None,
            skip="",
            excluded=False,
        )


def _format(format: str | None) -> str | None:
    if format is not None and (not isinstance(format, str) or format not in FORMATS):
        remedy = f"{did_you_mean(format, FORMATS)}pass the format that the checkpoint's page states"
        raise ArgumentError("format", format, f"must be one of {tuple(FORMATS)}", remedy)
    return format
