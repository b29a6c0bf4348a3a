"""`quantize_folder`: a float model's folder to one that `terrazzo.load` reads in seconds, a decoder layer at a time.

Each layer is a file of its own that appears whole or not at all, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import folders, loading, reading
from terrazzo.nn.calibrating import Calibration
from terrazzo.nn.formats import Format
from terrazzo.nn.joined import rows_of
from terrazzo.nn.published import Written, quantization_config, writer_of
from terrazzo.nn.quantized_folder import QuantizedFolder, digest_of, read_files
from terrazzo.nn.sources import FLOAT_LAYER, Published
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import Checkpoint
from terrazzo.ops.checkpoints.conventions.compressed_tensors import in_blocks
from terrazzo.ops.products.converted import W4A8
from terrazzo.ops.products.table import PRODUCTS

if TYPE_CHECKING:
    from terrazzo.nn.architectures import Builder, Shape
    from terrazzo.ops.weight.base import AnyPacked as Packed

TEXT = "pass token numbers of some text, or to the command --calibration FILE"
_PACK = "pass token numbers of some text; terrazzo pack takes none: name int8 to it, or let terrazzo quantize make it"
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}  # values whose error is computed at a time: bounds what float64 takes


def quantize_folder(
    source: str | Path,
    out: str | Path,
    format: str | Format | None,
    *,
    write: str | None = None,
    kv: str | tuple[str, str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    calibration: torch.Tensor | None = None,
    target: str | None = None,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Quantize the linear layers of a float model and write a folder that `terrazzo.load` reads.

    Formats that compressed-tensors has are written so: vLLM and transformers read that folder, too. Others are
    packed for Terrazzo alone. A folder whose layers are quantized already is packed as it is (`format` None), or its
    4-bit integers become W4A8 ("w4a8"), whose two levels of scales are fitted to theirs.

    Embedding, head, norms and routers stay in 16 bits. Decoder layers come one after another. A folder that an
    equal, stopped run began is finished: layers whose files are as they were written stay, others are made again with a
    RuntimeWarning. Equal runs write equal bytes.

    Args:
        source: Hugging Face folder of a float model. out: folder to write, empty or begun by an equal run.
        format: see `nn.Format.parse`; "w4ax" needs `calibration`.
        write: "compressed-tensors" or "packed"; None takes the first where format and model have it, and neither `kv`
            nor `target` is given, which only a packed folder names.
        kv: formats of keys and values that the folder names; `load` may be asked for others. Static ones ("fp8",
            "int8_static") need `calibration`, whose largest keys and values make their scales.
        device: where weights are quantized, None for a GPU where there is one. dtype, options: see `load`.
        calibration: token numbers [sequences, length] of some text, which the float model reads a layer at a time:
            W4Ax takes the order of its channels from that, W4A8 its smooth vectors. These, W4A16 and W4A8 on e4m3
            search ranges of codes where channels that read more count more. Other formats refuse it.
        target: architecture to pack for; None the device's.
        verify: the source of a stopped run is compared by all its bytes. False leaves out files whose size and times
            are as they were.
        progress: called with (layers done, all layers). trust_remote_code: see `load`.

    Returns:
        name of each layer -> relative error of its weight, the norm of the difference over the norm.

    Raises:
        ArgumentError: a folder that cannot be read, or written, or that holds something else; an unknown format. A
            source that is not the one that the folder was begun with, or that changes meanwhile.
        ToolchainError: transformers is not installed.
    """
    form = None if format is None else Format.parse(format)
    takes = "" if form is None else form.product.calibration
    if takes == "plan" and calibration is None:
        raise ArgumentError("calibration", None, f"{form} needs to see activations", TEXT)
    causal, to = loading.transformers_side(), reading.device_of(device)
    opened = causal.Opened(source, to, dtype=dtype, kv=kv, trust_remote_code=trust_remote_code)
    if opened.own:
        raise ArgumentError("source", str(source), "is packed already", "quantize the float model")
    found, formats, shape = opened.dtype, opened.formats, opened.shape
    if calibration is None and (static := reading.needs_scales(formats)):
        remedy = _PACK if form is None else TEXT
        raise ArgumentError("calibration", None, f"kv={static[0]!r} needs to see keys and values", remedy)
    if calibration is not None and not (takes or reading.needs_scales(formats)):
        others = ", ".join(one.word for one in PRODUCTS if one.calibration)
        constraint = f"{form or 'packing'} takes nothing from a text: {others} do, and static formats of kv"
        raise ArgumentError("calibration", "a text", constraint, "leave it out, or name another format")
    checkpoint = Checkpoint(source)
    again = _check_source(checkpoint, form, calibration)
    folder = weights.path_of(out)
    given = [name for name, value in (("kv", kv), ("target", target)) if value is not None]
    lacks = f"names no {given[0]}" if given else "has no experts with biases" if shape.kind == "gpt_oss" else ""
    writer = writer_of(form, write, lacks)
    if takes == "smooth" and not again:
        options = {"rule": "search"} | dict(options or {})

    from terrazzo.nn.architectures import Builder

    errors: dict[str, float] = {}
    note: dict[str, float] = {}
    report = lambda name, packed, weight: note.__setitem__(name, error_of(packed, weight))
    asked = reading.Asked(source, quantize=form, options=options, target=target, report=report)
    made = Published(checkpoint, asked, to, found)
    made.again = again
    opened.check(made)
    opened.build()
    opened.name_ends()
    skeleton = opened.model
    builder = Builder(shape, made, [])
    if writer is not None:
        writer = writer_of(form, write, _uneven(builder, form))
    settings = {
        "format": "as published" if form is None else str(form), "write": None if writer is None else writer.published,
        "method": None, "dtype": reading.weights_name(found), "options": digest_of(dict(options or {})),
        "version": folders.VERSION, "target": target, "calibration": digest_of(calibration),
    }  # fmt: skip
    written = None if writer is None else Written(made, writer, builder.root, shape.tied)
    files: dict[str, list[str]] = {}
    with QuantizedFolder(folder, settings, source, read_files(checkpoint), verify) as out_folder, torch.no_grad():
        made.checkpoint = checkpoint = Checkpoint(source)  # as its files are now that they are known
        watched = None
        if calibration is not None:
            floats = Published(checkpoint, reading.Asked(source), to, found)
            watched = Calibration(Builder(shape, floats, opened.rotaries), calibration)
        for index in range(shape.layers):
            name, prefix = f"model-layer-{index:05}.safetensors", f"decoder.layers.{index}"
            held = out_folder.held(name)
            if watched is not None:
                seen = watched.layer(index, prefix)
                made.tuned = partial(lambda seen, own, weight: seen[own].options(form, weight), seen)
            if held is None:
                note.clear()
                layer = builder.layer(index, prefix)
                if written is None:
                    state = {f"{prefix}.{key}": t for key, t in layer.state_dict().items()}
                else:
                    state = written.take()
                held = out_folder.write(name, state, note)
            files[name], found_errors = held
            errors |= found_errors
            if progress is not None:
                progress(index + 1, shape.layers)
        rest = _rest(builder, shape)
        if written is not None:
            rest = written.take()
        else:
            rest |= folders.refusal_state()
            if watched is not None:
                rest |= folders.static_state(*watched.static(formats))
        files["model-rest.safetensors"], _ = out_folder.write("model-rest.safetensors", rest, {})
        places = {tensor: name for name, held in files.items() for tensor in sorted(held)}
        size = sum((folder / name).stat().st_size for name in files)
        out_folder.write_json(folders.INDEX, {"metadata": {"total_size": size}, "weight_map": places})
        skeleton.config.dtype = found
        stated = folders.packed_with(formats) if writer is None else quantization_config(writer, form, places)
        facts = (skeleton.config, stated, skeleton.generation_config, source, "out", skeleton.assumed_end)
        folders.write_configs(folder, *facts)
        out_folder.finish()
    return errors


