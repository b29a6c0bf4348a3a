"""GPTQ, AWQ and AutoRound by llm-compressor, in an environment of its own: it pins other releases than engines have.

That environment needs no terrazzo: `llm_compressor_program.py` runs there, in a process that ends with the model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.integrations.llm_compressor_program import ANSWER, METHODS
from terrazzo.lowering.data_files import is_count, parse_json, read_json
from terrazzo.lowering.errors import ArgumentError, ToolchainError, shown
from terrazzo.lowering.settings import QUANTIZER, clean_environment

if TYPE_CHECKING:
    import torch
    from terrazzo.nn.formats import Format

RELEASE = "0.14"
INSTALL = (
    f"python -m venv ~/quantizer && ~/quantizer/bin/pip install 'llmcompressor=={RELEASE}.*' &&\n"
    "terrazzo config quantizer ~/quantizer/bin/python"
)
"""The two lines that set it up: one command, where an error is shown on one line."""
AGAIN = f"set the environment up again, in these two lines:\n{INSTALL}"
PROBE_S = 60.0
_PROBE = """
import importlib.metadata, json
names = ("llmcompressor", "compressed-tensors", "transformers", "torch")
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""
SCRATCH = ".quantizer"
"""Folder in the one that is written, of a run that has not ended."""
SHARD = "5GB"
SAID = 1500
"""Characters of what a process said that an error shows."""
ROUTERS = ("re:.*mlp[.]gate$", "re:.*block_sparse_moe[.]gate$", "re:.*mlp[.]router$")
TEXT = "pass token numbers of some text, or to the command --calibration FILE"


@dataclass(frozen=True)
class Quantizer:
    """Another environment's interpreter, and the releases of llm-compressor and what it needs there."""

    python: str
    releases: dict[str, str]


def quantizer() -> Quantizer:
    """The environment that is named.

    Raises:
        ToolchainError: none is, with the two lines that set one up; or it is absent, broken or has another release.
    """
    named = QUANTIZER.find()
    if named is None:
        raise ToolchainError(f"no environment with llm-compressor is named; these two lines set one up:\n{INSTALL}")
    return _probe(named[0])


def set_quantizer(path: str | os.PathLike | None) -> Quantizer | None:
    """Let the interpreter at `path` quantize for this user; None: forget it. TERRAZZO_QUANTIZER, where it is set, is
    asked first.

    Raises:
        ToolchainError: it has no such llm-compressor, or cannot be written down.
    """
    found = None if path is None else _probe(os.path.abspath(os.path.expanduser(os.fspath(path))))
    QUANTIZER.keep(None if found is None else found.python)
    return found


def report() -> dict[str, Any]:
    """What `terrazzo config quantizer` shows: python and named_by (None: nothing is named), releases, or a problem."""
    made: dict[str, Any] = {"python": None, "named_by": None, "releases": None, "problem": None}
    try:
        if (named := QUANTIZER.find()) is not None:
            made |= {"python": named[0], "named_by": named[1]}
            made["releases"] = _probe(named[0]).releases
    except ToolchainError as error:
        made["problem"] = str(error)
    return made


def _probe(python: str) -> Quantizer:
    remedy = f"these two lines set one up:\n{INSTALL}"
    if not os.path.isabs(python) or not os.access(python, os.X_OK) or os.path.isdir(python):
        raise ToolchainError(f"quantizer {python!r} is no absolute path of a program; {remedy}")
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=PROBE_S, check=False,
        )  # fmt: skip
        found = parse_json(done.stdout) if not done.returncode else None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"quantizer {python} cannot be asked: {error}; {remedy}") from error
    if not isinstance(found, dict) or not isinstance(release := found.get("llmcompressor"), str):
        raise ToolchainError(f"quantizer {python} has no llm-compressor; {remedy}")
    if not release.startswith(f"{RELEASE}."):
        raise ToolchainError(f"quantizer {python} has llm-compressor {release}, and {RELEASE} is what runs; {remedy}")
    return Quantizer(python, found)


