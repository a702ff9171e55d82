"""Metrics bodies: right values, renamed names, several ranks, and bodies that must not be believed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from observe_make import vllm_body

from kvcatch.observe import EngineSample, MetricsError, Reader
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.prometheus import MAX_BODY_BYTES, parse_labels, parse_line

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNNING = {"num_requests_running": 3.0, "num_requests_waiting": 0.0}


def read(body: str | bytes) -> list[EngineSample]:
    return Reader("http://engine/metrics").read(body, 1.0)


def one(body: str) -> EngineSample:
    (sample,) = read(body)
    return sample


class TestRenames:
    @pytest.mark.parametrize(
        "values",
        [
            {"gpu_cache_usage_perc": 0.25},
            {"kv_cache_usage_perc": 0.25},
            {"gpu_cache_usage_perc": 0.0, "kv_cache_usage_perc": 0.25},
            {"kv_cache_usage_perc": 0.25, "gpu_cache_usage_perc": 0.0},
        ],
        ids=["before", "after", "both", "both, other order"],
    )
    def test_kv_usage(self, values: dict[str, float]) -> None:
        assert one(vllm_body(RUNNING | values)).kv_usage_share == 0.25

    @pytest.mark.parametrize(
        "name", ["inter_token_latency_seconds", "time_per_output_token_seconds"]
    )
    def test_vllm_29330_inter_token_latency(self, name: str) -> None:
        sample = one(vllm_body({**RUNNING, f"{name}_sum": 4.5, f"{name}_count": 9}))
        assert (sample.itl_seconds_sum, sample.itl_count) == (4.5, 9)

    @pytest.mark.parametrize("prefix", ["", "gpu_"])
    @pytest.mark.parametrize("suffix", ["", "_total"])
    def test_prefix_counters(self, prefix: str, suffix: str) -> None:
        names = {
            f"{prefix}prefix_cache_queries{suffix}": 80.0,
            f"{prefix}prefix_cache_hits{suffix}": 20.0,
        }
        sample = one(vllm_body(RUNNING | names))
        assert (sample.prefix_query_tokens_total, sample.prefix_hit_tokens_total) == (80, 20)

    @pytest.mark.parametrize("prefix", ["trtllm_", "trtllm:"])
    def test_trtllm(self, prefix: str) -> None:
        body = (
            f"{prefix}kv_cache_max_blocks 7240\n{prefix}kv_cache_used_blocks 5495\n"
            f"{prefix}kv_cache_free_blocks 1745\n{prefix}num_requests_running 5\n"
        )
        sample = one(body)
        assert sample.kv_usage_share == pytest.approx(5495 / 7240)
        assert sample.waiting_requests is None

    @pytest.mark.parametrize("name", ["kvstats_gpu_cache_usage_percent", "gpu_cache_usage_percent"])
    def test_dynamo(self, name: str) -> None:
        body = f'dynamo_component_{name}{{dynamo_component="decode"}} 0.5\n'
        assert one(body).kv_usage_share == 0.5

    def test_what_is_not_exported_is_unknown(self) -> None:
        sample = one(vllm_body({"num_requests_running": 0.0}))
        known = {name for name, value in sample.to_dict().items() if value is not None}
        assert known == {"t_seconds", "engine", "replica", "endpoint", "running_requests"}
        assert sample.running_requests == 0

    def test_the_version_is_read_from_the_names(self) -> None:
        vllm = FAMILIES["vllm"]
        reader = Reader("x")
        reader.read(vllm_body({"gpu_cache_usage_perc": 0.1, "kv_cache_usage_perc": 0.1}), 0)
        assert vllm.version_range(reader.names["vllm"]) == ((0, 9, 2), (0, 11, 2))
        assert vllm.version_range({"vllm:admission_rejections"}) == ((0, 32, 0), None)


class TestReplicas:
    def test_ranks_are_kept_apart(self) -> None:
        body = vllm_body({"num_requests_running": 1.0}, 'model_name="m",engine="0"') + vllm_body(
            {"num_requests_running": 7.0}, 'model_name="m",engine="1"'
        )
        samples = read(body)
        assert [(s.replica, s.running_requests) for s in samples] == [
            ("model_name=m,engine=0", 1),
            ("model_name=m,engine=1", 7),
        ]

    def test_two_engines_behind_one_endpoint(self) -> None:
        body = vllm_body(RUNNING) + "lmcache:pinned_memory_objs_count 4\n"
        assert [sample.engine for sample in read(body)] == ["vllm", "lmcache"]

    def test_vllm_28792_the_copies_of_eight_api_processes_are_one_value(self) -> None:
        values = {
            f'kv_cache_usage_perc|pid="{pid}"': 0.653 if pid == 2 else 0.0 for pid in range(8)
        }
        assert one(vllm_body(values)).kv_usage_share == 0.653

    def test_counters_by_reason_add_up(self) -> None:
        values = {
            f'request_success_total|finished_reason="{r}"': n
            for r, n in (("stop", 3), ("length", 4))
        }
        assert one(vllm_body(values)).finished_total == 7

    def test_configuration_goes_to_its_own_engine(self) -> None:
        info = 'num_gpu_blocks="120",block_size="32",kv_cache_size_tokens="3840",kv_cache_max_concurrency="1.875"'
        body = vllm_body(
            {"num_requests_running": 1.0, "kv_cache_usage_perc": 0.689076}, info=info
        ) + vllm_body({"num_requests_running": 1.0}, 'model_name="m",engine="1"')
        first, second = read(body)
        assert (first.num_blocks, first.free_blocks, first.max_model_len_tokens) == (120, 37, 2048)
        assert second.num_blocks is None

    def test_vllm_51163_blocks_times_block_size_is_no_capacity(self) -> None:
        sample = one(vllm_body(RUNNING, info='num_gpu_blocks="1000",block_size="4"'))
        assert sample.block_size_tokens == 4
        assert sample.pool_tokens is None

    def test_vllm_42966_the_effective_block_size_is_believed(self) -> None:
        info = 'block_size="16",effective_attention_block_size="528"'
        assert one(vllm_body(RUNNING, info=info)).block_size_tokens == 528

    def test_the_longest_prompt_comes_from_buckets(self) -> None:
        values = {
            f'request_prompt_tokens_bucket|le="{le}"': n
            for le, n in (("100.0", 2), ("500.0", 9), ("1000.0", 9), ("+Inf", 9))
        }
        assert one(vllm_body(values)).largest_prompt_tokens == 500

    def test_sglang_priorities(self) -> None:
        body = "".join(
            f'sglang:num_queue_reqs{{model_name="m",tp_rank="0",priority="{p}"}} {n}\n'
            for p, n in (("1", 2), ("2", 3))
        )
        assert one(body).waiting_requests == 5
        body += 'sglang:num_queue_reqs{model_name="m",tp_rank="0"} 6\n'
        assert one(body).waiting_requests == 6

    def test_kvcatch_names_its_gate(self) -> None:
        body = (
            'kvcatch_blocks{model_name="m",state="free"} 10\nkvcatch_blocks{model_name="m",state="cached"} 20\n'
            'kvcatch_blocks{model_name="m",state="active"} 70\nkvcatch_num_blocks{model_name="m"} 100\n'
            'kvcatch_head_refused{model_name="m",gate="worst_case"} 1\n'
        )
        sample = one(body)
        assert sample.head_gate == "worst_case"
        assert sample.kv_usage_share == 0.7
        assert sample.free_blocks == 30


class TestBadBodies:
    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ("<!DOCTYPE html>\n<html><body>502</body></html>\n", "an HTML page"),
            ("", "an empty body"),
            (" \n", "an empty body"),
            (vllm_body(RUNNING)[:-4], "cut off after"),
            (vllm_body(RUNNING) + vllm_body(RUNNING), "is there twice"),
            (
                vllm_body(RUNNING) + vllm_body(RUNNING, 'model_name="m",engine="0"'),
                "is there twice",
            ),
            (vllm_body({"num_requests_running": float("nan")}), "is nan: not a count"),
            (vllm_body({"num_requests_running": float("inf")}), "is inf: not a count"),
            (vllm_body({"num_requests_running": -1}), "is -1"),
            ("vllm:num_requests_running x\n", "has the value 'x'"),
            ("vllm:num_requests_running 1_0\n", "has the value '1_0'"),
            ('vllm:num_requests_running{a="b} 1\n', "malformed series"),
            ("process_cpu_seconds_total 1\n", "no metrics of an engine that kvcatch knows"),
            ("vllm:some_new_name 1\n", "none of the known names of vllm"),
        ],
    )
    def test_each_is_one_line_that_names_the_endpoint(self, body: str, says: str) -> None:
        with pytest.raises(MetricsError, match=r"^http://engine/metrics: ") as error:
            read(body)
        assert says in str(error.value)
        assert "\n" not in str(error.value)

    def test_too_large(self) -> None:
        with pytest.raises(MetricsError, match="more than 67,108,864"):
            read(b"x" * (MAX_BODY_BYTES + 1))

    def test_a_ratio_of_nothing_is_unknown(self) -> None:
        sample = one(vllm_body({**RUNNING, "gpu_prefix_cache_hit_rate": float("nan")}))
        assert sample.hit_share is None

    def test_a_reader_goes_on_after_a_bad_body(self) -> None:
        reader = Reader("x")
        good = vllm_body(RUNNING)
        reader.read(good, 0)
        with pytest.raises(MetricsError):
            reader.read(good + good, 1)
        (sample,) = reader.read(good, 2)
        assert sample.running_requests == 3

    def test_a_series_that_is_gone_is_unknown(self) -> None:
        reader = Reader("x")
        reader.read(vllm_body(RUNNING), 0)
        (sample,) = reader.read(vllm_body({"num_requests_running": 1}), 1)
        assert sample.waiting_requests is None


def test_timestamps_exemplars_and_odd_labels() -> None:
    body = (
        'vllm:num_requests_running{model_name="a } b \\"c\\" # d",engine="0"} 2 1700000000000\n'
        'vllm:prompt_tokens_total{model_name="a } b \\"c\\" # d",engine="0"} 5 # {trace="x"} 1.0 17\n'
    )
    sample = one(body)
    assert (sample.running_requests, sample.prompt_tokens_total) == (2, 5)
    assert sample.replica == 'model_name=a } b "c" # d,engine=0'


def test_labels() -> None:
    assert parse_labels('a{b="x,y",c="\\n\\\\"}') == ("a", {"b": "x,y", "c": "\n\\"})
    assert parse_labels('a{b="1",b="2"}') is None
    assert parse_line("a 1 2 # {x}") == ("a", "1")


def test_fuzzed_bodies_neither_crash_nor_invent() -> None:
    """10,000 mutations: a body is refused, or each value is one that is written in it."""
    rng = random.Random(20)
    names = [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
    ]
    values = {
        "num_requests_running": 7,
        "num_requests_waiting": 11,
        "kv_cache_usage_perc": 0.625,
        "num_preemptions_total": 13,
    }
    base = vllm_body(
        {
            **{name: values[name] for name in names},
            'num_requests_waiting_by_reason|reason="capacity"': 9,
        },
        info='num_gpu_blocks="120",block_size="32"',
    ) + vllm_body({"num_requests_running": 5}, 'engine="1",model_name="m"')
    refused = read_well = 0
    for _ in range(10_000):
        body = mutate(base, rng)
        try:
            samples = Reader("x").read(body.encode("utf-8", errors="replace"), 0.0)
        except MetricsError as error:
            refused += "\n" not in str(error)
            continue
        read_well += 1
        written = set(_numbers(body))
        for sample in samples:
            for field in ("running_requests", "waiting_requests", "kv_usage_share"):
                value = getattr(sample, field)
                assert value is None or value in written, (field, body)
            assert sample.preemptions_total != 0 or 0.0 in written
    assert refused > 1_500
    assert read_well > 1_500


def _numbers(body: str) -> Iterator[float]:
    for line in body.replace("\r", "").split("\n"):
        parsed = parse_line(line)
        if parsed is not None:
            try:
                yield float(parsed[1])
            except ValueError:
                continue


def mutate(body: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(8)
        lines = body.split("\n")
        at = rng.randrange(len(body) + 1)
        if kind == 0:
            body = body[:at]
        elif kind == 1:
            body = body[:at] + rng.choice('{}",=\n\\ #0NaN+-_eé\0') + body[at:]
        elif kind == 2:
            body = body[:at] + body[at + rng.randint(1, 5) :]
        elif kind == 3:
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            body = "\n".join(lines)
        elif kind == 4:
            lines.pop(rng.randrange(len(lines)))
            body = "\n".join(lines)
        elif kind == 5:
            rng.shuffle(lines)
            body = "\n".join(lines)
        elif kind == 6:
            body = body.replace(
                rng.choice(["7", "11", "0.625", "13", "5"]),
                rng.choice(["NaN", "-1", "1e400", "x", "0x1", "", "+Inf", "1 2 3"]),
                1,
            )
        else:
            body = body.replace("\n", rng.choice(["\r\n", "\n\n", "\n \n"]), rng.randint(1, 9))
        if not body:
            return body
    return body
