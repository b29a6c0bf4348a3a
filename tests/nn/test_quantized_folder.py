"""Folders of `terrazzo quantize`: their source, their layers, their bytes and modes, and disks that are full."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.quantized_folder import SETTINGS, QuantizedFolder, digest_of
from terrazzo.ops import tensor_files

from tests import mutation

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.nn.quantizing import quantize_folder  # noqa: E402

LAYERS = 3
FAST = dict(device="cpu", options={"clip_steps": 1}, target="sm_90a")


def write_source(folder: Path, seed: int = 0) -> Path:
    """A float16 Llama with a generation config."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=1, num_key_value_heads=1,
        head_dim=64, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("float") / "model")


def run(source: Path, out: Path, stop_after: int = 0, **options) -> dict[str, float]:
    """Quantize; a run that stops ends behind so many layers."""

    def stop(done: int, total: int) -> None:
        if done == stop_after:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        return quantize_folder(source, out, options.pop("form", "w4a16-g64"), **FAST | {"progress": stop} | options)
    return {}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> dict[str, bytes]:
    """Files of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert len(run(source, out)) == 4 * LAYERS
    return contents(out)


def layer(index: int) -> str:
    return f"model-layer-{index:05}.safetensors"


# -- bytes and modes ---------------------------------------------------------------------------------------------------
def _killed(source: Path, out: Path, after: int) -> None:
    """In a process of its own: SIGKILL behind a layer, and a file in the making is left."""
    torch.set_num_threads(1)

    def kill(done: int, total: int) -> None:
        if done == after:
            (out / ".0123456789abcdef.part").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    quantize_folder(source, out, "w4a16-g64", **FAST, progress=kill)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_equal_runs_write_equal_bytes_with_modes_of_the_umask(source, whole, tmp_path, umask):
    """Twice, from a copy of the source elsewhere, and after a run that was killed."""
    elsewhere = shutil.copytree(source, tmp_path / "copy")
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(source, tmp_path / "out", 2))
    before = os.umask(umask)
    try:
        process.start()
        process.join(timeout=120)
        assert process.exitcode == -signal.SIGKILL and not (tmp_path / "out" / "config.json").exists()
        kept = (tmp_path / "out" / layer(1)).stat().st_mtime_ns
        assert set(run(elsewhere, tmp_path / "out")) == set(run(source, tmp_path / "again"))
    finally:
        os.umask(before)
    assert (tmp_path / "out" / layer(1)).stat().st_mtime_ns == kept
    assert contents(tmp_path / "out") == contents(tmp_path / "again") == whole
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask} and (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    loaded, plain = load(tmp_path / "out", device="cpu"), load(source, quantize="w4a16-g64", **FAST)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, plain(ids).logits)
    assert str(tmp_path) not in (tmp_path / "out" / SETTINGS).read_text()
    loaded.save_pretrained(tmp_path / "saved", max_shard_size="40KB")  # and so do the files of save_pretrained
    first = contents(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "saved")
    assert len(first) > 3 and "model.safetensors" in contents(tmp_path / "saved")
    assert not any("-of-" in name for name in contents(tmp_path / "saved"))
    loaded.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert contents(tmp_path / "saved") == first
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()} == {0o666 & ~os.umask(before)}


def test_runs_that_are_killed_anywhere_go_on(source, whole, tmp_path, tries):
    """By SIGKILL after a random time, again and again: the folder in the end is that of a run that nobody stopped."""
    ended = []
    for number, random in enumerate(tries(3)):
        out = tmp_path / str(number)
        for _ in range(random.randrange(1, 4)):
            process = multiprocessing.get_context("fork").Process(target=_killed, args=(source, out, LAYERS + 1))
            process.start()
            process.join(timeout=random.random() * 1.5)
            process.kill()
            process.join()
            ended.append(process.exitcode)
            assert not (out / "config.json").exists() or all((out / layer(i)).exists() for i in range(LAYERS))
        run(source, out)
        assert contents(out) == whole
        shutil.rmtree(out)
    assert set(ended) <= {0, -signal.SIGKILL}


def test_files_of_tensors_are_what_safetensors_reads(tmp_path, tries):
    kinds = [getattr(torch, name) for name in tensor_files._DTYPES]
    for random in tries(50):
        state = {}
        for index in range(random.randrange(1, 6)):
            shape = [random.randrange(4) for _ in range(random.randrange(4))]
            data = torch.randint(0, 2, shape).to(random.choice(kinds))
            state[random.choice(("a", "é.b", "\u2028", "x" * 200)) + str(index)] = data.T if data.dim() == 2 else data
        words = {"format": "pt", "zz": "\0'\"\\ü", "aa": ""}
        digest = tensor_files.write_tensors(tmp_path / "w", state, words)
        assert digest == tensor_files.digest_of(tmp_path / "w")
        read = load_file(tmp_path / "w")
        assert set(read) == set(state)
        for name, tensor in state.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            assert torch.equal(
                read[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
            )
    with pytest.raises(ArgumentError, match="z = 'complex64': is a dtype"):
        tensor_files.write_tensors(tmp_path / "w", {"z": torch.zeros(1, dtype=torch.complex64)}, {})


# -- the source --------------------------------------------------------------------------------------------------------
def test_a_replaced_source_is_refused_by_name(source, whole, tmp_path):
    """Another model of equal shapes, sizes and times at the path; another config; a run that is over, too."""
    here, out = shutil.copytree(source, tmp_path / "model"), tmp_path / "out"
    run(here, out, stop_after=2)
    begun, other = contents(out), write_source(tmp_path / "other", 1)
    stamp = (here / "model.safetensors").stat()
    shutil.copy(other / "model.safetensors", here / "model.safetensors")
    os.utime(here / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    said = "source = .*is another model than the one that .*out was begun with: model.safetensors differs; name a new"
    with pytest.raises(ArgumentError, match=said):
        run(here, out)
    assert contents(out) == begun
    shutil.copy(source / "model.safetensors", here / "model.safetensors")
    config = json.loads((here / "config.json").read_text())
    (here / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ArgumentError, match="config.json differs"):
        run(here, out)
    shutil.copy(source / "config.json", here / "config.json")
    run(here, out)  # the same contents again, whatever the times say
    assert contents(out) == whole
    shutil.copy(other / "model.safetensors", here / "model.safetensors")
    with pytest.raises(ArgumentError, match="model.safetensors differs"):
        run(here, out)
    assert contents(out) == whole


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_a_source_that_changes_while_it_is_read_is_refused(source, tmp_path, how):
    """Nothing that was made of both models is kept, also where the first one comes back."""
    here, out = shutil.copytree(source, tmp_path / "model"), tmp_path / "out"
    good, other = (here / "model.safetensors").read_bytes(), write_source(tmp_path / "other", 1) / "model.safetensors"

    def replace(done: int, total: int) -> None:
        if done == 1 and how == "in place":
            (here / "model.safetensors").write_bytes(other.read_bytes())
        elif done == 1:
            os.replace(other, here / "model.safetensors")

    with pytest.raises(ArgumentError, match="its model.safetensors was changed while it was read; start again"):
        run(here, out, progress=replace)
    assert (out / layer(0)).exists() and not (out / layer(1)).exists() and not (out / "config.json").exists()
    with pytest.raises(ArgumentError, match="is another model"):
        run(here, out)
    (here / "model.safetensors").write_bytes(good)
    run(here, out, stop_after=2)
    assert set(json.loads((out / SETTINGS).read_text())["files"]) == {layer(0), layer(1)}


def test_other_settings_are_refused_by_name(source, tmp_path):
    text = torch.arange(8).view(2, 4)
    big = torch.zeros(5000)
    run(source, tmp_path / "out", stop_after=1, calibration=text)
    for options, name in (
        (dict(form="w4a16-g128"), "format"),
        (dict(dtype=torch.bfloat16), "dtype"),
        (dict(calibration=text.view(1, 8)), "calibration"),
        (dict(calibration=text + 1), "calibration"),
        (dict(calibration=None), "calibration"),
        (dict(options={"clip_steps": 2}), "options"),
        (dict(target="sm_80"), "target"),
    ):
        with pytest.raises(
            ArgumentError, match=rf"out = .*begun with other settings: {name} was .*; name a new folder"
        ):
            run(source, tmp_path / "out", **{"calibration": text} | options)
    assert digest_of({"a": [big]}) != digest_of({"a": [big.index_fill(0, torch.tensor(2500), 1.0)]})
    assert digest_of(big) != digest_of(big.view(torch.int32)) and digest_of(None) == digest_of({"x": None})["x"]


# -- what a process finds in a folder: seeded, of small files ----------------------------------------------------------
STATE = {"a": torch.arange(300, dtype=torch.int32), "b": torch.ones(7, dtype=torch.float16)}


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """`begin(verify)`: the folder's object, of a source of two files. Nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    place = tmp_path / "float"
    place.mkdir()
    for name in ("x.safetensors", "config.json"):
        (place / name).write_bytes(os.urandom(2000))
    read = {path.name: path for path in sorted(place.iterdir())}

    def begin(verify: bool = False, **settings) -> QuantizedFolder:
        return QuantizedFolder(tmp_path / "out", {"format": "x"} | settings, place, read, verify)

    return begin


