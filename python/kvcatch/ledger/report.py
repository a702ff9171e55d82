"""The ledger's figures, each with its formula and the inputs that went into it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvcatch.geometry import Attention, Kind, LayerCache, State

if TYPE_CHECKING:
    from kvcatch.ledger.ledger import Ledger, RankLedger

__all__ = ["Figure", "figures", "to_dict"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a plan and where it comes from.

    Attributes:
        name: Its key in the JSON.
        value: The number.
        unit: bytes, tokens, blocks, requests.
        formula: In words.
        numbers: The same with the inputs filled in.
        where: The stage or rank it holds for; empty where it holds for all.
    """

    name: str
    value: float | int
    unit: str
    formula: str
    numbers: str
    where: str = ""


def figures(ledger: Ledger) -> list[Figure]:
    """Every figure of the plan in the order it was worked out."""
    return [*_geometry_figures(ledger), *_pool_figures(ledger), *_request_figures(ledger)]


def _layer_terms(ledger: Ledger, caches: list[LayerCache]) -> str:
    tp, dtype = ledger.geometry.parallel.tp, ledger.geometry.kv_dtype
    terms = []
    for cache, count in Counter(cache for cache in caches if isinstance(cache, Attention)).items():
        size = cache.token_bytes(tp, dtype)
        if cache.row_bytes or dtype.is_packed_mla:
            each = f"{size}"
        elif cache.is_latent:
            each = f"{cache.head_dim} * {dtype.element_bytes}"
        else:
            scales = f" + {2 * dtype.scale_bytes}" if dtype.scale_bytes else ""
            values = f"({cache.head_dim} + {cache.head_dim_v}) * {dtype.element_bytes}{scales}"
            heads = cache.kv_heads_per_rank(tp)
            each = f"{heads} * ({values})" if scales else f"{heads} * {values}"
        terms.append(f"{count} {cache.kind} layers * {each}")
    return " + ".join(terms) or "0: no attention layer here"


def _geometry_figures(ledger: Ledger) -> list[Figure]:
    geometry, found = ledger.geometry, []
    for rank in geometry.ranks:
        caches = [cache for layer in rank.layers for cache in geometry.model.layers[layer]]
        where = _where(ledger, rank.stage)
        found.append(
            Figure(
                "kv_bytes_per_token",
                rank.kv_bytes_per_token,
                "bytes",
                "sum over attention layers of KV heads per rank * (d_k + d_v) * bytes per value",
                _layer_terms(ledger, caches),
                where,
            )
        )
        if rank.state_bytes_per_sequence:
            state = next(cache for cache in caches if isinstance(cache, State))
            count = sum(isinstance(cache, State) for cache in caches)
            found.append(
                Figure(
                    "state_bytes_per_sequence",
                    rank.state_bytes_per_sequence,
                    "bytes",
                    "sum over state layers of convolution tail + recurrent state",
                    f"{count} {state.recipe} layers * "
                    f"{state.rank_bytes(geometry.parallel.tp, geometry.speculative_tokens)}",
                    where,
                )
            )
        found.append(
            Figure(
                "kv_bytes_per_block",
                rank.kv_bytes_per_block,
                "bytes",
                "largest group's sum of page bytes: all groups share one pool",
                f"max({', '.join(str(g.bytes_per_block(rank.layers)) for g in geometry.groups)})",
                where,
            )
        )
    return found


def _where(ledger: Ledger, stage: int, tp_rank: int | None = None) -> str:
    if tp_rank is not None:
        return f"stage {stage}, rank {tp_rank}"
    return f"stage {stage}" if ledger.geometry.parallel.pp > 1 else ""


