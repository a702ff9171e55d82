"""Bytes, strides and offsets of a KV layout, against a numpy array of the same shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch import InvalidArgument
from kvcatch.kernels import KVLayout

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    scales = ["token", "head", "block"] if dtype == "float8_e4m3" else ["none"]
    return KVLayout(
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=16 * draw(st.integers(1, 5)),
        block_size=draw(st.sampled_from([1, 3, 8, 16])),
        dtype=dtype,  # type: ignore[arg-type]
        scale=draw(st.sampled_from(scales)),  # type: ignore[arg-type]
        order=draw(st.sampled_from(["block", "layer"])),  # type: ignore[arg-type]
    )


def test_smollm2_in_bfloat16() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert layout.area_bytes == 3 * 16 * 64 * 2 == 6144
    assert layout.block_bytes == 368_640
    assert layout.token_bytes == 23_040
    strides = layout.strides(100)
    assert (strides.block, strides.layer, strides.kv, strides.head, strides.token) == (
        368_640,
        12_288,
        6144,
        2048,
        128,
    )
    assert layout.pool_bytes(100) == 36_864_000


def test_a_block_of_two_mebibytes() -> None:
    assert KVLayout(num_layers=32, num_kv_heads=8, head_dim=128).block_bytes == 2 << 20


def test_scales_lie_behind_the_elements_and_are_padded() -> None:
    token = KVLayout(2, 3, 64, dtype="float8_e4m3", scale="token")
    assert token.area_bytes == 3 * 16 * 64 + 3 * 16 * 4
    block = KVLayout(2, 3, 64, dtype="float8_e4m3", scale="block")
    assert block.area_bytes == 3 * 16 * 64 + 16  # three scales of 4 bytes, padded
    head = KVLayout(2, 3, 64, dtype="float8_e4m3", scale="head")
    assert head.area_bytes == 3 * 16 * 64
    assert token.strides(4).scale == block.strides(4).scale == 3 * 16 * 64
    assert (token.strides(4).scale_head, token.strides(4).scale_token) == (64, 4)
    assert (block.strides(4).scale_head, block.strides(4).scale_token) == (4, 0)


@given(layouts(), st.integers(1, 5))
def test_areas_tile_the_pool_without_gap_or_overlap(layout: KVLayout, num_blocks: int) -> None:
    strides = layout.strides(num_blocks)
    starts = sorted(
        layout.offset(num_blocks, block, layer, kv)
        for block, layer, kv in itertools.product(
            range(num_blocks), range(layout.num_layers), range(2)
        )
    )
    assert starts == list(range(0, layout.pool_bytes(num_blocks), layout.area_bytes))
    assert all(start % 16 == 0 for start in starts)
    # Heads and tokens tile the elements of an area in C order.
    area = np.arange(layout.num_kv_heads * layout.block_size)
    offsets = [
        layout.offset(num_blocks, 0, 0, 0, head, token)
        for head in range(layout.num_kv_heads)
        for token in range(layout.block_size)
    ]
    assert (np.array(offsets) == area * strides.token).all()
    assert strides.scale == area.size * strides.token
    last = strides.scale + (layout.num_kv_heads - 1) * strides.scale_head
    last += (layout.block_size - 1) * strides.scale_token
    if layout.scale in ("token", "block"):
        assert last + 4 <= layout.area_bytes


@given(layouts(), st.integers(1, 5))
def test_a_block_is_its_regions(layout: KVLayout, num_blocks: int) -> None:
    assert layout.regions_per_block * layout.region_bytes == layout.block_bytes
    assert layout.pool_bytes(num_blocks) == num_blocks * layout.block_bytes
    strides = layout.strides(num_blocks)
    if layout.order == "block":
        assert layout.regions_per_block == 1
        assert strides.block == layout.block_bytes
    else:
        assert strides.layer == num_blocks * layout.region_bytes
        assert strides.block == layout.region_bytes


@pytest.mark.parametrize(
    ("heads", "ranks", "share"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (3, 3, 1), (1, 4, 1)]
)
def test_one_ranks_share_of_the_heads(heads: int, ranks: int, share: int) -> None:
    layout = KVLayout(4, heads, 64)
    for rank in range(ranks):
        assert layout.for_rank(ranks, rank).num_kv_heads == share
    total = sum(layout.for_rank(ranks, rank).block_bytes for rank in range(ranks))
    assert total == layout.block_bytes * max(1, ranks // heads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive whole number, not 0"),
        ({"num_kv_heads": -1}, "not -1"),
        ({"head_dim": 1.5}, "not 1.5"),
        ({"block_size": True}, "not True"),
        ({"head_dim": 1 << 31}, "head_dim"),
        ({"dtype": "int4"}, "dtype must be one of float32, float16, bfloat16, float8_e4m3"),
        ({"scale": "row"}, "scale must be one of"),
        ({"order": "head"}, "order must be one of block, layer"),
        ({"scale": "token"}, "a bfloat16 cache takes scale=none, not 'token'"),
        ({"dtype": "float8_e4m3"}, "takes scale=token, head or block"),
        ({"head_dim": 20}, "40 bytes: a head must be a multiple of 16"),
        ({"head_dim": 1032}, "head_dim 1032: at most 1024"),
        ({"block_size": 1 << 30, "num_kv_heads": 1 << 20}, "a block of"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, **arguments}
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        KVLayout(**fields)  # type: ignore[arg-type]


def test_pools_ranks_and_indexes_out_of_range_are_refused() -> None:
    layout = KVLayout(2, 3, 64)
    for num_blocks in (0, -1, 1.0, True, 1 << 40):
        with pytest.raises(InvalidArgument, match="num_blocks"):
            layout.pool_bytes(num_blocks)  # type: ignore[arg-type]
    for ranks, rank in ((0, 0), (2, 0), (3, 3), (3, -1), (4, 0)):
        with pytest.raises(InvalidArgument, match="rank"):
            layout.for_rank(ranks, rank)
    for index in ({"block": 4}, {"layer": 2}, {"kv": 2}, {"head": 3}, {"token": 16}, {"block": -1}):
        with pytest.raises(InvalidArgument, match="is outside"):
            layout.offset(4, **{"block": 0, "layer": 0, **index})


def test_numpy_sizes_do_not_overflow() -> None:
    layout = KVLayout(np.int32(100), np.int32(64), np.int32(256), np.int32(64))  # type: ignore[arg-type]
    assert layout.pool_bytes(10_000) == 10_000 * 2 * 100 * 64 * 256 * 64 * 2
