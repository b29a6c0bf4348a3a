"""What docs/tile-programs.md says of TileLang 0.1.15, seen in the CUDA text of the programs of tilelang_traps.py.

A test that fails after an update of TileLang is good news: the trap is gone, and its row of the page with it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from terrazzo.lowering.toolchain import find_nvcc, import_tilelang, toolchain

pytest.importorskip("tilelang", reason="tilelang is not installed: nothing can be lowered")
tilelang = import_tilelang()
import tilelang_traps as traps  # noqa: E402  builds programs with TileLang

pytestmark = pytest.mark.slow  # they change with TileLang's version alone

NO_WARPS = {"tl.disable_warp_specialized": True}
NO_SYNC = {"tl.disable_thread_storage_sync": True}


def lowered(program, arch: str = "sm_90a", **config: bool) -> str:
    """The kernel's CUDA text."""
    from tvm.target import Target

    target = Target({"kind": "cuda", "arch": arch})
    with tilelang.transform.PassContext(opt_level=3, config=config), target:
        made = tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    text = made.kernel_source
    return text[text.rindex('extern "C" __global__') :]


def test_specialization_by_hand_works():
    text = lowered(traps.by_hand(), **NO_WARPS)
    fill, consume = text.split("} else {")
    assert fill.count("tl::tma_load(") == 2 and "wait(" in fill and "__syncthreads" not in fill.split("if (128 <=")[1]
    assert "tl::wgmma_rs<" in consume and "tl::warpgroup_wait<0>()" in consume
    assert "tl::__sync_thread_partial(1, 128)" in consume and "__syncthreads" not in consume


@pytest.mark.parametrize(("program", "name"), [(traps.copy_with_barrier, "barrier"), (traps.pipelined_group, "group")])
def test_arguments_that_are_gone(program, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        program()


def test_a_copy_of_a_producer_is_no_bulk_copy():
    """It is one load and one store of each thread; the tile-level T.tma_copy in its place is what was meant."""
    text = lowered(traps.producer())
    assert "tma_load" not in text and "cp_async" not in text and "*(uint4*)(tile" in text
    assert "tl::tma_load(" in lowered(traps.producer(traps.T.tma_copy))


def test_a_pipeline_in_a_producer_does_not_lower():
    with pytest.raises(Exception, match="Versioned buffer load escaped pipeline stage context"):
        lowered(traps.producer(pipelined=True))


def test_sibling_blocks_get_a_barrier_in_between():
    """The producer waits for a stage that the consumer frees, who waits at the barrier: both wait for ever."""
    between = lambda text: text.split("tl::tma_load(")[1].split(".wait(")[0]
    assert "__syncthreads();" in between(lowered(traps.producer(traps.T.tma_copy, siblings=True)))
    for good in (
        lowered(traps.producer(traps.T.tma_copy, siblings=True), **NO_SYNC),
        lowered(traps.producer(traps.T.tma_copy)),
    ):
        assert "tl::tma_load(" in good and "__syncthreads();" not in between(good)


def test_three_stages_of_a_run_time_loop_do_not_lower():
    for options in (dict(stages=3), dict(order=[0, 1, 2], stage=[0, 0, 2])):
        with pytest.raises(TypeError, match=r"Downcast from tirx.Sub to ir.IntImm failed"):
            lowered(traps.pipelined_product(**options), "sm_80")


def test_one_stage_of_a_run_time_loop_waits_for_each_copy():
    """Two overlap a copy with the product before it; one waits for all of them first."""
    loop = lambda stages: lowered(traps.pipelined_product(stages), "sm_80").split("for (int k = 0")[1]
    assert loop(2).index("tl::cp_async_wait<1>()") < loop(2).index("tl::mma_sync<")
    assert "tl::cp_async_wait<0>()" in loop(1).split("tl::mma_sync<")[0]


def test_a_loop_over_an_annotated_fragment_vanishes_under_automatic_specialization():
    """Its layout names threads 0..127, which are the producer's now: no consumer writes the operand that it reads."""
    program = traps.pipelined_product(2, annotated=True)
    bad, good = lowered(program), lowered(program, **NO_WARPS)
    assert "tl::wgmma_rs<" in bad and not re.search(r"\(left \+ [^;]* = ", bad) and "half_t left[32]" in bad
    assert re.search(r"\(left \+ [^;]* = ", good)


def test_a_view_of_an_operand_is_read_beyond_its_end():
    """Sixteen words, and the third step's operand begins at word 16: its offset counts halves."""
    text = lowered(traps.viewed())
    assert "uint words[16];" in text and "ki < 4" in text
    assert "reinterpret_cast<const uint32_t*>(words + (ki * 8))" in text


def test_a_stage_is_given_back_before_its_words_are_used():
    """The arrive follows the loads, and neither it nor the wait clobbers memory: their order is ptxas's choice."""
    text = lowered(traps.words_of_a_stage())
    consumer = text.split("tl::warpgroup_reg_alloc")[1]
    load, release = consumer.index("*(uint4*)(words"), consumer.index(".arrive()")
    assert load < release < consumer.index("left[")
    header = Path(tilelang.__file__).parent / "src" / "tl_templates" / "cuda" / "barrier.h"
    for name in ("mbarrier_arrive(uint64_t &smem_barrier)", "mbarrier_wait(uint64_t &smem_barrier"):
        body = header.read_text().split(name)[1].split("TL_DEVICE")[0]
        assert "asm volatile" in body and '"memory"' not in body, name


@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
def test_orders_of_atomics(tmp_path):
    """Of T.atomic_add only the form that returns has the order; that of T.atomic_or does not assemble."""
    root = Path(tilelang.__file__).parent
    include = [f"-I{root / folder}" for folder in ("src", "3rdparty/cutlass/include")]

    def compiled(which: str, kind: str) -> subprocess.CompletedProcess[str]:
        from tvm.target import Target

        target = Target({"kind": "cuda", "arch": "sm_90a"})
        with tilelang.transform.PassContext(opt_level=3), target:
            made = tilelang.lower(
                traps.atomics(which), target=target, enable_host_codegen=False, enable_device_compile=False
            )
        (tmp_path / f"{which}.cu").write_text(made.kernel_source)
        command = [find_nvcc(), "-arch=sm_90a", "-std=c++17", "-w", f"-{kind}", *include, f"{which}.cu"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for which, ordered in (("add", False), ("add and return", True)):
        which = which.replace(" ", "_")
        assert not compiled(which, "ptx").returncode
        found = re.findall(r"(?:atom|red)\.\S*add\S*", (tmp_path / f"{which}.ptx").read_text())
        assert found and all(("acq_rel" in one) == ordered for one in found), found
    failed = compiled("or", "cubin")
    assert failed.returncode and "ptxas" in failed.stderr, failed.stderr[-500:]
