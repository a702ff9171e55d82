"""Advice from traffic: what to change on this engine, each with its effect in the replay.

Nothing is advised that the engine has no setting for, that plays no part in its law, or that the
replay does not show to be better; what is left out says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcatch._core import __version__
from kvcatch.advice import rules
from kvcatch.advice.answers import Advice, NotAdvised
from kvcatch.advice.traffic import Traffic
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.advice.trial import Deployment, Effect, Progress


@dataclass(frozen=True, slots=True)
class Counsel:
    """All advice for one deployment and its traffic.

    Attributes:
        deployment: How the engine is run today.
        traffic: What it gets.
        today: The replay of today's settings.
        advice: What to change.
        not_advised: What to leave alone, and why.
    """

    deployment: Deployment
    traffic: Traffic
    today: Effect
    advice: tuple[Advice, ...]
    not_advised: tuple[NotAdvised, ...]

    def to_dict(self) -> dict[str, Any]:
        """What ``kvcatch advise --json`` prints."""
        deployment = self.deployment
        return {
            "engine": str(deployment.engine),
            "law": deployment.law.name,
            "deployment": {
                "num_blocks": deployment.num_blocks,
                "usable_blocks": deployment.usable_blocks,
                "block_size_tokens": deployment.block_size,
                "max_num_seqs": deployment.max_num_seqs,
                "max_model_len_tokens": deployment.max_model_len,
                "watermark": deployment.watermark,
                "token_budget": deployment.token_budget,
                "max_tokens": deployment.max_tokens,
            },
            "traffic": self.traffic.to_dict(),
            "today": self.today.to_dict(),
            "advice": [item.to_dict() for item in self.advice],
            "not_advised": [item.to_dict() for item in self.not_advised],
            "kvcatch": __version__,
        }


def advise(deployment: Deployment, traffic: Traffic, progress: Progress | None = None) -> Counsel:
    """Replay the traffic under today's settings and under others, and say what to change.

    All requests wait from the first step on, so the replay shows the engine under full load.

    Args:
        deployment: How the engine is run today.
        traffic: What it gets.
        progress: Told what is being replayed.

    Raises:
        InvalidArgument: No request of the traffic fits the pool or ``max_model_len``, or the pool is
            larger than the share of the memory that it is said to be in.
    """
    _check_memory(deployment)
    traffic = _served(deployment, traffic)
    replays = rules.Replays(deployment, traffic, progress or (lambda _: None))
    if not replays.today.finished:
        raise InvalidArgument(
            f"no request fits {deployment.num_blocks} blocks of {deployment.block_size} tokens: "
            "nothing can be replayed"
        )
    answers = [
        rules.max_model_len(replays),
        rules.max_num_seqs(replays),
        rules.block_size(replays),
        rules.watermark(replays),
        rules.memory_utilization(replays),
        rules.long_queue(replays),
    ]
    return Counsel(
        deployment,
        traffic,
        replays.today,
        tuple(item for item in answers if isinstance(item, Advice)),
        tuple(item for item in answers if isinstance(item, NotAdvised)),
    )


def _check_memory(deployment: Deployment) -> None:
    share, device = deployment.memory_utilization, deployment.device_bytes
    per_token = deployment.kv_bytes_per_token
    if share is None or device is None or per_token is None:
        return
    pool = deployment.num_blocks * deployment.block_size * per_token
    if pool > device * share:
        raise InvalidArgument(
            f"num_blocks = {deployment.num_blocks}: {pool / 2**30:,.2f} GiB of KV cache at "
            f"{per_token} bytes per token are more than {share:g} of {device / 2**30:,.2f} GiB"
        )


def _served(deployment: Deployment, traffic: Traffic) -> Traffic:
    """The traffic without what is longer than ``max_model_len``: the engine refuses it or cuts it off."""
    limit = deployment.max_model_len
    workload = traffic.workload
    kept = (
        ()
        if limit is None
        else tuple(
            item for item in workload.requests if item.num_tokens + item.output_tokens <= limit
        )
    )
    if limit is None or len(kept) == len(workload):
        return traffic
    if not kept:
        raise InvalidArgument(
            f"max_model_len = {limit}: each of the {len(workload)} requests is longer"
        )
    note = (
        f"{len(workload) - len(kept)} of {len(workload)} requests are longer than max_model_len = "
        f"{limit} tokens and were left out: the engine refuses them or cuts them off"
    )
    workload = replace(workload, requests=kept, notes=(*workload.notes, note))
    return Traffic.of(workload) if traffic.is_exact else replace(traffic, workload=workload)
