"""Bundles QServe's kernels for a GPU host without a network: `python tools/pack_qserve.py [WHEEL]`.

It takes them from sglang-kernel 0.4.5 (a wheel of 383 MB, for torch 2.11 and CUDA 13), keeps of their library the GPU
code of sm_90 alone, and writes .peers/qserve.so.xz, 4 MB. benchmarks/peers/byte_inputs.py unpacks and loads it.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEEL, DIGEST = "sglang-kernel==0.4.5", "5927a14dfff92ced8b1f7c7d5844144bc574ec58e604d4fd53e6f53c709003a8"
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
LIBRARY = "sgl_kernel/sm90/common_ops.abi3.so"
OUT = ROOT / ".peers" / "qserve.so.xz"


def download(folder: Path) -> Path:
    """The wheel, its digest checked by pip."""
    wanted = folder / "wheels.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{DIGEST}\n", encoding="utf-8")
    words = ["download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes", "--python-version", "3.12"]
    words += ["-r", str(wanted), "-d", str(folder), *(f"--platform={platform}" for platform in PLATFORMS)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return next(folder.glob("*.whl"))


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "tools" / "pack_vllm_site"))
    import fatbin  # which keeps one architecture of a library's code

    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(1) as pool:
        wheel = Path(argv[0]) if argv else download(Path(made))
        library, kept = fatbin.slim(zipfile.ZipFile(wheel).read(LIBRARY), pool, Path(made))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(lzma.compress(library))
    print(f"{OUT}: {OUT.stat().st_size / 2**20:.1f} MiB, {kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
