"""What the plugin is asked to do: environment variables, read once, into :class:`Settings`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PREFIX", "SWITCHES", "VARIABLES", "Settings"]

PREFIX = "KVCATCH_VLLM"
SWITCHES = ("pool", "evict", "order", "observe")


@dataclass(frozen=True)
class Settings:
    """The plugin's settings; every field but the switches is one variable of :data:`VARIABLES`.

    Attributes:
        pool: Free blocks are handed out in runs.
        evict: Cached blocks are given up by the core's policy, and retained where a request asks.
        order: Waiting requests with a longer cached prefix may enter earlier.
        observe: Refusals and holdings are published.
        placement: Placement of ``pool``.
        eviction: Policy of ``evict``.
        order_window: How many waiting requests ``order`` looks at.
        order_passes: How often one waiting request may be passed over by later ones.
        socket: Path of the observer's Unix socket; empty for its default.
        listen: ``host:port`` on which the observer listens too; empty for none.
        token: Bearer token that readers of ``listen`` must send; empty for none.
        tag_pattern: Regular expression whose first group, found in a request id, is its source tag.
        top_k: How many requests and tags the observer's pages list.
    """

    pool: bool = False
    evict: bool = False
    order: bool = False
    observe: bool = False
    placement: str = "bitmap"
    eviction: str = "slru"
    order_window: int = 64
    order_passes: int = 64
    socket: str = ""
    listen: str = ""
    token: str = ""
    tag_pattern: str = ""
    top_k: int = 10

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return self.pool or self.evict or self.order or self.observe

    @property
    def switches(self) -> tuple[str, ...]:
        """The switches that are on, in the order they are documented."""
        return tuple(name for name in SWITCHES if getattr(self, name))

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from the environment.

        Raises:
            InvalidArgument: An unknown switch or variable, or a value that cannot be; the message names it.
        """
        environ = os.environ if environ is None else environ
        fields: dict[str, object] = {}
        for name in (part.strip() for part in environ.get(PREFIX, "").split(",")):
            if name and name not in SWITCHES:
                raise InvalidArgument(
                    f"{PREFIX} names {name!r}: must be a comma-separated list of {', '.join(SWITCHES)}"
                )
            if name:
                fields[name] = True
        if not fields:
            return cls()
        for name, text in environ.items():
            if not name.startswith(f"{PREFIX}_"):
                continue
            if name not in VARIABLES:
                known = ", ".join(sorted(VARIABLES))
                raise InvalidArgument(f"{name}: no such setting; there are {known}")
            field, parse = VARIABLES[name]
            if text.strip():
                fields[field] = parse(name, text.strip())
        return cls(**fields)  # type: ignore[arg-type]


def _text(name: str, text: str) -> str:
    del name
    return text


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 20:
        raise InvalidArgument(f"{name} = {text!r}: must be an integer between 1 and {1 << 20}")
    return int(text)


def _one_of(names: Callable[[], list[str]]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in names():
            raise InvalidArgument(f"{name} = {text!r}: must be one of {', '.join(names())}")
        return text

    return parse


def _placements() -> list[str]:
    from kvcatch import placements

    return placements()


def _evictions() -> list[str]:
    from kvcatch import evictions

    # Clairvoyance needs to be told the future.
    return [name for name in evictions() if name != "clairvoyant"]


VARIABLES: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    f"{PREFIX}_PLACEMENT": ("placement", _one_of(_placements)),
    f"{PREFIX}_EVICTION": ("eviction", _one_of(_evictions)),
    f"{PREFIX}_ORDER_WINDOW": ("order_window", _count),
    f"{PREFIX}_ORDER_PASSES": ("order_passes", _count),
    f"{PREFIX}_SOCKET": ("socket", _text),
    f"{PREFIX}_LISTEN": ("listen", _text),
    f"{PREFIX}_TOKEN": ("token", _text),
    f"{PREFIX}_TAG_PATTERN": ("tag_pattern", _text),
    f"{PREFIX}_TOP_K": ("top_k", _count),
}
"""Variable -> the field it sets, and how its text is read."""