def fill(folder: QuantizedFolder) -> None:
    """What is not there yet."""
    for index in range(3):
        if folder.held(layer(index)) is None:
            folder.write(layer(index), STATE | {"c": torch.tensor([index])}, {"q": 0.5 + index})
    folder.finish()


def test_altered_layers_are_found_and_made_again(begun, tmp_path, tries):
    """By their tensors, by any of their bytes, and by being a layer of the same name of another run."""
    with begun() as folder:
        fill(folder)
    good = contents(tmp_path / "out")
    found = 0
    for random in tries(100):
        index = random.randrange(3)
        path = tmp_path / "out" / layer(index)
        kind = random.choice(("bytes", "tensors", "other", "lost"))
        if kind == "bytes":
            path.write_bytes(mutation.data(good[layer(index)], random))
        elif kind == "tensors":
            save_file(mutation.tensors(load_file(path), random), path, {"format": "pt"})
        elif kind == "other":
            path.write_bytes(good[layer((index + 1) % 3)])
        else:
            path.unlink()
        altered = kind == "lost" or path.read_bytes() != good[layer(index)]
        with warnings.catch_warnings(record=True) as said, begun(verify=random.random() < 0.5) as folder:
            warnings.simplefilter("always")
            assert (folder.held(layer(index)) is None) == altered
            assert all(folder.held(layer(i)) == (["a", "b", "c"], {"q": 0.5 + i}) for i in range(3) if i != index)
            fill(folder)
        warned = [str(each.message) for each in said if "is not what was written" in str(each.message)]
        assert bool(warned) == (altered and kind != "lost") and all(layer(index) in each for each in warned)
        assert contents(tmp_path / "out") == good
        found += altered
    assert found > 0


