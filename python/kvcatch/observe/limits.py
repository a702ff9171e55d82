"""What /metrics does not carry: the engine's version, and the limits it was started with."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument
from kvcatch.observe.engines import FAMILIES

if TYPE_CHECKING:
    from kvcatch.observe.engines.table import Version

__all__ = ["EngineVersion", "Limits", "read_engine_args"]

_VERSION = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){0,3})(?:[.+\-]?(?:rc|dev|post|a|b|cu|g)[\w.+\-]*)?")
_ALIASES = {"tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "llama.cpp": "llamacpp"}
_KNOWN = (*FAMILIES, "llamacpp")
_TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "tgi": "TGI",
    "dynamo": "Dynamo",
    "lmcache": "LMCache",
    "llamacpp": "llama.cpp",
    "kvcatch": "kvcatch",
}


def _at_least(left: Version, right: Version) -> bool:
    length = max(len(left), len(right))
    return (*left, *(0,) * (length - len(left))) >= (*right, *(0,) * (length - len(right)))


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """An engine and what is known of its version.

    Attributes:
        name: Key of the adapters, or ``llamacpp``.
        low: The version, or the oldest it can be; None when nothing is known.
        high: The version, or the newest it can be; None when nothing is known.
        source: ``given``, ``/version``, ``startup log`` or ``inferred from metric names``.
    """

    name: str
    low: Version | None = None
    high: Version | None = None
    source: str = "unknown"

    @classmethod
    def parse(cls, text: str, source: str = "given") -> EngineVersion:
        """Read ``NAME`` or ``NAME@VERSION``.

        Raises:
            InvalidArgument: The engine is unknown, or the version is not one.
        """
        name, at, version = text.strip().lower().partition("@")
        name = _ALIASES.get(name, name)
        if name not in _KNOWN:
            raise InvalidArgument(
                f"engine = {text!r}: unknown engine; known are {', '.join(_KNOWN)}"
            )
        if not at:
            return cls(name)
        match = _VERSION.fullmatch(version)
        if match is None:
            raise InvalidArgument(f"engine = {text!r}: not a version such as {name}@0.32")
        return cls.exact(name, match[1], source)

    @classmethod
    def exact(cls, name: str, version: str, source: str) -> EngineVersion:
        """One known version; text after the numbers is dropped, and what is no version is unknown."""
        match = _VERSION.match(version.strip())
        if match is None:
            return cls(name)
        numbers = tuple(int(part) for part in match[1].split("."))
        # "0.32" stands for all of 0.32.x.
        high = numbers if len(numbers) > 2 else (*numbers, *(9999,) * (3 - len(numbers)))
        return cls(name, numbers, high, source)

    def since(self, *version: int) -> bool | None:
        """Whether it is ``version`` or later; None when that is not known."""
        if self.low is not None and _at_least(self.low, version):
            return True
        if self.high is not None and not _at_least(self.high, version):
            return False
        return None

    @property
    def title(self) -> str:
        """Name and version as a person reads them."""
        title = _TITLES[self.name]
        if self.low is None and self.high is None:
            return title
        low, high = (
            None if version is None else ".".join(str(part) for part in version if part != 9999)
            for version in (self.low, self.high)
        )
        if not self.source.startswith("inferred"):
            return f"{title} {low}"
        if high is None:
            return f"{title} {low} or later"
        return f"{title} {high} or earlier" if low is None else f"{title} {low} to {high}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine; None where nothing says so.

    Attributes:
        max_num_seqs: Sequences that may run at once.
        max_model_len: Most tokens of a request.
        token_budget: Tokens of one step.
        watermark: Share of the pool that an admission leaves free.
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        pool_tokens: Tokens the pool holds.
        max_concurrency: Requests of the longest length that fit, as the engine printed it.
        lora: LoRA adapters are on; with ``max_loras`` at once.
        max_loras: Adapters that may run at once.
        policy: TensorRT-LLM's capacity policy.
        scheduling: Order of the queue.
        source: Where each came from.
    """

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    token_budget: int | None = None
    watermark: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    pool_tokens: int | None = None
    max_concurrency: float | None = None
    lora: bool | None = None
    max_loras: int | None = None
    policy: str | None = None
    scheduling: str | None = None
    source: dict[str, str] = field(default_factory=dict)

    def joined(self, other: Limits) -> Limits:
        """These, and the other's where these say nothing."""
        known = {
            item.name: getattr(other, item.name)
            for item in fields(self)
            if item.name != "source"
            and getattr(self, item.name) is None
            and getattr(other, item.name) is not None
        }
        sources = {name: other.source[name] for name in known if name in other.source}
        return replace(self, **known, source={**self.source, **sources})

    def to_dict(self) -> dict[str, Any]:
        """What is known, with its source."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name != "source" and getattr(self, item.name) is not None
        } | {"source": self.source}


_FLAGS: dict[str, tuple[str, type]] = {
    "max-num-seqs": ("max_num_seqs", int),
    "max-running-requests": ("max_num_seqs", int),
    "max-batch-size": ("max_num_seqs", int),
    "parallel": ("max_num_seqs", int),
    "max-concurrent-requests": ("", int),
    "max-model-len": ("max_model_len", int),
    "context-length": ("max_model_len", int),
    "max-seq-len": ("max_model_len", int),
    "max-total-tokens": ("max_model_len", int),
    "ctx-size": ("pool_tokens", int),
    "max-num-batched-tokens": ("token_budget", int),
    "chunked-prefill-size": ("token_budget", int),
    "max-num-tokens": ("token_budget", int),
    "watermark": ("watermark", float),
    "num-gpu-blocks-override": ("num_blocks", int),
    "num-blocks": ("num_blocks", int),
    "block-size": ("block_size", int),
    "page-size": ("block_size", int),
    "tokens-per-block": ("block_size", int),
    "max-total-num-tokens": ("pool_tokens", int),
    "max-loras": ("max_loras", int),
    "capacity-scheduler-policy": ("policy", str),
    "scheduling-policy": ("scheduling", str),
}
_SUFFIX = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def _number(flag: str, text: str) -> int | None:
    if text.lower() in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([kKmM]?)", text)
    if match is None:
        raise InvalidArgument(f"engine args: --{flag} {text!r} is not a number")
    return int(float(match[1]) * _SUFFIX.get(match[2], 1))


def read_engine_args(text: str, source: str = "engine args") -> Limits:
    """Limits from an engine's command line; flags it does not know are passed over.

    Raises:
        InvalidArgument: The quotes do not match, or a limit is not a number.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidArgument(f"engine args {text!r:.80}: {error}") from None
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, equals, value = word[2:].partition("=")
        flag = flag.replace("_", "-")
        if flag == "enable-lora":
            found["lora"] = True
            continue
        if flag not in _FLAGS:
            continue
        if not equals:
            if index + 1 >= len(words):
                raise InvalidArgument(f"engine args: --{flag} has no value")
            value = words[index + 1]
        name, kind = _FLAGS[flag]
        if not name:
            continue
        if kind is int:
            number = _number(flag, value)
            if number == 0:
                raise InvalidArgument(f"engine args: --{flag} 0 must be 1 or more")
            found[name] = number
        elif kind is float:
            try:
                share = float(value)
            except ValueError:
                share = -1.0
            if not 0 <= share < 1:
                raise InvalidArgument(f"engine args: --{flag} {value!r} is not a share below 1")
            found[name] = share
        else:
            found[name] = value
    found = {name: value for name, value in found.items() if value is not None}
    return Limits(**found, source=dict.fromkeys(found, source))