def quantize_folder(
    source: str | Path,
    out: str | Path,
    format: str | Format,
    method: str,
    *,
    calibration: torch.Tensor | None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    iterations: int | None = None,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Quantize a float folder by llm-compressor, to a folder of compressed-tensors that all read.

    Experts are quantized one by one, and each is calibrated with all tokens. A run that was stopped begins anew; one
    that is over and whose files are as they were written is not made again.

    Args:
        source, out, verify, trust_remote_code: as of `nn.quantizing.quantize_folder`.
        format: one that compressed-tensors has, see `nn.published.writer_of`.
        method: "gptq", "awq" or "autoround". iterations: of AutoRound for each decoder layer; None takes its default.
        calibration: token numbers [sequences, length], which it needs.
        device: "cpu" keeps GPUs out of it; None and others take the first GPU. dtype: of weights that stay float.
        progress: called with (decoder layers done, all layers).

    Returns:
        published name of each layer -> relative error of its weight, of AWQ beside the weight that is scaled already.

    Raises:
        ArgumentError: as there. ToolchainError: no environment with llm-compressor, or it fails, with what it said.
    """
    from terrazzo.nn import folders, loading, reading
    from terrazzo.nn.formats import Format
    from terrazzo.nn.published import writer_of
    from terrazzo.nn.quantized_folder import QuantizedFolder, digest_of, read_files
    from terrazzo.nn.sources import Published
    from terrazzo.ops.checkpoints import Checkpoint
    from terrazzo.ops.checkpoints.conventions.compressed_tensors import scheme_of

    form = Format.parse(format)
    if method not in METHODS:
        raise ArgumentError("method", method, f"must be one of {METHODS}", "name one; rtn is quantize_folder's own")
    if form.product.planned or (form.product.codes.scales == ("float32",) and form.product.codes.bits == 4):
        steps = f"make a folder with {method} and w4a16-g128-sym, and of that one with --format {form}"
        raise ArgumentError("format", str(form), "has scales of two levels, which llm-compressor does not make", steps)
    if (writer := writer_of(form, None)) is None:
        constraint = f"has no form in compressed-tensors, which {method} writes"
        remedy = "name one that has, as w4a16-g128-sym, or leave the method out"
        raise ArgumentError("format", str(form), constraint, remedy)
    if calibration is None:
        raise ArgumentError("calibration", None, f"{method} needs to see activations", TEXT)
    found = quantizer()
    opened = loading.transformers_side().Opened(
        source, reading.device_of("cpu"), dtype=dtype, trust_remote_code=trust_remote_code
    )
    checkpoint = Checkpoint(source)
    if opened.own or checkpoint.layers() or checkpoint.config.method:
        raise ArgumentError("source", str(source), "has quantized layers already", "quantize the float model")
    opened.check(Published(checkpoint, reading.Asked(source), opened.device, opened.dtype))
    opened.build()
    opened.name_ends()
    group = scheme_of(form.product, form.group_size, form.symmetric, writer.published)
    settings = {
        "format": str(form), "method": method, "write": writer.published, "calibration": digest_of(calibration),
        "dtype": reading.weights_name(opened.dtype), "options": digest_of({"iterations": iterations}),
        "releases": found.releases, "version": folders.VERSION, "target": None,
    }  # fmt: skip
    asked = {
        "folder": os.path.abspath(source), "method": method, "group": group, "ignore": ["lm_head", *ROUTERS],
        "tokens": calibration.tolist(), "dtype": settings["dtype"], "trust": trust_remote_code, "shard": SHARD,
        "iterations": iterations,
    }  # fmt: skip
    layers = opened.shape.layers
    out = Path(os.path.abspath(out))
    with QuantizedFolder(out, settings, source, read_files(checkpoint), verify) as made:
        if made.files and (out / "config.json").is_file() and all(made.held(name) for name in list(made.files)):
            made.finish()
            return {layer: error for held in made.files.values() for layer, error in held["errors"].items()}
        scratch = out / SCRATCH
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            errors = _run(found.python, {**asked, "out": str(scratch)}, device, layers, progress)
            stated = _take(found.python, scratch, made, errors)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        opened.model.config.dtype = opened.dtype
        facts = (opened.model.config, stated, opened.model.generation_config, source, "out", opened.model.assumed_end)
        folders.write_configs(out, *facts)
        made.finish()
    return errors


def _take(python: str, scratch: Path, made: Any, errors: dict[str, float]) -> dict[str, Any]:
    """The files of a run that ended take their places; what its config states of them."""
    from safetensors import SafetensorError, safe_open
    from terrazzo.nn.folders import INDEX

    ended = f"llm-compressor of {python} said that it is done, and wrote"
    paths = sorted(scratch.glob("*.safetensors"))
    if not paths or not (scratch / "config.json").is_file():
        lacks = "config.json" if paths else "file of weights"
        raise ToolchainError(f"{ended} no {lacks}; {AGAIN}")
    try:
        config = read_json(scratch / "config.json", "config.json", AGAIN)
    except ArgumentError as error:
        raise ToolchainError(f"{ended} a config.json that {error.constraint}; {AGAIN}") from None
    stated = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(stated, dict):
        raise ToolchainError(f"{ended} a config.json without quantization_config; {AGAIN}")
    places: dict[str, str] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ToolchainError(f"{ended} {path.name}, which cannot be read ({error}); {AGAIN}") from None
        places |= dict.fromkeys(sorted(state), path.name)
        own = {name: error for name, error in errors.items() if any(f"{name}.weight" in tensor for tensor in state)}
        made.write(path.name, state, own)
    size = sum((made.path / name).stat().st_size for name in set(places.values()))
    made.write_json(INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    return stated


def _run(
    python: str, asked: dict[str, Any], device: Any, layers: int, progress: Callable[[int, int], None] | None
) -> dict[str, float]:
    """Errors of the layers that the process quantized."""
    program = Path(sys.modules["terrazzo.integrations.llm_compressor_program"].__file__).resolve()
    environment = clean_environment() | ({"CUDA_VISIBLE_DEVICES": ""} if str(device).startswith("cpu") else {})
    command = [python, "-I", str(program)]
    errors: dict[str, float] = {}
    said: list[bytes] = []
    done = False
    with _process(command, environment, said) as process:
        feeding = threading.Thread(target=_feed, args=(process, json.dumps(asked).encode()), daemon=True)
        feeding.start()
        for line in process.stdout:
            if not line.startswith(ANSWER.encode()):
                said.append(line)
                continue
            if (answer := _answer(line[len(ANSWER) :])) is None:
                heard = shown(line.decode(errors="replace").strip())
                raise ToolchainError(f"llm-compressor of {python} gave an answer that is none, {heard}; {AGAIN}")
            errors |= answer.get("errors", {})
            if bad := [name for name, error in errors.items() if not math.isfinite(error)]:
                remedy = "repair the checkpoint if its weights are none, or take another method"
                raise ToolchainError(f"llm-compressor of {python} made no numbers of {bad[0]}; {remedy}")
            done = answer.get("done", False)
            if progress is not None and not done:
                progress(min(answer["layer"], layers), layers)
    if process.returncode or not done or not errors:
        words = b"".join(said[-40:]).decode(errors="replace").strip()[-SAID:]
        raise ToolchainError(f"llm-compressor of {python} ended with {process.returncode}: {words}")
    return errors


def _answer(text: bytes) -> dict[str, Any] | None:
    """What a line says: the number of a layer, errors of layers, or that all is done; None: it says no such thing."""
    try:
        answer = parse_json(text)
    except ValueError:
        return None
    errors, done = (answer.get("errors", {}), answer.get("done", False)) if isinstance(answer, dict) else (None, None)
    if type(done) is not bool or not isinstance(errors, dict) or not (done or is_count(answer.get("layer"))):
        return None
    return answer if all(type(error) is float or is_count(error) for error in errors.values()) else None


def _feed(process: subprocess.Popen, data: bytes) -> None:
    with suppress(OSError):  # it ended: what it said has the reason
        process.stdin.write(data)
        process.stdin.close()


@contextmanager
def _process(command: list[str], environment: dict[str, str], said: list[bytes]) -> Iterator[subprocess.Popen]:
    """A process that does not outlive the block; what it writes to either stream is read from the first."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