def test_altered_sources_are_found(begun, tmp_path, tries):
    """Whatever their times say; what is the same again is taken."""
    with begun() as folder:
        folder.write(layer(0), STATE, {})
    for random in tries(100):
        path = tmp_path / "float" / random.choice(("x.safetensors", "config.json"))
        good, stamp = path.read_bytes(), path.stat()
        damaged = mutation.data(good, random)
        path.write_bytes(damaged)
        if random.random() < 0.5:
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        verify = random.random() < 0.5
        if damaged == good:
            begun(verify).__exit__()
        else:
            with pytest.raises(ArgumentError, match=f"is another model than the one that .*: {path.name} differs"):
                begun(verify)
        path.write_bytes(good)
        begun(verify).__exit__()


def test_verify_reads_files_whose_times_say_nothing(begun, tmp_path, monkeypatch):
    """A file system may keep no times of its own: then `verify` finds what nothing else does."""
    with begun() as folder:
        folder.write(layer(0), STATE, {})
    monkeypatch.setattr(QuantizedFolder, "_seen", lambda self: {name: [0] * 4 for name in self.read})
    begun().__exit__()
    (tmp_path / "float" / "config.json").write_bytes(b"x" * 2000)
    begun().__exit__()
    with pytest.raises(ArgumentError, match="config.json differs"):
        begun(verify=True)


