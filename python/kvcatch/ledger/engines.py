"""The engines whose rules kvcatch knows, and what of a rule depends on the version.

vLLM's were read in its wheels 0.8.5 to 0.32.0; a fact holds from the first version it was seen in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_ENGINE", "ENGINES", "Engine", "EngineFamily"]

Version = tuple[int, ...]


class EngineFamily(NamedTuple):
    """What is known of one engine.

    Attributes:
        title: How its makers write it.
        first: The oldest version whose rules are known.
        newest: The newest one; it is taken where no version is named.
        block_size: Tokens of a block where the user names no size.
    """

    title: str
    first: Version
    newest: Version
    block_size: int


ENGINES: Mapping[str, EngineFamily] = {
    "vllm": EngineFamily("vLLM", (0, 3), (0, 33), 16),
    "sglang": EngineFamily("SGLang", (0, 4), (0, 5), 1),
    "trtllm": EngineFamily("TensorRT-LLM", (0, 9), (1, 2), 32),
    "tgi": EngineFamily("TGI", (3,), (3, 3), 1),
    "llamacpp": EngineFamily("llama.cpp", (0,), (0,), 1),
    "kvcatch": EngineFamily("kvcatch", (0,), (0,), 16),
}

_ALIASES = {"tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "llama.cpp": "llamacpp"}
_VERSIONLESS = ("llamacpp", "kvcatch")

DEFAULT_ENGINE = "vllm@0.32"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine in one version, such as ``vllm@0.32``.

    Attributes:
        name: Key of ENGINES.
        version: Its numbers, as many as were given.
    """

    name: str
    version: Version

    @classmethod
    def parse(cls, text: str) -> Engine:
        """Read ``NAME`` or ``NAME@VERSION``.

        Raises:
            InvalidArgument: an unknown engine, or a version outside of what is known.
        """
        name, at, version = text.strip().lower().partition("@")
        name = _ALIASES.get(name, name)
        family = ENGINES.get(name)
        if family is None:
            raise InvalidArgument(
                f"engine = {text!r}: unknown engine; known are {', '.join(ENGINES)}"
            )
        if not at:
            return cls(name, family.newest)
        if name in _VERSIONLESS:
            raise InvalidArgument(f"engine = {text!r}: {name} takes no version")
        if not re.fullmatch(r"v?\d{1,4}(\.\d{1,4}){0,3}", version):
            raise InvalidArgument(
                f"engine = {text!r}: not a version such as {name}@{_dotted(family.newest)}"
            )
        numbers = tuple(int(part) for part in version.removeprefix("v").split("."))
        known = numbers[: len(family.newest)] <= family.newest
        if numbers < family.first or not known:
            raise InvalidArgument(
                f"engine = {text!r}: unknown version; kvcatch knows {family.title} "
                f"{_dotted(family.first)} to {_dotted(family.newest)}"
            )
        return cls(name, numbers)

    def __str__(self) -> str:
        if self.name in _VERSIONLESS:
            return self.name
        return f"{self.name}@{_dotted(self.version)}"

    @property
    def title(self) -> str:
        """Name and version as a person reads them."""
        title = ENGINES[self.name].title
        return title if self.name in _VERSIONLESS else f"{title} {_dotted(self.version)}"

    def since(self, *version: int) -> bool:
        """Whether this version is ``version`` or later; missing numbers count as 0."""
        length = max(len(self.version), len(version))
        mine, other = (
            (*numbers, *(0,) * (length - len(numbers))) for numbers in (self.version, version)
        )
        return mine >= other

    @property
    def is_vllm(self) -> bool:
        """Whether it is any vLLM."""
        return self.name == "vllm"

    @property
    def is_vllm_v0(self) -> bool:
        """Whether it is a vLLM before 0.8, whose default core was V0."""
        return self.is_vllm and not self.since(0, 8)

    @property
    def null_blocks(self) -> int:
        """Blocks of the pool that no request ever gets.

        vLLM's V1 keeps block 0 back (v1/core/block_pool.py), TGI v3 too, for health checks
        (backends/v3/src/block_allocator.rs).
        """
        return 1 if self.name == "tgi" or (self.is_vllm and not self.is_vllm_v0) else 0

    @property
    def block_size(self) -> int:
        """Tokens per block where the user names no size."""
        return ENGINES[self.name].block_size

    @property
    def memory_utilization(self) -> float:
        """Default share of the GPU the engine takes: vLLM 0.9, from 0.20.2 on 0.92."""
        return 0.92 if self.is_vllm and self.since(0, 20, 2) else 0.9


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
