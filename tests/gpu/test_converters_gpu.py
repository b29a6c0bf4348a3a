"""Every converter's device source on the GPU, exhaustively over all half-words, bit for bit against its emulation."""

import numpy as np
import pytest
from terrazzo.layouts import CONVERTERS
from terrazzo.layouts.converters import arith

LOW = np.arange(1 << 16, dtype=np.uint32)
# every half-word in the low half and, by an odd multiplier, every half-word in the high half
WORDS = LOW | ((LOW * np.uint32(40503) + np.uint32(12345)) & np.uint32(0xFFFF)) << np.uint32(16)
THREADS = 256


def kernel(converter) -> str:
    """A kernel that converts one word in each thread; every parameter is an array beside the words."""
    arrays = "".join(f", const unsigned* {name}" for name in converter.params)
    values = "".join(f", {name}[i]" for name in converter.params)
    o = converter.outputs
    return f"""extern "C" __global__ void run_{converter.name}(const unsigned* w, unsigned* y{arrays}) {{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, r[{o}];
    {converter.device_name}(w[i], r{values});
    for (int j = 0; j < {o}; ++j) y[i * {o} + j] = r[j];
}}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Compile all converters once; returns (name, words, *params) -> output registers, all uint32 numpy."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the device sources cannot run here")
    source = "".join(c.device_source + kernel(c) for c in CONVERTERS.values())
    get_function = driver_functions(torch, source, tmp_path_factory.mktemp("converters"))

    def call(name, words, *params):
        arrays = [torch.from_numpy(np.ascontiguousarray(a).view(np.int32)).cuda() for a in (words, *params)]
        out = torch.zeros(words.size * CONVERTERS[name].outputs, dtype=torch.int32, device="cuda")
        get_function(f"run_{name}")(words.size // THREADS, [arrays[0], out, *arrays[1:]])
        torch.cuda.synchronize()
        return out.cpu().numpy().view(np.uint32).reshape(words.size, -1)

    return call


def driver_functions(torch, source: str, folder):
    """Compile with nvcc for the device at hand and launch through the CUDA driver; no host compiler, no extension."""
    import ctypes
    import shutil
    import subprocess

    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc was not found; pip install 'terrazzo[compile]'")
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    (folder / "all.cu").write_text(source)
    command = [nvcc, "-cubin", f"-arch={arch}", "-o", folder / "all.cubin", folder / "all.cu"]
    subprocess.run(command, check=True, capture_output=True)
    torch.zeros(1, device="cuda")  # makes torch's primary context current
    driver, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), (folder / "all.cubin").read_bytes()) == 0

    def get_function(name):
        function = ctypes.c_void_p()
        assert driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()) == 0

        def run(blocks, tensors):
            held = [ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors]
            arguments = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, None) == 0

        return run

    return get_function


def affine_params(name: str, seed: int) -> list[np.ndarray]:
    """Zero points 0 .. 16 and scales of all exponents for each word, as packed pairs; different for the two rows."""
    c, rng = CONVERTERS[name], np.random.default_rng(seed)
    encode = arith.to_f16 if c.operand == "float16" else arith.to_bf16
    low_exponent = -24 if c.operand == "float16" else -130
    registers = []
    for row in range(2):
        z = rng.integers(0, 17, WORDS.size).astype(np.float64)
        s = rng.uniform(1, 2, WORDS.size) * 2.0 ** rng.integers(low_exponent, 8, WORDS.size)
        b = z + c.param_bias[row] if name.endswith("exact") else -z * s
        registers += [encode(v).astype(np.uint32) * np.uint32(0x10001) for v in (b, s)]
    return registers


@pytest.mark.parametrize("name", [c.name for c in CONVERTERS.values() if not c.params])
def test_plain_converter(launch, name):
    assert (launch(name, WORDS) == CONVERTERS[name].emulate(WORDS)).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [c.name for c in CONVERTERS.values() if len(c.params) == 4])
def test_affine_converter(launch, name, seed):
    params = affine_params(name, seed)
    got, expected = launch(name, WORDS, *params), CONVERTERS[name].emulate(WORDS, *params)
    wrong = np.flatnonzero((got != expected).any(axis=1))
    assert wrong.size == 0, [hex(int(v[wrong[0]])) for v in (WORDS, *params)]


@pytest.mark.parametrize("name", [c.name for c in CONVERTERS.values() if c.params == ("s", "a")])
def test_lqq_converter(launch, name):
    """Every (s, a) that LiquidGEMM can produce, over all half-words."""
    rng = np.random.default_rng(0)
    s = rng.integers(1, 17, WORDS.size).astype(np.uint32)
    a = (rng.random(WORDS.size) * (256 - 15 * s)).astype(np.uint32) * np.uint32(0x01010101)
    assert (launch(name, WORDS, s, a) == CONVERTERS[name].emulate(WORDS, s, a)).all()


def test_packing_on_the_device_equals_the_host():
    """PackedLayout.pack and unpack of CUDA tensors, for every instance and ragged extents."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from terrazzo.layouts import INSTANCES, get_instance

    for name in INSTANCES:
        layout = get_instance(name)
        codes = np.random.default_rng(1).integers(0, 1 << layout.storage_bits, (200, 300), dtype=np.uint8)
        device = torch.from_numpy(codes).cuda()
        words = layout.pack(device)
        assert words.is_cuda and (words.cpu().numpy().view(np.uint32) == layout.pack(codes)).all()
        assert (layout.unpack(words, 200, 300).cpu().numpy() == codes).all()
