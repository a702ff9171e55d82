"""One rule per setting: which values are replayed, and which of them is proposed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcatch.advice.answers import Advice, NotAdvised, Tried
from kvcatch.laws import ESTIMATE_CLIP, block_sizes, blocks_for, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.advice.traffic import Traffic
    from kvcatch.advice.trial import Deployment, Effect, Progress
    from kvcatch.workload.request import Request, Workload

SEQUENCE_SHARES = (0.70, 0.75, 0.80)
"""max_num_seqs that are tried, as shares of the sequences that fit at full length."""

WATERMARKS = (0.0, 0.01, 0.02, 0.05, 0.1)
"""Watermarks that are tried."""

LONG_PERCENTILES = (90.0, 95.0, 99.0)
"""Thresholds of a queue for long requests that are tried, as percentiles of the total length."""

UTILIZATIONS = (0.85, 0.9, 0.92, 0.95)
"""Memory utilisations that are tried."""

LENGTH_STEP = 256
"""A proposed max_model_len is a multiple of this (tokens)."""

NOTICEABLE = 0.01
"""Less than 1 % of the steps is no difference."""


class Replays:
    """Runs trials of one traffic and keeps today's."""

    def __init__(self, deployment: Deployment, traffic: Traffic, progress: Progress) -> None:
        self.deployment = deployment
        self.traffic = traffic
        self.progress = progress
        progress("today's settings")
        self.today_trial = deployment.trial(traffic.workload)
        self.today = self.today_trial.run()
        self.last = self.today_trial

    def run(self, what: str, workload: Workload | None = None, **changes: Any) -> Effect:
        """The replay with some settings changed."""
        self.progress(what)
        deployment = replace(self.deployment, **changes)
        trial = deployment.trial(workload or self.traffic.workload)
        today = self.today_trial
        if workload is None and trial.point == today.point and trial.settings == today.settings:
            return self.today
        self.last = trial
        return trial.run()


def _is_better(new: Effect, old: Effect) -> bool:
    """Noticeably fewer steps; or about as many, and a tenth less work or fewer preemptions."""
    if new.never_fits > old.never_fits or new.steps > old.steps * (1 + NOTICEABLE):
        return False
    if new.steps < old.steps * (1 - NOTICEABLE):
        return True
    return (
        new.preemptions <= 0.9 * old.preemptions - 1
        or new.prefill_tokens < old.prefill_tokens * 0.9
    )


def _best(tried: Sequence[Tried]) -> Tried:
    """Of those with about the fewest steps, the one with the fewest preemptions, least prefill."""
    served = min(item.effect.never_fits for item in tried)
    fitting = [item for item in tried if item.effect.never_fits == served]
    fewest = min(item.effect.steps for item in fitting)
    fast = [item for item in fitting if item.effect.steps <= fewest * (1 + NOTICEABLE)]
    return min(
        fast,
        key=lambda item: (item.effect.preemptions, item.effect.prefill_tokens, item.effect.steps),
    )


def _chosen(
    setting: str,
    flag: str | None,
    current: str,
    today: Effect,
    tried: Sequence[Tried],
    better: str,
    facts: dict[str, float | int],
) -> Advice | NotAdvised:
    """The best value tried when it beats today's, else a word that today's is as good."""
    best = _best(tried)
    if best.value == current or not _is_better(best.effect, today):
        values = ", ".join(item.value for item in tried if item.value != current)
        reason = f"{current} is as good as any tried ({values})"
        return NotAdvised(setting, reason, tuple(tried), facts)
    return Advice(
        setting, flag, current, best.value, better, today, best.effect, tuple(tried), facts
    )


