"""The plugin's settings, without vLLM."""

from __future__ import annotations

import pytest

from kvcatch.errors import InvalidArgument
from kvcatch.vllm.settings import VARIABLES, Settings


def test_nothing_is_asked_for_by_default() -> None:
    assert not Settings.read({}).any
    assert not Settings.read({"KVCATCH_VLLM": " , "}).any


def test_switches_may_come_in_any_order_with_blanks() -> None:
    settings = Settings.read({"KVCATCH_VLLM": " order, pool ,"})
    assert settings.switches == ("pool", "order")


def test_variables_are_not_looked_at_while_nothing_is_asked_for() -> None:
    assert Settings.read({"KVCATCH_VLLM_TOP_K": "many"}) == Settings()


def test_every_variable_sets_its_field() -> None:
    assert {field for field, _ in VARIABLES.values()} | {
        "pool",
        "evict",
        "order",
        "observe",
    } == set(Settings.__dataclass_fields__)
    environ = {
        "KVCATCH_VLLM": "order",
        "KVCATCH_VLLM_ORDER_WINDOW": " 7 ",
        "KVCATCH_VLLM_TOKEN": "x",
    }
    settings = Settings.read(environ)
    assert (settings.order_window, settings.token, settings.pool) == (7, "x", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVCATCH_VLLM", "pool;evict"),
        ("KVCATCH_VLLM_PLACEMENT", "heap"),
        ("KVCATCH_VLLM_EVICTION", "clairvoyant"),
        ("KVCATCH_VLLM_ORDER_WINDOW", "0"),
        ("KVCATCH_VLLM_ORDER_PASSES", "-1"),
        ("KVCATCH_VLLM_TOP_K", "1.5"),
        ("KVCATCH_VLLM_TOPK", "1"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=value if name == "KVCATCH_VLLM" else name):
        Settings.read({"KVCATCH_VLLM": "pool", name: value})
