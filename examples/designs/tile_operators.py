"""What TileLang's tile-level operators cost: each in place of what the library's programs write by hand, timed in turn.

    python examples/designs/tile_operators.py               every pair; a GPU of sm_90a, some two minutes
    python examples/designs/tile_operators.py --lower       compile alone, without a GPU

words      packed words of stream_k by T.tma_copy, against bulk copies (stream_k_tma.py)
gemm       W4A16 by T.Pipelined and T.gemm (examples/tile_w4a16.py), by T.wgmma_gemm, and with order and stage of the
           pipeline given; against the library's program. With k = 128 it is an epilogue by T.Parallel and T.copy
norm       RMSNorm by T.Parallel and T.reduce_sum, against the library's
softmax    of rows by T.reduce_max and T.reduce_sum, against shuffles written out

Results are compared first: to the bit where instructions are the same, else with float64.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import stream_k_tma
import tilelang
import tilelang.language as T
from terrazzo.layouts.tilelang import fragment
from terrazzo.lowering.targets import Target
from terrazzo.ops.linear import stream_k
from tvm.target import Target as TvmTarget

sys.path.append(str(Path(__file__).parents[1]))
example = import_module("tile_w4a16")
BK, BLOCK, BN, GROUP, OWN_WARPS, convert = (
    getattr(example, name) for name in ("BK", "BLOCK", "BN", "GROUP", "OWN_WARPS", "convert")
)
ARCH = "sm_90a"
WORDS = {  # name -> n, k, m, fields of stream_k
    "16 tokens": (4096, 4096, 16, dict(block_tokens=16, warpgroups=1, stages=6, stage_k=128)),
    "64 tokens": (4096, 4096, 64, dict(block_tokens=64, warpgroups=2, stages=4, stage_k=128)),
    "256 tokens": (14336, 4096, 256, dict(block_tokens=128, warpgroups=2, stages=4, stage_k=64)),
}
ROW, ROWS, EPS = 4096, 1024, 1e-5


def words_program(module, n: int, k: int, changes: dict):
    """stream_k of `module` for known sizes, no tile of which is shared."""
    facts = dict(
        bias=False, cluster=1, dtype="float16", group=GROUP, numerics="exact", per_sm=1, raster=8, row_blocks=1,
        scale_dtype="float16", symmetric=False, whole=True,
    )  # fmt: skip
    return module.build(Target.parse(ARCH), n=n, k=k, **facts | changes)


def gemm_program(n: int, k: int, block_tokens: int, *, asynchronous: bool = False, ordered: bool = False):
    """examples/tile_w4a16.py with one thing changed. asynchronous: T.wgmma_gemm, waited for where its stage ends.
    ordered: order and stage of the pipeline's statements are given."""
    m, stages = T.dynamic("m"), 3
    statements = dict(
        order=[0, 1, 2, 3, 4, 5], stage=[0, 0, 0, 2, 2, 2]
    )  # three copies, two loops of `convert`, T.gemm
    given = statements if ordered else dict(num_stages=stages)

    @T.macro
    def multiply(Ws, Ss, Xs, A, acc):
        convert(Ws, Ss, A)
        if asynchronous:
            T.wgmma_gemm(A, Xs, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.wait_wgmma(0)
        else:
            T.gemm(A, Xs, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.prim_func
    def main(
        X: T.Tensor((m, k), "float16"),
        W: T.Tensor((k // BK, n // BLOCK.block_rows, BLOCK.words_per_block), "uint32"),
        S: T.Tensor((k // GROUP, n), "float16"),
        Y: T.Tensor((m, n), "float16"),
    ):
        with T.Kernel(T.ceildiv(m, block_tokens), n // BN, threads=2 * BLOCK.threads) as (bm, bn):
            Xs = T.alloc_shared((block_tokens, BK), "float16")
            Ws = T.alloc_shared((2, BLOCK.words_per_block), "uint32")
            Ss = T.alloc_shared((BN,), "float16")
            Ys = T.alloc_shared((block_tokens, BN), "float16")
            A = T.alloc_fragment((BN, BK), "float16")
            acc = T.alloc_fragment((BN, block_tokens), "float32")
            T.annotate_layout({A: fragment(BLOCK.fragment, BN, BK)})
            T.clear(acc)
            for step in T.Pipelined(k // BK, **given):
                T.copy(X[bm * block_tokens, step * BK], Xs)
                T.copy(W[step, bn * 2, 0], Ws)
                T.copy(S[step * BK // GROUP, bn * BN], Ss)
                multiply(Ws, Ss, Xs, A, acc)
            for row, token in T.Parallel(BN, block_tokens):
                Ys[token, row] = acc[row, token]
            T.copy(Ys, Y[bm * block_tokens, bn * BN])

    return main


def norm_program(k: int, rows: int):
    """y = x rsqrt(mean(x^2) + eps) w in TileLang's words; `rows` rows of a CTA of 256 threads."""
    m = T.dynamic("m")

    @T.prim_func
    def main(
        X: T.Tensor((m, k), "float16"), W: T.Tensor((k,), "float16"), Y: T.Tensor((m, k), "float16"), eps: T.float32
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=256) as block:
            x = T.alloc_fragment((rows, k), "float16")
            square = T.alloc_fragment((rows, k), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(X[block * rows, 0], x)
            for i, j in T.Parallel(rows, k):
                square[i, j] = T.cast(x[i, j], "float32") * T.cast(x[i, j], "float32")
            T.reduce_sum(square, total, dim=1)
            for i in T.Parallel(rows):
                total[i] = T.rsqrt(total[i] / k + eps)
            for i, j in T.Parallel(rows, k):
                x[i, j] = T.cast(T.cast(x[i, j], "float32") * total[i] * T.cast(W[j], "float32"), "float16")
            T.copy(x, Y[block * rows, 0])

    return main


def softmax_program(k: int, by_hand: bool):
    """Softmax of rows of k float32; a row is a CTA's of 128 threads. by_hand: shuffles and shared words, else
    T.reduce."""
    m, threads = T.dynamic("m"), 128
    each = k // threads

    @T.macro
    def join(value, words, tx, largest):
        for d in (16, 8, 4, 2, 1):
            other = T.shfl_xor(value[0], d)
            value[0] = T.max(value[0], other) if largest else value[0] + other
        if tx % 32 == 0:
            words[tx // 32] = value[0]
        T.sync_threads()
        value[0] = words[0]
        for i in (1, 2, 3):
            value[0] = T.max(value[0], words[i]) if largest else value[0] + words[i]

    @T.prim_func
    def written(X: T.Tensor((m, k), "float32"), Y: T.Tensor((m, k), "float32")):
        with T.Kernel(m, threads=threads) as row:
            x = T.alloc_local((each,), "float32")
            value = T.alloc_local((1,), "float32")
            words = T.alloc_shared((8,), "float32")
            tx = T.get_thread_binding()
            for v in T.unroll(each // 4):
                for e in T.vectorized(4):
                    x[v * 4 + e] = X[row, (v * threads + tx) * 4 + e]
            value[0] = x[0]
            for i in T.unroll(each - 1):
                value[0] = T.max(value[0], x[i + 1])
            join(value, words, tx, True)
            for i in T.unroll(each):
                x[i] = T.exp(x[i] - value[0])
            value[0] = 0.0
            for i in T.unroll(each):
                value[0] = value[0] + x[i]
            T.sync_threads()
            join(value, words, tx, False)
            for v in T.unroll(each // 4):
                for e in T.vectorized(4):
                    Y[row, (v * threads + tx) * 4 + e] = x[v * 4 + e] / value[0]

    @T.prim_func
    def reduced(X: T.Tensor((m, k), "float32"), Y: T.Tensor((m, k), "float32")):
        with T.Kernel(m, threads=threads) as row:
            x = T.alloc_fragment((1, k), "float32")
            most = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[row, 0], x)
            T.reduce_max(x, most, dim=1)
            for i, j in T.Parallel(1, k):
                x[i, j] = T.exp(x[i, j] - most[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(1, k):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[row, 0])

    return written if by_hand else reduced


def compiled(program, configs):
    return tilelang.compile(program, target=TvmTarget({"kind": "cuda", "arch": ARCH}), pass_configs=dict(configs))


def programs() -> dict[str, tuple]:
    """name -> (prim_func, pass configs)."""
    made = {}
    for name, (n, k, _, changes) in WORDS.items():
        for way, module in (("bulk", stream_k), ("T.tma_copy", stream_k_tma)):
            made[f"words {name} {way}"] = words_program(module, n, k, changes), module.PASS_CONFIGS
    own = tuple(OWN_WARPS.items())
    for k in (4096, 128):
        made[f"gemm {k} T.gemm"] = example.tile_w4a16(4096, k), own
    made["gemm 4096 T.wgmma_gemm"] = gemm_program(4096, 4096, 64, asynchronous=True), own
    made["gemm 4096 order, stage"] = gemm_program(4096, 4096, 64, ordered=True), own
    made["norm T.reduce_sum"] = norm_program(ROW, 1), own
    made["softmax by hand"] = softmax_program(ROW // 4, True), own
    made["softmax T.reduce"] = softmax_program(ROW // 4, False), own
    return made


def compile_all(made: dict[str, tuple]) -> dict[str, object]:
    """name -> kernel, or the error, which the table names."""

    def one(name: str):
        try:
            return compiled(*made[name])
        except Exception as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        return dict(zip(made, pool.map(one, made)))


def layouts_agree() -> bool:
    """Whether the fragment that `layouts` derives is the one that TileLang's emitter makes for operand A of wgmma."""
    from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter
    from tvm.tirx import decl_buffer

    emitter = TensorCoreIntrinEmitter(
        a_dtype="float16", b_dtype="float16", accum_dtype="float32", a_transposed=False, b_transposed=True,
        block_row_warps=8, block_col_warps=1, warp_row_tiles=16, warp_col_tiles=64, chunk=BK,
    )  # fmt: skip
    made = emitter.make_mma_load_layout(decl_buffer((BN, BK), "float16", scope="local.fragment"), "A")
    return bool(made.is_equal(fragment(BLOCK.fragment, BN, BK)))


def calls_of(kernels: dict[str, object]) -> tuple[dict[str, dict[str, Callable]], list[str]]:
    """group -> way -> call; and what was compared."""
    import torch
    from terrazzo.ops import norm, w4a16

    rng, said, groups = torch.Generator("cuda").manual_seed(1), [], {}
    rand = lambda *shape: torch.randn(*shape, generator=rng, device="cuda")
    for name, (n, k, m, changes) in WORDS.items():
        weight = w4a16.quantize_weight(rand(n, k).half(), group_size=GROUP)
        packed, x = weight.pack(target=ARCH), rand(m, k).half() / 64
        cta, tokens = changes["warpgroups"], changes["block_tokens"]
        space, sem = torch.empty(132, cta, tokens // 8, 128, 4, device="cuda"), torch.zeros(132, 4 * cta).int().cuda()
        bias, ways, found = torch.zeros(1).half().cuda(), {}, {}
        for way in ("bulk", "T.tma_copy"):
            kernel, y = kernels[f"words {name} {way}"], torch.full((m, n), float("nan")).half().cuda()
            given = (x, packed.words, packed.params, bias, space, sem, y, 0)
            ways[way], found[way] = (lambda kernel=kernel, given=given: kernel(*given)), y
        groups[f"words, {name}"] = ways
        said.append(
            (
                f"words, {name}",
                lambda found=found, ways=ways: (
                    [run() for run in ways.values()],
                    torch.equal(found["bulk"], found["T.tma_copy"]),
                )[1],
            )
        )
    for k, m in ((4096, 64), (4096, 512), (128, 2048)):
        codes = torch.randint(0, 16, (4096, k), dtype=torch.uint8)
        words = torch.from_numpy(BLOCK.pack(codes.numpy())).cuda()
        s, x = torch.rand(k // GROUP, 4096, device="cuda").half(), rand(m, k).half() / 64
        right = x.double() @ ((codes.cuda().double() - 8) * s.double().T.repeat_interleave(GROUP, 1)).T
        weight = w4a16.QuantizedWeight.canonical(codes.cuda(), s.T.contiguous(), None, group_size=GROUP)
        packed = weight.pack()
        ways = {"library": lambda x=x, packed=packed: w4a16.gemm(x, packed)}
        for way in ("T.gemm", "T.wgmma_gemm", "order, stage"):
            if (kernel := kernels.get(f"gemm {k} {way}")) is not None:
                y = torch.full((m, 4096), float("nan")).half().cuda()
                ways[way] = lambda kernel=kernel, given=(x, words, s, y), y=y: (kernel(*given), y)[1]
        groups[f"gemm, k {k}, {m} tokens"] = ways
        said.append(
            (
                f"gemm, k {k}, {m} tokens",
                lambda ways=ways, right=right: {
                    way: f"{float((run().double() - right).abs().max() / right.abs().max()):.1e}"
                    for way, run in ways.items()
                },
            )
        )
    x, w = rand(ROWS, ROW).half(), rand(ROW).half()
    y, kernel = torch.empty_like(x), kernels["norm T.reduce_sum"]
    groups[f"norm, {ROWS} rows"] = {
        "library": lambda: norm.rms_norm(x, w, eps=EPS), "T.reduce_sum": lambda: kernel(x, w, y, EPS)
    }  # fmt: skip
    right = torch.nn.functional.rms_norm(x.double(), (ROW,), w.double(), EPS)
    said.append(("norm", lambda: (kernel(x, w, y, EPS), f"{float((y.double() - right).abs().max()):.1e}")[1]))
    z, ways = rand(16 * ROWS, ROW // 4), {}
    for way in ("by hand", "T.reduce"):
        out = torch.empty_like(z)
        ways[way] = lambda kernel=kernels[f"softmax {way}"], out=out: (kernel(z, out), out)[1]
    groups[f"softmax, {16 * ROWS} rows"] = ways
    said.append(
        (
            "softmax",
            lambda: {
                way: f"{float((run().double() - z.double().softmax(1)).abs().max()):.1e}" for way, run in ways.items()
            },
        )
    )
    return groups, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="compile alone")
    asked = parser.parse_args()
    kernels = compile_all(programs())
    for name, kernel in kernels.items():
        if isinstance(kernel, Exception):
            print(f"{name}: {type(kernel).__name__}: {str(kernel)[-300:]}")
        elif asked.lower:
            print(f"{name}: compiled")
    print(f"fragment of layouts is the emitter's: {layouts_agree()}")
    if asked.lower:
        return 0
    from terrazzo.autotune.measure import time_in_turn

    groups, said = calls_of({name: kernel for name, kernel in kernels.items() if not isinstance(kernel, Exception)})
    for name, check in said:
        print(f"{name}: {check()}", flush=True)
    print("\n| what | way | us | of the first |\n|---|---|---|---|")
    for group, ways in groups.items():
        times = time_in_turn({way: [run] for way, run in ways.items()}, budget_ms=60)
        first = next(iter(times.values()))
        for way, timing in times.items():
            failed = isinstance(timing, Exception)
            said = f"{type(timing).__name__} | " if failed else f"{timing.us:.2f} | {timing.us / first.us:.3f}"
            print(f"| {group} | {way} | {said} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
