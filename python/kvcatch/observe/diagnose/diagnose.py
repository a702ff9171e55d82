"""The diagnosis of a window: every interval is classified, request-seconds are added up by gate."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from typing import TYPE_CHECKING

from kvcatch.observe.diagnose.advice import advise
from kvcatch.observe.diagnose.classify import STALL_S, classify
from kvcatch.observe.diagnose.context import Context
from kvcatch.observe.diagnose.findings import (
    find_leak,
    find_prefix_fault,
    find_storm,
    smallest_useful_prefix,
)
from kvcatch.observe.diagnose.verdict import Diagnosis, Evidence, Span, Verdict
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.limits import EngineVersion, Limits
from kvcatch.observe.window import by_replica, intervals, queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvcatch.observe.diagnose.classify import Finding
    from kvcatch.observe.diagnose.findings import Fault
    from kvcatch.observe.diagnose.verdict import GateName
    from kvcatch.observe.sample import EngineSample
    from kvcatch.observe.window import Interval

__all__ = ["diagnose", "diagnose_replica"]

_LARGE_BLOCK = 256
"""Tokens; hybrid models have such blocks, and prompts shorter than that are common."""

_WAIT_S = 1.0
"""Seconds a request must wait on average before a queue is called one."""

_EPISODE_S = 5.0
"""A queue that lasts less is a blip."""

_SEEN_S = 0.9
"""A queue seen for less (two looks a second apart, their jitter allowed for) tells nothing yet."""

_FEW = 5
"""A window of fewer intervals says nothing of a queue that only its last look shows."""

_ALSO_SHARE = 0.1
_RUNNING_STALL_S = 60.0

_UNIX_S = 1e9
"""Times above are Unix time, those below seconds of a recording."""


def diagnose(
    samples: Iterable[EngineSample],
    version: EngineVersion | None = None,
    limits: Limits | None = None,
    *,
    names: Mapping[str, set[str]] | None = None,
    notes: Iterable[str] = (),
) -> Diagnosis:
    """Diagnose every replica on its own; numbers of two replicas are never added up.

    Args:
        samples: In any order, of any engines.
        version: Engine and version where known; it must be the samples' engine.
        limits: What /metrics does not say.
        names: Names of metrics met, by engine, to infer the version from.
        notes: Passed on.
    """
    verdicts = []
    remarks = list(notes)
    for (_, engine, _), group in by_replica(samples).items():
        met = (names or {}).get(engine)
        known = _version(engine, version, met)
        if (doubt := _contradiction(engine, known, met)) and doubt not in remarks:
            remarks.append(doubt)
        verdicts.append(diagnose_replica(group, known, limits or Limits()))
    if not verdicts:
        name = version or EngineVersion("kvcatch")
        verdict = Verdict("not_enough_evidence", arithmetic="no sample of an engine")
        verdict.advice = advise(verdict.gate, name, limits or Limits())
        return Diagnosis([verdict], remarks)
    verdicts.sort(key=lambda verdict: verdict.badness, reverse=True)
    return Diagnosis(verdicts, remarks)


def _version(engine: str, given: EngineVersion | None, names: set[str] | None) -> EngineVersion:
    if given is not None and given.name == engine and (given.low or given.high):
        return given
    if given is not None and given.name == "llamacpp":
        return given
    low, high = (
        FAMILIES[engine].version_range(names or set()) if engine in FAMILIES else (None, None)
    )
    if low is None and high is None:
        return EngineVersion(engine) if engine != "llamacpp" else EngineVersion("llamacpp")
    return EngineVersion(engine, low, high, "inferred from metric names")


def _contradiction(engine: str, known: EngineVersion, names: set[str] | None) -> str:
    """Where the version that was given cannot export the metrics that were met; empty where it can."""
    if (
        not names
        or engine not in FAMILIES
        or known.name != engine
        or known.source.startswith("inf")
    ):
        return ""
    low, high = FAMILIES[engine].version_range(names)
    is_older = low is not None and known.since(*low) is False
    is_newer = high is not None and known.low is not None and known.low > high
    if not is_older and not is_newer:
        return ""
    met = EngineVersion(engine, low, high, "inferred from metric names").title
    return f"{known.title} was given, the names of the metrics are those of {met}: advice is for the first"


def diagnose_replica(
    samples: Sequence[EngineSample], version: EngineVersion, limits: Limits
) -> Verdict:
    """Diagnose the samples of one replica, in order of time."""
    found = intervals(samples)
    context = Context.of(samples, found, version, limits)
    usage_of = FAMILIES[version.name].usage_of if version.name in FAMILIES else ""
    verdict = Verdict(
        "not_enough_evidence",
        engine=version.title,
        replica=samples[0].replica,
        endpoint=samples[0].endpoint,
        usage_of=usage_of,
    )
    stalls = _stalls(found)
    rows = [
        (item, finding)
        for item, stalled in zip(found, stalls, strict=True)
        for finding in classify(item, context, stalled)
    ]
    storm = find_storm(found)
    faults = [
        fault for fault in (storm, find_leak(samples, context), find_prefix_fault(found)) if fault
    ]
    verdict.timeline = _timeline(found, rows)
    queued = _queues(found)
    seconds: dict[GateName | None, float] = defaultdict(float)
    for item, finding in rows:
        if id(item) in queued:
            gate = finding.gate
            if storm and gate == "capacity":
                gate = storm.gate
            seconds[gate] += finding.waiting * item.seconds
    _decide(verdict, seconds, rows, queued, faults, found, samples, context)
    _hit_rate_note(verdict, samples, found, version)
    _no_hit_note(verdict, found)
    verdict.advice = advise(verdict.gate, version, limits)
    for gate in verdict.also:
        verdict.advice += [f"{gate}: {text}" for text in advise(gate, version, limits)]
    return verdict


def _stalls(found: Sequence[Interval]) -> list[float]:
    """For each interval the length of the standstill it belongs to; 0 for none."""
    lengths = [0.0] * len(found)
    first, length = 0, 0.0
    for index in range(len(found) + 1):
        item = found[index] if index < len(found) else None
        stands = (
            item is not None
            and item.is_frozen
            and not item.is_restart
            and (queue(item.state) or 0) > 0
        )
        if stands and item is not None:
            if not length:
                first = index
            length += item.seconds
            continue
        if length:
            runs = any((part.state.running_requests or 0) > 0 for part in found[first:index])
            if length >= (_RUNNING_STALL_S if runs else STALL_S):
                lengths[first:index] = [length] * (index - first)
        length = 0.0
    return lengths


def _queues(found: Sequence[Interval]) -> set[int]:
    """Intervals that belong to a queue worth the name: it lasts, and those in it wait for a second or more."""
    queued: set[int] = set()
    episode: list[Interval] = []
    for item in [*found, None]:
        if item is not None and not item.is_restart and (queue(item.state) or 0) > 0:
            episode.append(item)
            continue
        if episode and _is_queue(episode, len(found)):
            queued.update(id(part) for part in episode)
        episode = []
    return queued


def _is_queue(episode: Sequence[Interval], total: int) -> bool:
    if all(item.state.covers_seconds is not None for item in episode):
        return len(episode) >= 2 or total <= 3
    length = sum(item.seconds for item in episode)
    if length < _EPISODE_S and len(episode) < total:
        return False
    waited = sum((queue(item.state) or 0.0) * item.seconds for item in episode)
    served = [item.started if item.started is not None else item.entered for item in episode]
    return waited >= _WAIT_S * max(sum(served), 1.0)


def _timeline(found: Sequence[Interval], rows: Sequence[tuple[Interval, Finding]]) -> list[Span]:
    top: dict[int, tuple[str, float]] = {}
    for item, finding in rows:
        waited = finding.waiting * item.seconds
        gate, before = top.get(id(item), ("", -1.0))
        name = finding.gate or "unexplained"
        top[id(item)] = (name if waited > before else gate, max(waited, before))
    spans: list[Span] = []
    for item in found:
        gate, waited = top.get(id(item), ("restart" if item.is_restart else "none_waiting", 0.0))
        if spans and spans[-1].gate == gate and item.start_s - spans[-1].end_s < 1.0:
            last = spans[-1]
            spans[-1] = Span(last.start_s, item.end_s, gate, last.waiting_request_seconds + waited)
        else:
            spans.append(Span(item.start_s, item.end_s, gate, waited))
    return spans


def _decide(
    verdict: Verdict,
    seconds: Mapping[GateName | None, float],
    rows: Sequence[tuple[Interval, Finding]],
    queued: set[int],
    faults: Sequence[Fault],
    found: Sequence[Interval],
    samples: Sequence[EngineSample],
    context: Context,
) -> None:
    certain = [fault for fault in faults if fault.is_certain]
    total = sum(seconds.values())
    ranked = sorted(
        ((gate, value) for gate, value in seconds.items() if gate is not None and value > 0),
        key=lambda item: item[1],
        reverse=True,
    )
    verdict.waiting_request_seconds = {str(gate): value for gate, value in ranked}
    unexplained = seconds.get(None, 0.0)
    if unexplained:
        verdict.waiting_request_seconds["unexplained"] = unexplained
    also: list[GateName] = []
    if ranked and ranked[0][1] >= unexplained:
        gate, most = ranked[0]
        also += [name for name, value in ranked[1:] if value >= _ALSO_SHARE * total]
        for name, _ in ranked:
            _explain(verdict, name, rows, queued, certain, also, is_first=name == gate)
        verdict.gate = gate
        verdict.confidence *= 0.6 + 0.4 * most / total
        if gate == "preemption_storm":
            also.insert(0, "capacity")
    elif total:
        verdict.gate = "not_enough_evidence"
        verdict.confidence = 0.0
        verdict.arithmetic = (
            f"{unexplained:,.0f} of {total:,.0f} waiting request-seconds are not explained by what the "
            "metrics show"
        )
        _explain(verdict, None, rows, queued, certain, also, is_first=False)
    elif certain:
        verdict.gate = certain[0].gate
        verdict.confidence = certain[0].confidence
        verdict.arithmetic = certain[0].arithmetic
    else:
        _calm(verdict, found, samples, context)
    if verdict.gate in ("capacity", "preemption_storm"):
        _per_running(verdict, rows, queued, context)
    for fault in faults:
        if fault.is_certain:
            also.append(fault.gate)
        if fault.evidence not in verdict.evidence:
            verdict.evidence.append(fault.evidence)
    if context.is_cap_inferred and verdict.gate == "max_num_seqs":
        verdict.evidence.append(
            Evidence(
                samples[0].t_seconds,
                samples[-1].t_seconds,
                "max_num_seqs is not in the metrics: inferred; --engine-args makes it certain",
            )
        )
    verdict.also = [name for name in dict.fromkeys(also) if name != verdict.gate]


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("at %H:%M:%S")


def _explain(
    verdict: Verdict,
    gate: GateName | None,
    rows: Sequence[tuple[Interval, Finding]],
    queued: set[int],
    faults: Sequence[Fault],
    also: list[GateName],
    *,
    is_first: bool,
) -> None:
    """Evidence of one gate: the interval in which most waited, and the stretch it stands for."""
    # A storm takes the place of the capacity that it is the effect of.
    storm = next((fault for fault in faults if fault.gate == gate), None)
    wanted = "capacity" if storm else gate
    mine = [
        (item, finding) for item, finding in rows if finding.gate == wanted and id(item) in queued
    ]
    if not mine:
        return
    item, finding = max(mine, key=lambda row: (row[1].waiting * row[0].seconds, row[1].confidence))
    state = item.state
    facts = [f"{state.running_requests or 0:,.0f} running, {finding.waiting:,.0f} waiting"]
    if state.kv_usage_share is not None:
        facts.append(f"KV {state.kv_usage_share:.1%}")
    if item.prompt_tokens_per_s is not None:
        facts.append(f"{item.prompt_tokens_per_s:,.0f} prompt tokens/s")
    if state.waiting_deferred_requests is not None:
        facts.append(f"{state.waiting_deferred_requests:,.0f} deferred")
    at = f"at {item.start_s:,.1f} s" if item.start_s < _UNIX_S else _clock(item.start_s)
    text = f"{gate or 'unexplained'}: {', '.join(facts)} {at}; {finding.text}"
    verdict.evidence.append(Evidence(mine[0][0].start_s, mine[-1][0].end_s, text))
    also += finding.also
    if is_first:
        verdict.arithmetic = finding.text
        weights = [(row.confidence, row.waiting * part.seconds) for part, row in mine]
        whole = sum(weight for _, weight in weights) or 1.0
        verdict.confidence = sum(value * weight for value, weight in weights) / whole
        if storm:
            verdict.arithmetic = storm.arithmetic
            verdict.confidence = storm.confidence


def _per_running(
    verdict: Verdict,
    rows: Sequence[tuple[Interval, Finding]],
    queued: set[int],
    context: Context,
) -> None:
    """What those that run hold each, and so how many of them the pool holds: what to send at once."""
    full = [item for item, finding in rows if finding.gate == "capacity" and id(item) in queued]
    item = max(full, key=lambda item: item.state.running_requests or 0.0, default=None)
    if item is None or not item.state.running_requests:
        return
    room = context.room(item.state)
    total = item.state.num_blocks if room.unit == "blocks" else item.state.pool_tokens
    if room.free is None or not total or room.free >= total:
        return
    running = item.state.running_requests
    each = (total - room.free) / running
    text = (
        f"{running:,.0f} running hold {total - room.free:,.0f} {room.unit}, {each:,.1f} each: the pool of "
        f"{total:,.0f} holds about {total / each:,.0f} such requests"
    )
    verdict.evidence.append(Evidence(item.start_s, item.end_s, text))


def _open_queue(found: Sequence[Interval], samples: Sequence[EngineSample]) -> Evidence | None:
    """A queue that stands at the end of the window, does not move, and is too young to be judged."""
    episode: list[Interval] = []
    for item in reversed(found):
        if item.is_restart or not queue(item.state):
            break
        episode.insert(0, item)
    last = queue(samples[-1]) or 0.0
    if last and not episode and len(found) < _FEW and not found[-1].is_restart:
        text = f"{last:,.0f} wait at the last of {len(samples)} looks: nothing tells how long, look longer"
        return Evidence(samples[-1].t_seconds, samples[-1].t_seconds, text)
    if not episode or not last:
        return None
    start, seconds = episode[0].start_s, sum(item.seconds for item in episode)
    if episode[0].state.covers_seconds is not None:
        if any(item.prompt_tokens_per_s for item in episode):
            return None
        text = f"{last:,.0f} wait in the last line of the log and no prompt was computed in it: one line is no window"
        return Evidence(start, samples[-1].t_seconds, text)
    waited = sum((queue(item.state) or 0.0) * item.seconds for item in episode)
    served = sum(item.started if item.started is not None else item.entered for item in episode)
    if seconds < _SEEN_S or waited < _WAIT_S * max(served, 1.0):
        return None
    text = (
        f"{last:,.0f} wait at the end of the window, the first of them for {seconds:,.1f} s, and "
        f"{served:,.0f} got their first token meanwhile: {_EPISODE_S:g} s tell a queue from a blip, look "
        "longer"
    )
    return Evidence(start, samples[-1].t_seconds, text)


def _calm(
    verdict: Verdict, found: Sequence[Interval], samples: Sequence[EngineSample], context: Context
) -> None:
    known = [item for item in found if queue(item.state) is not None]
    first, last = samples[0].t_seconds, samples[-1].t_seconds
    if not known:
        verdict.gate, verdict.confidence = "not_enough_evidence", 0.0
        what = "the queue is not exported" if found else "one look is not a window: two at least"
        verdict.arithmetic = what
        return
    seconds = sum(item.seconds for item in known)
    waited = sum((queue(item.state) or 0) * item.seconds for item in known)
    most = max(queue(item.state) or 0 for item in known)
    busy = any(item.state.running_requests or item.generated_tokens_per_s for item in known)
    verdict.gate = "healthy"
    verdict.confidence = 0.9 if busy and len(known) >= _FEW else 0.5
    verdict.arithmetic = (
        f"{waited:,.1f} waiting request-seconds in {seconds:,.0f} s, {most:,.0f} waiting at most"
    )
    still = _open_queue(found, samples)
    if still is not None:
        verdict.gate, verdict.confidence, verdict.arithmetic = (
            "not_enough_evidence",
            0.0,
            still.text,
        )
        verdict.evidence.append(still)
        for finding in classify(found[-1], context, 0.0):
            if finding.gate is not None:
                text = f"so far it looks like {finding.gate}: {finding.text}"
                verdict.evidence.append(Evidence(still.start_s, still.end_s, text))
        return
    text = verdict.arithmetic if busy else f"no request ran; {verdict.arithmetic}"
    verdict.evidence.append(Evidence(first, last, text))


def _hit_rate_note(
    verdict: Verdict,
    samples: Sequence[EngineSample],
    found: Sequence[Interval],
    version: EngineVersion,
) -> None:
    """Before 0.27.1 vLLM counts a hit again for every try to schedule, and for recomputed prompts."""
    if version.name != "vllm" or version.since(0, 27, 1) is True:
        return
    has_rate = any(
        sample.hit_share is not None or sample.prefix_hit_tokens_total for sample in samples
    )
    if has_rate and any((queue(item.state) or 0) > 0 or item.preempted for item in found):
        verdict.evidence.append(
            Evidence(
                samples[0].t_seconds,
                samples[-1].t_seconds,
                "the prefix hit rate is too high here: vLLM before 0.27.1 counts again each failed try "
                "to schedule and each recomputed prompt",
            )
        )


def _no_hit_note(verdict: Verdict, found: Sequence[Interval]) -> None:
    """What two prompts must share before anything is hit, where blocks are so large that it explains no hits."""
    rows = [item for item in found if item.hit_tokens is not None and item.query_tokens]
    asked = sum(item.query_tokens or 0 for item in rows)
    size = rows[-1].state.block_size_tokens if rows else None
    if not size or size < _LARGE_BLOCK or any(item.hit_tokens for item in rows):
        return
    least, drafted = (
        smallest_useful_prefix(int(size), drops_last_block=drops) for drops in (False, True)
    )
    text = (
        f"none of {asked:,.0f} looked-up tokens hit: with blocks of {size:,.0f} tokens two prompts must share "
        f"{least:,} tokens ({drafted:,} with EAGLE or MTP) before one block is hit; where TTFT says that they are, "
        "this counter is not wired"
    )
    verdict.evidence.append(Evidence(rows[0].start_s, rows[-1].end_s, text))
