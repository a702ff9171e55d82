"""Recordings made with a real vLLM 0.32.0: the verdict, and what held when."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvcatch.observe.diagnose import Verdict, diagnose
from kvcatch.observe.limits import Limits, read_engine_args
from kvcatch.observe.record import Recorder, bodies, read_recording

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("headofline", "kvfull", "prefill_bound", "prefix_good", "seqcap")


def judge(path: Path, limits: Limits | None = None) -> Verdict:
    recording = read_recording(path)
    return diagnose(recording.samples, None, limits, names=recording.names).worst


def gate_at(verdict: Verdict, seconds: float) -> str:
    return next(span.gate for span in verdict.timeline if span.start_s <= seconds < span.end_s)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_flags", [False, True])
def test_the_verdict_is_right(recordings: Path, name: str, with_flags: bool) -> None:
    facts = json.loads((recordings / f"{name}.json").read_text())
    limits = read_engine_args(facts["flags"]) if with_flags else None
    verdict = judge(recordings / f"{name}.jsonl.gz", limits)
    assert verdict.gate == facts["right"]["gate"]
    assert verdict.engine == "vLLM 0.32.0 or later"


@pytest.mark.parametrize("name", NAMES)
def test_the_timeline_is_right(recordings: Path, name: str) -> None:
    right = json.loads((recordings / f"{name}.json").read_text())["right"]
    verdict = judge(recordings / f"{name}.jsonl.gz")
    for start, end, gate in right.get("intervals", []):
        # Scrapes are a second apart: an edge may be off by one.
        at = start + 1.0
        while at <= end - 1.0:
            assert gate_at(verdict, at) == gate, at
            at += 0.25
        if end - start <= 2.0:
            assert gate_at(verdict, (start + end) / 2) == gate


def test_a_window_that_ends_early_says_the_same(recordings: Path) -> None:
    recording = read_recording(recordings / "headofline.jsonl.gz")
    early = [sample for sample in recording.samples if sample.t_seconds < 11]
    assert diagnose(early, names=recording.names).worst.gate == "head_of_line"


@pytest.mark.parametrize("name", NAMES)
def test_the_compact_format_holds_the_same(recordings: Path, tmp_path: Path, name: str) -> None:
    raw = recordings / f"{name}.jsonl.gz"
    compact = tmp_path / "compact.jsonl.gz"
    with Recorder(compact, "http://engine/metrics", 1_800_000_000.0, "vllm@0.32.0") as recorder:
        for at, body in bodies(raw):
            assert body is not None
            recorder.add(at, body)
    first, second = read_recording(raw), read_recording(compact)
    assert [sample.to_dict() | {"endpoint": ""} for sample in second.samples] == [
        sample.to_dict() | {"endpoint": ""} for sample in first.samples
    ]
    assert second.version is not None
    assert second.version.title == "vLLM 0.32.0"
    assert compact.stat().st_size < raw.stat().st_size / 3
    again = tmp_path / "again.jsonl"
    with Recorder(again, "http://replayed/metrics", 0.0) as recorder:
        for at, body in bodies(compact):
            assert body is not None
            recorder.add(at, body)
    assert [s.running_requests for s in read_recording(again).samples] == [
        s.running_requests for s in first.samples
    ]


def test_flags_that_are_known_make_it_surer(recordings: Path) -> None:
    path = recordings / "seqcap.jsonl.gz"
    guessed, known = judge(path), judge(path, read_engine_args("--max-num-seqs 4"))
    assert known.confidence > guessed.confidence
    assert known.arithmetic == "4 running >= max_num_seqs 4"
    assert any("inferred" in item.text for item in guessed.evidence)
    assert not any("inferred" in item.text for item in known.evidence)