def _pool_figures(ledger: Ledger) -> list[Figure]:
    found = []
    for rank in ledger.ranks:
        where = _where(ledger, rank.stage, rank.tp_rank)
        if rank.memory is not None:
            memory = rank.memory
            found += [
                Figure(
                    "weights_bytes",
                    memory.weights,
                    "bytes",
                    memory.weights_from,
                    _weights(ledger, rank),
                    where,
                ),
                Figure(
                    "non_kv_bytes",
                    memory.non_kv,
                    "bytes",
                    memory.non_kv_from
                    + (
                        ""
                        if memory.non_kv_from == "given"
                        else ": 1 GiB + step tokens * (8 hidden + 2 inner / tp) * 2 "
                        "+ 256 * vocabulary / tp * 8"
                    ),
                    _non_kv(rank),
                    where,
                ),
                Figure(
                    "kv_bytes",
                    memory.kv_bytes,
                    "bytes",
                    memory.formula,
                    f"{memory.gpu.num_bytes} ({memory.gpu.name}), {memory.utilization:g}, "
                    f"{memory.weights}, {memory.non_kv}",
                    where,
                ),
            ]
        if rank.memory is not None or len(ledger.ranks) > 1:
            per_block = ledger.geometry.ranks[rank.stage].kv_bytes_per_block
            found.append(
                Figure(
                    "rank_num_blocks",
                    rank.num_blocks or 0,
                    "blocks",
                    "floor(KV bytes / bytes per block)",
                    f"floor({rank.kv_bytes} / {per_block})"
                    if per_block
                    else "no cached layer here",
                    where,
                )
            )
    least = ledger.binds.rank
    many = len(ledger.ranks) > 1
    if many:
        numbers = f"{least.label} has the fewest"
    elif least.memory is None:
        numbers = f"{least.kv_bytes} bytes / {ledger.geometry.ranks[least.stage].kv_bytes_per_block} bytes"
    else:
        numbers = f"{least.num_blocks}"
    null = ledger.engine.null_blocks
    return [
        *found,
        Figure("num_blocks", ledger.num_blocks, "blocks", "fewest blocks of all ranks", numbers),
        Figure(
            "usable_blocks",
            ledger.usable_blocks,
            "blocks",
            "blocks - null block" if null else "blocks: this engine keeps none back",
            f"{ledger.num_blocks} - {null}",
        ),
    ]


def _weights(ledger: Ledger, rank: RankLedger) -> str:
    assert rank.memory is not None
    counted = ledger.geometry.model.weights
    if rank.memory.weights_from == "given" or counted is None:
        return "as given"
    tp = ledger.geometry.parallel.tp
    layers = ledger.geometry.ranks[rank.stage].layers
    return (
        f"{counted.parameters} parameters as {counted.how}; "
        f"layers {layers.start} to {layers.stop - 1}, 1/{tp} of them"
    )


def _non_kv(rank: RankLedger) -> str:
    assert rank.memory is not None
    if rank.memory.non_kv_from == "given":
        return "as given"
    return rank.memory.non_kv_numbers


def _group_numbers(ledger: Ledger, length: int) -> str:
    """Each group's blocks with the inputs filled in; groups alike are counted."""
    geometry = ledger.geometry
    counted = Counter(group.numbers(length, geometry.demand) for group in geometry.groups)
    return " + ".join(
        f"{count} * ({text})" if count > 1 else text for text, count in counted.items()
    )


def _request_figures(ledger: Ledger) -> list[Figure]:
    geometry, length = ledger.geometry, ledger.max_model_len
    by_group = [group.printed_blocks(length, geometry.demand) for group in geometry.groups]
    held = geometry.blocks_for(length)
    servable = ledger.max_servable_length
    printed = "as the engine prints it" if ledger.engine.is_vllm else "not printed by this engine"
    by_tokens = ledger.engine.is_vllm and not ledger.engine.since(0, 9, 1)
    found = [
        Figure(
            "blocks_per_request",
            ledger.blocks_per_request,
            "blocks",
            "sum over groups: "
            + "; ".join(dict.fromkeys(group.formula() for group in geometry.groups)),
            _group_numbers(ledger, length) + " = " + " + ".join(map(str, by_group)),
        ),
        Figure(
            "max_concurrency",
            ledger.max_concurrency,
            "requests",
            ("blocks * block size / length, " if by_tokens else "blocks / blocks per request, ")
            + printed,
            f"{ledger.num_blocks} * {geometry.block_size} / {length}"
            if by_tokens
            else f"{ledger.num_blocks} / {ledger.blocks_per_request}",
        ),
        Figure(
            "max_running",
            ledger.max_running,
            "requests",
            "floor(usable blocks / most blocks a request of max_model_len holds)",
            f"floor({ledger.usable_blocks} / {held})",
        ),
        Figure(
            "max_servable_length",
            servable,
            "tokens",
            "longest length up to max_model_len whose blocks are at most the usable ones",
            f"{geometry.blocks_for(servable) if servable else 0} of {ledger.usable_blocks} blocks at {servable}",
        ),
        Figure(
            "max_tokens",
            ledger.max_tokens,
            "tokens",
            "usable blocks * block size * dcp"
            if ledger.holds_tokens_alike
            else "usable blocks * max servable length / its blocks: groups differ",
            f"{ledger.usable_blocks} * {geometry.block_size} * {geometry.parallel.dcp}"
            if ledger.holds_tokens_alike
            else f"{ledger.usable_blocks} * {servable} / {geometry.blocks_for(servable) if servable else 1}",
        ),
    ]
    figures_of = ledger.length_figures
    if figures_of is not None and "concurrency" in figures_of:
        found.append(
            Figure(
                "concurrency_by_lengths",
                figures_of["concurrency"],
                "requests",
                "usable blocks / mean blocks of a request at its full length",
                f"{ledger.usable_blocks} / {figures_of['mean_blocks_per_request']:.4g}",
            )
        )
    return found


