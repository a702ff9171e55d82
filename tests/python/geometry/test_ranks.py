"""How a model is split: what sums to the whole, what is replicated, what a sequence takes."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument
from kvcatch.geometry import (
    BUILT_IN,
    Attention,
    Demand,
    Geometry,
    GroupRule,
    Kind,
    KvDtype,
    Model,
    Parallel,
    State,
    read_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = st.sampled_from(sorted(BUILT_IN))
BF16 = KvDtype.parse("bf16", "bfloat16")


def spread(
    model: Model,
    block_size: int = 16,
    in_flight: int = 2048,
    state_blocks: int = 2,
    **parallel: Any,
) -> Geometry:
    demand = Demand(in_flight, parallel.get("dcp", 1), state_blocks)
    return Geometry(model, Parallel(**parallel), BF16, block_size, GroupRule(), demand)


class TestBytes:
    @given(layers=st.integers(1, 200), heads=st.integers(1, 128), dim=st.integers(1, 512))
    def test_linear_in_layers_heads_and_values(self, layers: int, heads: int, dim: int) -> None:
        one = Model.uniform(1, 1, 1).bytes_per_token(BF16)
        assert Model.uniform(layers, heads, dim).bytes_per_token(BF16) == layers * heads * dim * one

    @given(name=NAMES, data=st.data())
    def test_stages_sum_to_the_whole(self, name: str, data: st.DataObject) -> None:
        model = read_model(name)
        pp = data.draw(st.integers(1, min(8, model.num_layers)))
        cuts = data.draw(
            st.lists(
                st.integers(1, model.num_layers - 1), min_size=pp - 1, max_size=pp - 1, unique=True
            )
        )
        edges = [0, *sorted(cuts), model.num_layers]
        layers = tuple(b - a for a, b in pairwise(edges))
        for parallel in ({"pp": pp}, {"pp": pp, "pp_layers": layers}):
            ranks = spread(model, **parallel).ranks
            assert sum(rank.kv_bytes_per_token for rank in ranks) == model.bytes_per_token(BF16)
            assert [layer for rank in ranks for layer in rank.layers] == list(
                range(model.num_layers)
            )
            whole = spread(model).ranks[0]
            assert sum(r.state_bytes_per_sequence for r in ranks) == whole.state_bytes_per_sequence

    @given(kv_heads=st.sampled_from([1, 2, 4, 8, 16]), tp=st.sampled_from([1, 2, 4, 8, 16, 32]))
    def test_ranks_hold_the_whole_and_its_replicas(self, kv_heads: int, tp: int) -> None:
        model = Model.uniform(4, kv_heads, 64, attention_heads=32)
        rank = spread(model, tp=tp).ranks[0]
        assert rank.replicas == max(1, tp // kv_heads)
        assert tp * rank.kv_bytes_per_token == rank.replicas * model.bytes_per_token(BF16)

    def test_mla_is_not_split(self) -> None:
        model = read_model("deepseek-v3")
        for tp in (1, 2, 8, 16):
            rank = spread(model, tp=tp).ranks[0]
            assert (rank.kv_bytes_per_token, rank.replicas) == (70_272, tp)

    def test_dcp_shares_out_the_tokens(self) -> None:
        geometry = spread(read_model("deepseek-v3"), tp=8, dcp=4)
        assert geometry.ranks[0].replicas == 2
        assert geometry.blocks_for(16 * 4 * 100) == 100
        assert geometry.blocks_for(16 * 4 * 100 + 1) == 101


class TestBlocks:
    @given(length=st.integers(1, 10**6), block_size=st.sampled_from([1, 16, 24, 128]))
    def test_full(self, length: int, block_size: int) -> None:
        assert spread(Model.uniform(2, 2, 64), block_size).blocks_for(length) == ceil(
            length / block_size
        )

    @given(
        window=st.integers(1, 5000), in_flight=st.integers(1, 9000), length=st.integers(1, 10**5)
    )
    def test_a_window_saturates(self, window: int, in_flight: int, length: int) -> None:
        geometry = spread(Model.uniform(2, 2, 64, sliding_window=window), 16, in_flight)
        most = ceil((window - 1 + in_flight) / 16) + 1
        assert geometry.blocks_for(length) <= most
        assert geometry.blocks_for(length) <= ceil(length / 16)
        assert geometry.blocks_for(10**9) == geometry.blocks_for(10**8) == most

    def test_a_chunk_saturates(self) -> None:
        layer = Attention(Kind.CHUNKED_LOCAL, 2, 64, 64, 8192)
        geometry = spread(Model("x", "x", "bfloat16", 2, 0, ((layer,),)), in_flight=2048)
        assert geometry.blocks_for(100) == 7
        assert geometry.blocks_for(10**7) == (8192 + 2048) // 16

    @given(name=NAMES, a=st.integers(1, 10**6), b=st.integers(1, 10**6))
    def test_longer_never_takes_less(self, name: str, a: int, b: int) -> None:
        geometry = spread(read_model(name))
        shorter, longer = sorted((a, b))
        assert geometry.blocks_for(shorter) <= geometry.blocks_for(longer)

    @given(name=NAMES, num_blocks=st.integers(0, 10**6))
    def test_the_longest_request_is_the_longest(self, name: str, num_blocks: int) -> None:
        geometry = spread(read_model(name))
        length = geometry.longest_in(num_blocks)
        if length:
            assert geometry.blocks_for(length) <= num_blocks
        if length < 2**40:
            assert geometry.blocks_for(length + 1) > num_blocks

    @given(name=NAMES, tp=st.sampled_from([1, 2, 4]), pp=st.integers(1, 4))
    def test_every_cache_is_in_one_group_and_pages_are_alike(
        self, name: str, tp: int, pp: int
    ) -> None:
        model = read_model(name)
        try:
            geometry = spread(model, tp=tp, pp=pp)
        except InvalidArgument:
            assert name == "smollm2-135m"
            return
        grouped = sorted(layer for group in geometry.groups for layer in group.layers)
        expected = [index for index, layer in enumerate(model.layers) for _ in layer]
        assert grouped == expected
        if len(geometry.groups) > 1:
            assert len({page.num_bytes for group in geometry.groups for page in group.pages}) == 1


class TestGroups:
    def shapes(self, name: str, **more: Any) -> list[tuple[Kind, int]]:
        return [
            (group.kind, len(group.layers)) for group in spread(read_model(name), **more).groups
        ]

    def test_published_patterns(self) -> None:
        """Ten full and fifty-two windows make groups of ten; 1:1 makes two; a hybrid 3:1 makes four."""
        window, full, state = Kind.SLIDING_WINDOW, Kind.FULL, Kind.STATE
        assert sorted(self.shapes("gemma-3-27b")) == [
            (full, 10),
            *[(window, 8)] * 2,
            *[(window, 9)] * 4,
        ]
        assert self.shapes("gpt-oss-20b") == [(window, 12), (full, 12)]
        assert sorted(self.shapes("qwen3-next-80b-a3b")) == [(full, 12), *[(state, 12)] * 3]
        assert self.shapes("deepseek-v3.2") == [(Kind.MLA, 122)]

    def test_older_versions_pad_less(self) -> None:
        """13 full and 12 windows: one group each from 0.12 on, twelve and one beside before."""
        layers = tuple(
            (Attention(kind, 2, 64, 64, reach),)
            for kind, reach in [(Kind.FULL, 0)] * 13 + [(Kind.SLIDING_WINDOW, 128)] * 12
        )
        model = Model("x", "x", "bfloat16", 2, 0, layers)

        def counts(ratio: float) -> list[int]:
            geometry = Geometry(
                model, Parallel(), BF16, 16, GroupRule(padding_ratio=ratio), Demand(2048)
            )
            return [len(group.layers) for group in geometry.groups]

        assert counts(1.5) == counts(1.25) == [13, 12]
        assert counts(0) == [7, 6, 12]

    def test_an_engine_without_groups_keeps_everything(self) -> None:
        geometry = Geometry(
            read_model("gemma-3-4b"), Parallel(), BF16, 16, GroupRule(hybrid=False), Demand(2048)
        )
        assert [group.kind for group in geometry.groups] == [Kind.FULL]
        assert geometry.blocks_for(131_072) == 8192

    def test_states_enlarge_the_block(self) -> None:
        """Qwen3-Next in bf16: (49,152 + 1,048,576) bytes of state, 2048 per token: 544 tokens."""
        assert spread(read_model("qwen3-next-80b-a3b")).block_size == 544

    def test_unequal_pages_grow_or_are_padded(self) -> None:
        wide = Attention(Kind.FULL, 4, 128, 128)
        half = Attention(Kind.SLIDING_WINDOW, 2, 128, 128, 64)
        odd = Attention(Kind.CHUNKED_LOCAL, 3, 128, 128, 64)
        groups = spread(Model("x", "x", "bfloat16", 12, 0, ((wide,), (half,), (odd,)))).groups
        sizes = {group.kind: (group.block_size, group.pages[0].padding) for group in groups}
        assert sizes == {
            Kind.FULL: (16, 0),
            Kind.SLIDING_WINDOW: (32, 0),
            Kind.CHUNKED_LOCAL: (16, 16 * 512),
        }


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: Parallel(tp=0), "tp = 0"),
            (lambda: Parallel(pp=-1), "pp = -1"),
            (lambda: Parallel(tp=10**9), "tp = 1000000000"),
            (lambda: Parallel(tp=4, dcp=3), "dcp = 3: does not divide tp = 4"),
            (lambda: Parallel(pp=2, pp_layers=(1, 2, 3)), "3 stages, but pp = 2"),
            (lambda: Parallel(pp=2, pp_layers=(0, 2)), "pp_layers = 0"),
            (
                lambda: spread(Model.uniform(4, 8, 64), tp=3),
                "does not divide the 8 attention heads",
            ),
            (
                lambda: spread(Model.uniform(4, 6, 64, attention_heads=12), tp=4),
                "neither divides 6 KV heads",
            ),
            (lambda: spread(Model.uniform(4, 8, 64), pp=5), "only 4 layers"),
            (lambda: spread(Model.uniform(4, 8, 64), pp=2, pp_layers=(1, 2)), "sums to 3"),
            (lambda: spread(Model.uniform(4, 8, 64), tp=4, dcp=2), "gives 1 such rank"),
            (lambda: spread(read_model("gpt-oss-20b"), tp=16, dcp=2), "cannot share out"),
            (lambda: spread(Model.uniform(4, 8, 64), block_size=0), "block_size = 0"),
            (lambda: spread(Model.uniform(4, 8, 64)).blocks_for(0), "num_tokens = 0"),
            (lambda: spread(Model("x", "x", "bfloat16", 8, 0, ((), ()))), "no layer has a cache"),
            (
                lambda: State("mamba2", 64, 4, 6, 4, 2, 2).rank_bytes(4),
                "does not divide the 6 heads",
            ),
            (lambda: Model.uniform(0, 8, 64), "layers = 0"),
        ],
    )
    def test_one_clear_line(self, make: Callable[[], object], words: str) -> None:
        with pytest.raises(InvalidArgument, match=words):
            make()