def _check_source(checkpoint: Checkpoint, form: Format | None, calibration: torch.Tensor | None) -> bool:
    """Whether 4-bit integers of the source become W4A8; ArgumentError for a source that does not fit the format."""
    source, stored = str(checkpoint.folder), checkpoint.layers()
    if form is None:
        if not stored and not checkpoint.config.method:
            remedy = "quantize them: terrazzo quantize, or a format as w4a16-g128"
            raise ArgumentError("format", None, f"the layers of {source} are float", remedy)
        return False
    if stored and form.product is not W4A8:
        remedy = "terrazzo.load reads them, and terrazzo pack packs them; of 4-bit integers w4a8 can be made"
        raise ArgumentError("source", source, "has quantized layers already", remedy)
    if stored and calibration is not None:
        remedy = "leave it out, or quantize the float model with it"
        raise ArgumentError(
            "calibration", "a text", f"is read by float layers, and {source} has quantized ones", remedy
        )
    return bool(stored)


def _uneven(builder: Builder, form: Format) -> str:
    """Why layers of compressed-tensors do not hold a model's, whose sizes end inside of a group; "" where they do."""
    size, shape, source = form.group_size, builder.shape, builder.source
    if size is None:
        return ""
    for name in source.names():
        if name.startswith(f"{builder.root}layers.") and FLOAT_LAYER.fullmatch(name):
            k = source.shape_of(name)[-1:]
            if k and k[0] % size:
                return f"has whole groups of {size}, and K = {k[0]} of {name} is no multiple"
    rows = shape.kv_heads * shape.head_dim  # keys', behind which those of values begin
    if in_blocks(form.product, size) and rows % size and rows % size + rows > size:
        return f"has whole blocks of {size} rows, and the {rows} of keys and of values are no multiple"
    return ""


def error_of(packed: Packed, weight: torch.Tensor | None) -> float:
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


def _rest(builder: Builder, shape: Shape) -> dict[str, torch.Tensor]:
    """Embedding, last norm and head."""
    root = builder.root
    embedding = builder.embedding("")
    state = {"decoder.embed_tokens.weight": embedding}
    state["decoder.norm.weight"] = builder.norm(f"{root}norm", "").weight
    head = builder.head_of(embedding)
    if getattr(head, "weight", None) is None or head.weight.data_ptr() != embedding.data_ptr():
        state |= {f"lm_head.{name}": t for name, t in head.state_dict().items()}
    return state