def to_dict(ledger: Ledger, *, explain: bool = False) -> dict[str, Any]:
    """The plan as JSON; keys with a unit in their name or in the docs of Ledger.

    ``kv_bytes_per_token`` and ``kv_bytes_per_block`` are those of the rank that binds; ``ranks`` has all.
    """
    geometry, binds = ledger.geometry, ledger.binds
    parallel = geometry.parallel
    bound = geometry.ranks[binds.rank.stage]
    data: dict[str, Any] = {
        "model": geometry.model.name,
        "architecture": geometry.model.architecture,
        "engine": str(ledger.engine),
        "kv_dtype": geometry.kv_dtype.name,
        "block_size": geometry.block_size,
        "max_model_len": ledger.max_model_len,
        "parallel": {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "dcp": parallel.dcp},
        "kv_bytes_per_token": bound.kv_bytes_per_token,
        "kv_bytes_per_block": bound.kv_bytes_per_block,
        "num_blocks": ledger.num_blocks,
        "usable_blocks": ledger.usable_blocks,
        "max_tokens": ledger.max_tokens,
        "blocks_per_request": ledger.blocks_per_request,
        "max_concurrency": ledger.max_concurrency,
        "max_running": ledger.max_running,
        "max_servable_length": ledger.max_servable_length,
        "printed_kv_cache_tokens": ledger.printed_tokens,
        "engine_starts": ledger.starts,
        "kv_bytes_per_token_model": geometry.model.bytes_per_token(geometry.kv_dtype),
        "ranks": [_rank_dict(ledger, rank) for rank in ledger.ranks],
        "groups": [
            {
                "kind": str(group.kind),
                "caches": len(group.layers),
                "block_size_tokens": None if group.kind is Kind.STATE else group.block_size,
                "reach_tokens": group.reach or None,
                "blocks_per_request": group.printed_blocks(ledger.max_model_len, geometry.demand),
            }
            for group in geometry.groups
        ],
        "binds": {
            "stage": binds.rank.stage,
            "tp_rank": binds.rank.tp_rank,
            "group": binds.group,
            "group_kind": str(geometry.groups[binds.group].kind),
        },
        "lengths": ledger.length_figures,
        "notes": list(ledger.notes),
    }
    if explain:
        data["explain"] = [asdict(figure) for figure in figures(ledger)]
    return data


def _rank_dict(ledger: Ledger, rank: RankLedger) -> dict[str, Any]:
    geometry = ledger.geometry.ranks[rank.stage]
    data: dict[str, Any] = {
        "stage": rank.stage,
        "tp_rank": rank.tp_rank,
        "layers": len(geometry.layers),
        "kv_bytes_per_token": geometry.kv_bytes_per_token,
        "kv_bytes_per_token_kept": geometry.kv_bytes_per_token_kept,
        "kv_bytes_per_block": geometry.kv_bytes_per_block,
        "state_bytes_per_sequence": geometry.state_bytes_per_sequence,
        "replicas": geometry.replicas,
        "kv_bytes": rank.kv_bytes,
        "num_blocks": rank.num_blocks,
    }
    if rank.memory is not None:
        memory = rank.memory
        data["memory"] = {
            "gpu": memory.gpu.name,
            "gpu_bytes": memory.gpu.num_bytes,
            "utilization": memory.utilization,
            "weights_bytes": memory.weights,
            "weights_from": memory.weights_from,
            "non_kv_bytes": memory.non_kv,
            "non_kv_from": memory.non_kv_from,
        }
    return data
