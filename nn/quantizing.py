"""`quantize_folder`: a float model's folder to one that `terrazzo.load` reads in seconds, a decoder layer at a time.

Each layer is a file of its own that appears whole or not at all, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import loading
from terrazzo.nn.calibrating import Calibration
from terrazzo.nn.formats import Format
from terrazzo.nn.joined import rows_of
from terrazzo.nn.sources import Published
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import Checkpoint

SETTINGS = "terrazzo_quantize.json"
INDEX = "model.safetensors.index.json"
TEXT = "pass token numbers of some text, or to the command a file of text"
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}  # values whose error is computed at a time: bounds what float64 takes


def quantize_folder(
    source: str | Path,
    out: str | Path,
    format: str | Format,
    *,
    kv: str | tuple[str, str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    calibration: torch.Tensor | None = None,
    target: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Quantize the linear layers of a float model and write a folder that `terrazzo.load` reads.

    Embedding, head, norms and routers stay in 16 bits. Decoder layers come one after another. A folder that an
    equal, stopped run began is finished.

    Args:
        source: Hugging Face folder of a float model. out: folder to write, empty or begun by an equal run.
        format: see `nn.Format.parse`; "w4ax" needs `calibration`.
        kv: formats of keys and values that the folder names; `load` may be asked for others. Static ones ("fp8",
            "int8_static") need `calibration`, whose largest keys and values make their scales.
        device: where weights are quantized, None for a GPU where there is one. dtype, options: see `load`.
        calibration: token numbers [sequences, length] of some text, which the float model reads a layer at a time:
            W4Ax takes the order of its channels from that, W4A8 its smooth vectors, and all search ranges of codes
            where channels that read more count more.
        target: architecture to pack for; None the device's.
        progress: called with (layers done, all layers). trust_remote_code: see `load`.

    Returns:
        name of each layer -> relative error of its weight, the norm of the difference over the norm.

    Raises:
        ArgumentError: a folder that cannot be read, or written, or that holds something else; an unknown format.
        ToolchainError: transformers is not installed.
    """
    form = Format.parse(format)
    if form.family == "w4ax" and calibration is None:
        raise ArgumentError("calibration", None, f"{form} needs to see activations", TEXT)
    model_module = loading._transformers()
    to = weights.device_of(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    own, config = loading.read_config(source, None, trust_remote_code)
    if own:
        raise ArgumentError("source", str(source), "is packed already", "quantize the float model")
    found = loading.dtype_of(config, dtype)
    formats = loading.kv_formats(kv if kv is not None else loading.weights_name(found))
    if calibration is None and (static := loading.needs_scales(formats)):
        raise ArgumentError("calibration", None, f"kv={static[0]!r} needs to see keys and values", TEXT)
    checkpoint = Checkpoint(source)
    if checkpoint.layers():
        raise ArgumentError("source", str(source), "has quantized layers already", "terrazzo.load reads them")
    folder = weights.path_of(out)
    if form.family == "w4a8":
        options = {"rule": "search"} | dict(options or {})
    settings = {
        "source": str(weights.path_of(source).resolve()), "format": str(form), "dtype": loading.weights_name(found),
        "options": {name: str(value) for name, value in (options or {}).items()}, "version": model_module.VERSION,
        "target": target, "calibration": _digest(calibration),
    }  # fmt: skip

    from terrazzo.nn.architectures import Builder, shape_of

    shape, skeleton, errors = shape_of(config), model_module.skeleton(config), {}
    rotaries = [rotary.to(to) for rotary in model_module.rotaries_of(skeleton, shape)]
    generation = loading.generation_config(source)
    note: dict[str, float] = {}
    made = Published(
        checkpoint, {}, to, found, quantize=form, options=options, target=target,
        report=lambda name, packed, weight: note.__setitem__(name, error_of(packed, weight)),
    )  # fmt: skip
    builder = Builder(shape, made, [])
    _begin(folder, settings)
    watched = None
    if calibration is not None:
        watched = Calibration(Builder(shape, Published(checkpoint, {}, to, found), rotaries), calibration)
    files: dict[str, list[str]] = {}
    with torch.no_grad():
        for index in range(shape.layers):
            name, prefix = f"model-layer-{index:05}.safetensors", f"decoder.layers.{index}"
            held = _held(folder / name)
            if watched is not None:
                seen = watched.layer(index, prefix)
                made.tuned = partial(lambda seen, own, weight: seen[own].options(form, weight), seen)
            if held is None:
                note.clear()
                state = builder.layer(index, prefix).state_dict()
                held = _write(folder / name, {f"{prefix}.{key}": t for key, t in state.items()}, note)
            files[name], found_errors = held
            errors |= found_errors
            if progress is not None:
                progress(index + 1, shape.layers)
        rest = _rest(builder, shape)
        if watched is not None:
            rest |= model_module.static_state(*watched.static(formats))
    files["model-rest.safetensors"], _ = _write(folder / "model-rest.safetensors", rest, {})
    places = {tensor: name for name, held in files.items() for tensor in held}
    size = sum((folder / name).stat().st_size for name in files)
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    skeleton.config.dtype = found
    model_module.write_configs(folder, skeleton.config, formats, generation)
    _write_json(folder / SETTINGS, settings | {"done": True, "errors": errors})
    return errors


def error_of(packed: Any, weight: torch.Tensor | None) -> float:
    """Norm of the difference of a packed weight and the float one, over the float one's."""
    if weight is None:
        return 0.0
    canonical, smooth = packed.unpack(), getattr(packed, "smooth", None)
    count = max(1, _CHUNK.get(weight.device.type, 1 << 22) // weight.shape[1])
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for first in range(0, len(weight), count):
        rows = slice(first, first + count)
        part, near = weight[rows].double(), rows_of(canonical, rows).dequantize().double()
        near = near if smooth is None else near.div_(smooth.double())  # of x / smooth
        sums += torch.stack([near.sub_(part).square_().sum(), part.square_().sum()])
    off, total = sums.tolist()
    return (off / total) ** 0.5 if total else 0.0


def _digest(tokens: torch.Tensor | None) -> str | None:
    """Equal digests mean equal tokens."""
    return None if tokens is None else hashlib.sha256(tokens.cpu().long().numpy().tobytes()).hexdigest()[:16]


def _rest(builder: Any, shape: Any) -> dict[str, torch.Tensor]:
    """Embedding, last norm and head."""
    root = builder.root
    embedding = builder.embedding("")
    state = {"decoder.embed_tokens.weight": embedding}
    state["decoder.norm.weight"] = builder.norm(f"{root}norm", "").weight
    head = builder.head_of(embedding)
    if getattr(head, "weight", None) is None or head.weight.data_ptr() != embedding.data_ptr():
        state |= {f"lm_head.{name}": t for name, t in head.state_dict().items()}
    return state


def _begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder; ArgumentError for one that holds what an equal run did not write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        remedy = "name a folder that can be written"
        raise ArgumentError("out", str(folder), f"cannot be written ({error.strerror})", remedy) from None
    noted = folder / SETTINGS
    if held and not noted.is_file():
        raise ArgumentError("out", str(folder), f"is not empty: it has {sorted(held)[0]!r}", "name a new folder")
    if noted.is_file():
        try:
            before = json.loads(noted.read_text())
        except (OSError, ValueError):
            before = {}
        if {name: before.get(name) for name in settings} != dict(settings):
            raise ArgumentError("out", str(folder), "was begun with other settings", "name a new folder")
        return
    _write_json(noted, settings)


def _held(path: Path) -> tuple[list[str], dict[str, float]] | None:
    """(names of tensors, errors) of a layer that is written already, or None."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys()), json.loads((file.metadata() or {}).get("errors", "{}"))
    except (SafetensorError, OSError, ValueError):
        return None


def _write(
    path: Path, state: Mapping[str, torch.Tensor], errors: Mapping[str, float]
) -> tuple[list[str], dict[str, float]]:
    """Write tensors to a file that appears whole."""
    from safetensors.torch import save_file

    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in state.items()}
    try:
        save_file(tensors, scratch, metadata={"format": "pt", "errors": json.dumps(dict(errors))})
        os.replace(scratch, path)
    except OSError as error:
        raise ArgumentError("out", str(path), f"cannot be written ({error.strerror})", "make room") from None
    finally:
        scratch.unlink(missing_ok=True)
    return list(tensors), dict(errors)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(scratch, path)