def test_damaged_settings_are_refused_or_say_the_same(begun, tmp_path, tries):
    with begun() as folder:
        fill(folder)
    path = tmp_path / "out" / SETTINGS
    good, layers = path.read_bytes(), contents(tmp_path / "out")
    refused = 0
    for random in tries(150):
        path.write_bytes(mutation.text(mutation.value(json.loads(good), random), random))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused += not mutation.survives(lambda: begun().__exit__())
            with suppress(ArgumentError), begun() as folder:
                fill(folder)  # what is not as noted is made again
                assert {name: data for name, data in contents(tmp_path / "out").items() if name != SETTINGS} == {
                    name: data for name, data in layers.items() if name != SETTINGS
                }
        path.write_bytes(good)
    assert refused > 10


def test_a_folder_has_one_writer(begun, tmp_path):
    with begun():
        with pytest.raises(ArgumentError, match="is being written by another process; wait for it"):
            begun()
    begun().__exit__()
    with pytest.raises(ArgumentError, match="format was 'x' and is 'y'"):
        begun(format="y")
    (tmp_path / "out" / SETTINGS).write_text('{"source": "/float", "done": true}')
    with pytest.raises(ArgumentError, match="another version"):
        begun()


# -- disks -------------------------------------------------------------------------------------------------------------
@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing(name: str, number: int, code: int) -> Iterator[None]:
    """The call of that number of a function of `os` fails as the system would let it."""
    real, calls = getattr(os, name), iter(range(number + 1))

    def call(*args, **options):
        if next(calls, None) == number:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.EPERM, errno.ESTALE)


def test_a_disk_that_fails_leaves_whole_files_and_a_run_that_goes_on(begun, tmp_path, tries):
    with begun() as folder:
        fill(folder)
    good, out, failed = contents(tmp_path / "out"), tmp_path / "out", 0
    assert len(good) == 4
    for random in tries(100):
        shutil.rmtree(out)
        kind = random.choice(("size", "fsync", "replace"))
        code = random.choice(CODES)
        trouble = at_most(random.randrange(2500)) if kind == "size" else failing(kind, random.randrange(12), code)
        try:
            with trouble, begun() as folder:
                fill(folder)
        except ArgumentError as error:
            failed += 1
            assert error.argument == "out" and "cannot be written" in error.constraint
            full = kind == "size" or code in (errno.ENOSPC, errno.EDQUOT)
            assert ("make room" in error.remedy) == full and str(out) in str(error.value)
            left = contents(out)
            assert all(data == good[name] for name, data in left.items() if name != SETTINGS) and not any(
                name.startswith(".") for name in left
            )
            if SETTINGS in left:
                assert "done" not in json.loads(left[SETTINGS])
        with begun() as folder:
            fill(folder)
        assert contents(out) == good
    assert failed > 0


@pytest.mark.parametrize("size", [300, 6_000, 12_500])
def test_quantize_on_a_full_disk_is_a_named_error_and_goes_on(source, whole, tmp_path, size):
    """From the first file to the index; the folder is not taken for a model meanwhile."""
    out = tmp_path / "out"
    with at_most(size), pytest.raises(ArgumentError, match=r"out = .*cannot be written \(File too large\); make room"):
        run(source, out)
    left = contents(out)
    assert "config.json" not in left and all(data == whole[name] for name, data in left.items() if name != SETTINGS)
    with pytest.raises(ArgumentError):
        load(out, device="cpu")
    run(source, out)
    assert contents(out) == whole


def test_each_file_that_cannot_be_written_names_the_folder(source, whole, tmp_path):
    """Layers, notes of them, index, configs, in the order of writing; each run begins where the one before ended."""
    out, named = tmp_path / "out", set()
    for number in range(4 * len(whole)):
        with failing("replace", number, errno.EIO):
            try:
                run(source, out)
                break
            except ArgumentError as error:
                assert error.argument == "out" and str(error.value).startswith(str(out))
                named.add(Path(error.value).name)
        shutil.rmtree(out)
    assert named == set(whole) and contents(out) == whole


def test_targets_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out"), Path("/dev/null/out")):
        with pytest.raises(ArgumentError, match="out = .*cannot be written .*; name a folder that can be written"):
            run(source, bad)
    saved = load(source, quantize="w4a16-g64", **FAST)
    with pytest.raises(ArgumentError, match="save_directory = .*cannot be written"):
        saved.save_pretrained(tmp_path / "file")
    with at_most(5000), pytest.raises(ArgumentError, match="save_directory = .*cannot be written .*make room"):
        saved.save_pretrained(tmp_path / "full")
    assert not any((tmp_path / "full").iterdir())
