"""Random damage to real configs: a typed refusal or a plausible answer, never a traceback or a silent zero."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument
from kvcatch.geometry import BUILT_IN, KvDtype, Parallel, read_config
from kvcatch.ledger import Pool, plan, to_dict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.ledger import Ledger

JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 3, 7, 64, 10**4, 10**9, 10**30, -(10**30), 2.5, 0.0, 1e300]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(["full_attention", "sliding_attention", "fp8", "bfloat16", "M*-", "auto"]),
)
TYPES = sorted(
    {config["model_type"] for config in BUILT_IN.values()}
    | {"kimi_linear", "bamba", "granitemoehybrid"}
)


T = TypeVar("T")


def answer(call: Callable[[], T]) -> T | None:
    """What a call gives; None for a refusal, which has to be one line."""
    message = ""
    try:
        return call()
    except InvalidArgument as error:
        message = str(error)
    assert message.strip()
    assert "\n" not in message
    return None


@st.composite
def damaged(draw: Callable[..., Any]) -> dict[str, Any]:
    config = copy.deepcopy(BUILT_IN[draw(st.sampled_from(sorted(BUILT_IN)))])
    for _ in range(draw(st.integers(1, 4))):
        action = draw(st.sampled_from(["drop", "junk", "type", "add", "nest"]))
        keys = sorted(config)
        if action == "drop" and keys:
            config.pop(draw(st.sampled_from(keys)))
        elif action == "junk" and keys:
            config[draw(st.sampled_from(keys))] = draw(JUNK)
        elif action == "type":
            config["model_type"] = draw(st.sampled_from(TYPES))
        elif action == "add":
            name = draw(
                st.sampled_from(
                    ["layer_types", "sliding_window", "rope_scaling", "quantization_config", "no_rope_layers",
                     "index_topk", "linear_attn_config", "attn_layer_indices", "mamba_n_heads", "use_sliding_window",
                     "mlp_only_layers", "head_dim", "text_config", "architectures", "torch_dtype"]
                )
            )  # fmt: skip
            config[name] = draw(JUNK)
        else:
            config = {"text_config": config, "torch_dtype": "bfloat16"}
    return config


@given(config=damaged(), tp=st.sampled_from([1, 2, 8]), pp=st.integers(1, 3))
@settings(max_examples=400, deadline=None)
def test_damage_is_refused_or_answered(config: dict[str, Any], tp: int, pp: int) -> None:
    def work_out() -> Ledger:
        model = read_config(config, "damaged")
        return plan(
            model,
            Pool(num_blocks=100_000),
            parallel=Parallel(tp, pp),
            max_model_len=min(1000, model.max_model_len or 1000),
        )

    ledger = answer(work_out)
    if ledger is None:
        return
    model = ledger.geometry.model
    per_token = model.bytes_per_token(KvDtype.parse("auto", model.dtype))
    assert per_token > 0 or all(kind == "state" for kind in model.kinds)
    assert ledger.num_blocks == 100_000
    assert ledger.blocks_per_request > 0
    assert any(rank.kv_bytes_per_block > 0 for rank in ledger.geometry.ranks)
    assert ledger.max_servable_length > 0
    json.dumps(to_dict(ledger, explain=True), allow_nan=False)


@given(
    data=st.recursive(
        JUNK, lambda inner: st.dictionaries(st.sampled_from(["text_config", "model_type"]), inner)
    )
)
@settings(max_examples=200, deadline=None)
def test_anything_that_is_json(data: object) -> None:
    assert answer(lambda: read_config(data, "anything")) is None
