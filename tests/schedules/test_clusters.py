"""Clusters whose CTAs share a tile: what is refused, and where the sums of others land."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.tiles.cluster_shares import cluster_macros
from terrazzo.ops.tiles.resident import cluster_shape
from terrazzo.ops.tiles.scheduler import ring_macros
from terrazzo.schedules import clusters, linear_spaces, small_batch, stream_k
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.stream_k import StreamK

H200, A100 = Target.parse("nvidia/nvidia-h200"), Target.parse("sm_80")
PROBLEM = Gemm(4096, 4096, 1, 192)
RING = dict(dtype="float32", units=32, stages=6, each=1, stage_bytes=16384, rings=ring_macros(stages=6))


@given(
    nbytes=st.integers(1, 200_000), stages=st.integers(2, 16), stage_bytes=st.sampled_from([2048, 8192, 32768]),
    first=st.integers(1, 300), more=st.integers(0, 1),
)  # fmt: skip
def test_letters_keep_away_from_the_last_products(nbytes, stages, stage_bytes, first, more):
    """The inbox lies inside of the ring, and apart from the stages read last wherever such a place exists."""
    run = clusters.inbox(nbytes, stages, stage_bytes, first, first + more)
    count = -(-nbytes // stage_bytes)
    assert len(run) == (count if count <= stages else 0) and (not run or 0 <= run.start < run.stop <= stages)
    late = {number % stages for number in range(max(first - 3, 0), first + more)}
    apart = [s for s in range(stages - count + 1) if not late & set(range(s, s + count))]
    assert not apart or not late & set(run)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(cluster=16), "clusters of 16"),
        (dict(cluster=3), "do not divide"),
        (dict(cluster=8, block_tokens=64, warpgroups=3, row_blocks=2, stages=3), "a ring has"),
        (dict(cluster=2, per_sm=2), "CTAs on an SM"),
    ],
)
def test_a_schedule_whose_tiles_cannot_be_shared_is_refused(change, said):
    schedule = stream_k.StreamK(
        **{**dict(block_tokens=128, warpgroups=2, row_blocks=1, stages=4, stage_k=128), **change}
    )
    assert said in schedule.cluster_refusal(PROBLEM, H200)
    assert linear_spaces.of(PROBLEM).refusal("stream_k", schedule, H200, 128)


def test_older_gpus_have_no_clusters():
    problem = Gemm.of_bytes(4096, 4096, 64)
    assert not StreamK(128, 2, 1, 4, cluster=2, form="s8 integer").cluster_refusal(problem, H200)
    assert "sm_80 has none" in stream_k.StreamK(128, 2, 1, 4, 128, cluster=2).cluster_refusal(PROBLEM, A100)
    assert "cluster" in StreamK(64, 2, 1, 4, form="s8 integer").params()


@pytest.mark.parametrize("form", ["w4a16", "w4a8"])
@given(
    n=st.integers(1, 9000), k=st.integers(16, 9000), m=st.integers(1, 4000), experts=st.sampled_from([1, 2, 4, 8, 64])
)
def test_experts_do_not_share_tiles_by_clusters(form, n, k, m, experts):
    """Which CTAs share a tile is found on the device: neither the heuristic nor a record may say it."""
    of = Gemm(n, k, 1, 192, experts=experts) if form == "w4a16" else Gemm.of_bytes(n, k, 64, experts=experts)
    space = linear_spaces.of(of)
    schedule = space.heuristic(H200, m)[1]
    assert schedule.cluster == 1 and not space.refusal("grouped", schedule, H200, m)
    assert "cluster" in space.refusal("grouped", replace(schedule, cluster=2), H200, m)


@pytest.mark.parametrize(
    ("change", "said"),
    [(dict(kc=1), "cannot be pairs"), (dict(cluster=2), "cannot be pairs"), (dict(kc=9), "9")],
)
def test_small_batches_that_cannot_be_joined_are_refused(change, said):
    schedule = small_batch.SmallBatch(
        **{**dict(token_tiles=1, kc=2, nc=12, warps=2, chunk=2, stages=2, joined=True), **change}
    )
    assert said in linear_spaces.small_batch_refusal(schedule, PROBLEM, H200, 4)
    with pytest.raises(ArgumentError, match="joined"):
        cluster_shape(H200, schedule.kc, schedule.cluster, True)


@pytest.mark.parametrize("tile", [dict(row_blocks=1, block_tokens=16), dict(row_blocks=2, block_tokens=256)])
def test_a_program_without_room_for_the_sums_of_others_is_not_built(tile):
    with pytest.raises(ArgumentError, match="cluster"):
        cluster_macros(size=2, warpgroups=4, **tile, **RING)