def max_model_len(replays: Replays) -> Advice | NotAdvised:
    """A cap by the P99.9 rule; advised where open outputs reserve up to it."""
    deployment, traffic = replays.deployment, replays.traffic
    total = traffic.total.values
    capped = {
        percent: -(-total.percentile(percent) // LENGTH_STEP) * LENGTH_STEP
        for percent in (99.0, 99.9)
    }
    facts: dict[str, float | int] = {}
    for percent, value in capped.items():
        facts[f"p{percent:g}_max_model_len_tokens"] = value
        facts[f"p{percent:g}_share_cut_off"] = total.share_over(value)
    rule = "; ".join(
        f"P{percent:g} rule: {value:,} tokens cuts off {total.share_over(value):.2%}"
        for percent, value in capped.items()
    )
    if not deployment.law.reserves_output:
        counts = "does not reserve the output"
        if deployment.law.name in ("estimate", "sglang_estimate"):
            counts = f"counts at most {ESTIMATE_CLIP:,} output tokens of a request, whatever it is"
        return NotAdvised(
            "max_model_len",
            f"a smaller one does not raise concurrency on {deployment.engine}: admission {counts}. "
            f"As a cap on single requests alone, {rule}",
            facts=facts,
        )
    if deployment.max_tokens is not None:
        return NotAdvised(
            "max_model_len",
            f"clients ask for {deployment.max_tokens:,} tokens, and that is what is reserved; "
            f"max_model_len would change nothing else. {rule}",
            facts=facts,
        )
    assert deployment.max_model_len is not None, "open outputs need it"
    tried = []
    for value in sorted({item for item in capped.values() if item < deployment.max_model_len}):
        kept = _keep(traffic.workload, value)
        if len(kept):
            effect = replays.run(f"max_model_len {value}", kept, max_model_len=value)
            tried.append(Tried(str(value), effect))
    if not tried:
        return NotAdvised(
            "max_model_len", f"{deployment.max_model_len:,} is no more than is used. {rule}",
            facts=facts,
        )  # fmt: skip
    flag = settings_of(deployment.engine).max_model_len
    # The P99.9 rule cuts off less; only it is proposed.
    proposed = tried[-1]
    if not _is_better(proposed.effect, replays.today):
        reason = f"{proposed.value} makes no difference in the replay. {rule}"
        return NotAdvised("max_model_len", reason, tuple(tried), facts)
    return Advice(
        "max_model_len",
        flag,
        str(deployment.max_model_len),
        proposed.value,
        f"open outputs reserve up to it. {rule}",
        replays.today,
        proposed.effect,
        tuple(tried),
        facts,
    )


def max_num_seqs(replays: Replays) -> Advice | NotAdvised:
    """70 to 80 % of the sequences that fit at full length, by the replay."""
    deployment = replays.deployment
    mean = replays.traffic.total.values.mean(
        lambda length: blocks_for(length, deployment.block_size)
    )
    bound = deployment.usable_blocks / mean
    text = f"{deployment.usable_blocks:,} usable blocks / {mean:,.1f} a request = {bound:,.1f}"
    today = replays.today
    if today.hit_tokens and today.utilisation:
        # Shared blocks count once: what the replay held per running request knows that.
        shared = today.running_mean / today.utilisation
        if shared > bound:
            bound = shared
            text = (
                f"{today.running_mean:,.1f} ran in {today.utilisation:.1%} of the pool, sharing "
                f"prefixes: {bound:,.1f}"
            )
    facts: dict[str, float | int] = {"mean_blocks_per_request": mean, "sequences_that_fit": bound}
    flag = settings_of(deployment.engine).max_num_seqs
    if flag is None:
        return NotAdvised(
            "max_num_seqs", f"{deployment.engine} has no such setting; {text} fit", facts=facts
        )
    if deployment.max_num_seqs <= bound * SEQUENCE_SHARES[0]:
        return NotAdvised(
            "max_num_seqs",
            f"{deployment.max_num_seqs} is below 70 % of what fits ({text}); the pool is not what "
            "holds requests back",
            facts=facts,
        )
    values = sorted({max(1, math.floor(bound * share)) for share in SEQUENCE_SHARES})
    tried = [Tried(str(deployment.max_num_seqs), replays.today)] + [
        Tried(str(value), replays.run(f"max_num_seqs {value}", max_num_seqs=value))
        for value in values
        if value != deployment.max_num_seqs
    ]
    return _chosen(
        "max_num_seqs",
        flag,
        str(deployment.max_num_seqs),
        replays.today,
        tried,
        f"70 to 80 % of what fits at full length ({text})",
        facts,
    )


def block_size(replays: Replays) -> Advice | NotAdvised:
    """Internal fragmentation and hits against the size of the block tables, at equal memory."""
    deployment, total = replays.deployment, replays.traffic.total.values
    flag = settings_of(deployment.engine).block_size
    if flag is None:
        return NotAdvised("block_size", f"{deployment.engine} does not let a user choose it")
    sizes = block_sizes(deployment.engine)
    tokens = deployment.usable_blocks * deployment.block_size
    longest = deployment.max_model_len or total.lengths[-1]
    tried, facts = [], {}
    for size in sizes:
        blocks = tokens // size + deployment.num_blocks - deployment.usable_blocks
        if blocks < 2:
            continue
        effect = replays.run(f"block_size {size}", block_size=size, num_blocks=blocks)
        tried.append(Tried(str(size), effect))
        held = total.mean(partial(_held_tokens, size))
        facts[f"unused_share_at_{size}"] = 1 - total.mean() / held
        facts[f"table_bytes_at_{size}"] = 4 * deployment.max_num_seqs * blocks_for(longest, size)
    return _chosen(
        "block_size",
        flag,
        str(deployment.block_size),
        replays.today,
        tried,
        "less lost inside blocks, or more found, than the larger tables cost",
        facts,
    )


def watermark(replays: Replays) -> Advice | NotAdvised:
    """The watermark with the fewest preemptions that costs no noticeable steps."""
    deployment = replays.deployment
    flag = settings_of(deployment.engine).watermark
    if flag is None or not deployment.law.has_watermark:
        since = " (vLLM has one from 0.24.0 on)" if deployment.engine.is_vllm else ""
        return NotAdvised("watermark", f"{deployment.engine} has no such setting{since}")
    if replays.today.preemptions == 0 and deployment.watermark == 0:
        return NotAdvised(
            "watermark", "nothing is preempted in the replay: it has nothing to prevent"
        )
    values = sorted({*WATERMARKS, deployment.watermark})
    tried = [
        Tried(f"{value:g}", replays.run(f"watermark {value:g}", watermark=value))
        for value in values
    ]
    return _chosen(
        "watermark",
        flag,
        f"{deployment.watermark:g}",
        replays.today,
        tried,
        "fewer preemptions, in about as many steps",
        {"preemptions_today": replays.today.preemptions},
    )


def memory_utilization(replays: Replays) -> Advice | NotAdvised:
    """More memory for the pool, as far as it pays; needs to know what a share of it buys."""
    deployment = replays.deployment
    flag = settings_of(deployment.engine).memory_utilization
    share, device = deployment.memory_utilization, deployment.device_bytes
    per_token = deployment.kv_bytes_per_token
    if flag is None:
        return NotAdvised("memory_utilization", f"{deployment.engine} has no such setting")
    if share is None or device is None or per_token is None:
        return NotAdvised(
            "memory_utilization",
            "give --memory-utilization, --device-gib and --kv-bytes-per-token to know how many "
            "blocks a share of the memory buys",
        )
    per_block = per_token * deployment.block_size
    facts: dict[str, float | int] = {"blocks_per_0_01": device * 0.01 / per_block}
    tried = []
    for value in sorted({*UTILIZATIONS, share}):
        blocks = deployment.num_blocks + math.floor((value - share) * device / per_block)
        if blocks >= 2:
            effect = replays.run(f"memory_utilization {value:g}", num_blocks=blocks)
            tried.append(Tried(f"{value:g}", effect))
    return _chosen(
        "memory_utilization",
        flag,
        f"{share:g}",
        replays.today,
        tried,
        f"0.01 buys {facts['blocks_per_0_01']:,.0f} blocks; leave room for activations and graphs",
        facts,
    )


def long_queue(replays: Replays) -> Advice | NotAdvised:
    """Long requests in a queue of their own, or on an instance of their own."""
    tried: list[Tried] = []
    options: list[Advice] = []
    for percent in LONG_PERCENTILES:
        threshold = replays.traffic.total.values.percentile(percent)
        short = _keep(replays.traffic.workload, threshold)
        long = _keep(replays.traffic.workload, threshold, beyond=True)
        if not len(short) or not len(long):
            continue
        for option in (_own_queue, _own_instance):
            answer = option(replays, threshold, short, long)
            if answer is None:
                continue
            tried.append(Tried(answer.proposed, answer.after))
            facts = answer.facts
            was, now = (facts[f"short_waiting_steps_p99_{when}"] for when in ("before", "after"))
            if now < 0.9 * was and facts["steps_after"] <= 1.05 * replays.today.steps:
                options.append(answer)
    if options:
        best = min(options, key=lambda item: item.facts["short_waiting_steps_p99_after"])
        return replace(best, tried=tuple(tried))
    return NotAdvised(
        "long_queue",
        "in the replay the others would not wait a tenth less without all of it taking longer"
        if tried
        else "no request is so long that a queue of its own would serve anybody",
        tuple(tried),
    )


def _own_queue(replays: Replays, threshold: int, short: Workload, long: Workload) -> Advice:
    """Long ones enter at half the rate of their share while others wait."""
    rate = len(long) / len(short) / 2
    merged: list[Request] = []
    rest = list(long.requests)
    credit = 0.0
    for item in short.requests:
        merged.append(item)
        credit += rate
        if credit >= 1 and rest:
            merged.append(rest.pop(0))
            credit -= 1
    workload = replace(short, requests=(*merged, *rest))
    after = replays.run(f"long requests in a queue from {threshold} tokens on", workload)
    trial = replays.last
    return _apart(
        replays,
        f"own queue over {threshold} tokens",
        "let in at half the rate of their share while others wait,",
        (short, long),
        after,
        (trial.wait(_indices(short), 0.99), trial.wait(_indices(long), 0.99)),
        {"threshold_tokens": threshold, "steps_after": after.steps},
    )


def _own_instance(
    replays: Replays, threshold: int, short: Workload, long: Workload
) -> Advice | None:
    """Pool and sequences split by the share that long requests hold over time."""
    deployment = replays.deployment
    size, blocks = deployment.block_size, deployment.num_blocks
    share = _block_steps(long, size) / (_block_steps(long, size) + _block_steps(short, size))
    longest = max(blocks_for(item.num_tokens + item.output_tokens, size) for item in long.requests)
    theirs = max(math.ceil(blocks * share), longest + 2)
    sequences = max(1, round(deployment.max_num_seqs * share))
    if theirs > blocks - 2 or sequences >= deployment.max_num_seqs:
        return None
    after = replays.run(
        f"the others without those over {threshold} tokens",
        short,
        num_blocks=blocks - theirs,
        max_num_seqs=deployment.max_num_seqs - sequences,
    )
    alone = replays.run(
        f"those over {threshold} tokens apart", long, num_blocks=theirs, max_num_seqs=sequences
    )
    return _apart(
        replays,
        f"own instance over {threshold} tokens",
        f"with {theirs / blocks:.1%} of the pool to themselves",
        (short, long),
        after,
        (after.waiting_steps_p99, alone.waiting_steps_p99),
        {
            "threshold_tokens": threshold,
            "pool_share": theirs / blocks,
            "steps_after": max(after.steps, alone.steps),
        },
    )


def _apart(
    replays: Replays,
    proposed: str,
    how: str,
    parts: tuple[Workload, Workload],
    after: Effect,
    waits: tuple[int, int],
    facts: dict[str, float | int],
) -> Advice:
    """The advice to keep long requests apart, with how long both kinds wait then."""
    short, long = parts
    size = replays.deployment.block_size
    held = _block_steps(long, size) / (_block_steps(long, size) + _block_steps(short, size))
    were = tuple(replays.today_trial.wait(_indices(part), 0.99) for part in parts)
    count = len(long) / (len(long) + len(short))
    reason = (
        f"{count:.1%} of the requests hold {held:.1%} of the pool over time; {how} the others wait "
        f"{waits[0]:,} instead of {were[0]:,} steps (P99) and they {waits[1]:,} instead of "
        f"{were[1]:,}"
    )
    return Advice(
        "long_queue",
        None,
        "one queue",
        proposed,
        reason,
        replays.today,
        after,
        (),
        {
            **facts,
            "share_of_requests": count,
            "share_of_block_steps": held,
            "short_waiting_steps_p99_before": were[0],
            "short_waiting_steps_p99_after": waits[0],
            "long_waiting_steps_p99_before": were[1],
            "long_waiting_steps_p99_after": waits[1],
        },
    )


def _held_tokens(block_size: int, length: int) -> int:
    return blocks_for(length, block_size) * block_size


def _indices(workload: Workload) -> set[int]:
    return {item.index for item in workload.requests}


def _block_steps(workload: Workload, block_size: int) -> float:
    """Blocks held times steps held, all requests together, without waiting or sharing."""
    return sum(
        (blocks_for(item.num_tokens, block_size) + item.output_tokens / 2 / block_size)
        * item.output_tokens
        for item in workload.requests
    )


def _keep(workload: Workload, limit: int, *, beyond: bool = False) -> Workload:
    """The requests of at most ``limit`` tokens, prompt and output together; or the others."""
    kept = tuple(
        item
        for item in workload.requests
        if (item.num_tokens + item.output_tokens > limit) == beyond
    )
    return replace(workload, requests=kept)
