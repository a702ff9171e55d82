"""Typed reads from a model's config, each refusal naming the file, the field and the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from kvcatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_COUNT = 2**40
"""A larger number in a config is taken for damage."""

_SHOWN = 60


class MissingField(ConfigError):
    """A field that has to be there is not."""


class Fields:
    """A config, or one part of it, with where it came from.

    Attributes:
        data: The parsed JSON object.
        where: How a message names it: a path or a model's name.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fail(self, problem: str) -> NoReturn:
        """Raise ConfigError with where it happened."""
        raise ConfigError(f"{self.where}: {problem}")

    def reject(self, name: str, problem: str) -> NoReturn:
        """Raise ConfigError that shows the field and its value."""
        shown = repr(self.data.get(name))
        if len(shown) > _SHOWN:
            shown = shown[: _SHOWN - 3] + "..."
        self.fail(f"{name} = {shown}: {problem}")

    def get(self, name: str) -> Any:
        """The raw value; None where it is missing or null."""
        return self.data.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(name) is not None

    def optional_count(self, name: str, *, minimum: int = 1) -> int | None:
        """A whole number of at least ``minimum``, or None where it is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            self.reject(name, "not a whole number")
        if not minimum <= value <= MAX_COUNT:
            self.reject(name, f"must lie between {minimum} and {MAX_COUNT}")
        return value

    def count(self, *names: str, minimum: int = 1) -> int:
        """The first of ``names`` that is there, as a whole number of at least ``minimum``."""
        for name in names:
            value = self.optional_count(name, minimum=minimum)
            if value is not None:
                return value
        raise self._missing(names)

    def count_or(self, name: str, default: int, *, minimum: int = 1) -> int:
        """As ``count``, with what the architecture defines for a missing field."""
        value = self.optional_count(name, minimum=minimum)
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """A JSON true or false."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.reject(name, "not true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where it is missing."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            self.reject(name, "not a string")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of strings, or None where it is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.reject(name, "not a list of strings")
        return value

    def counts(self, name: str) -> list[int] | None:
        """A list of whole numbers from 0, or None where it is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_COUNT
            for item in value
        ):
            self.reject(name, "not a list of whole numbers")
        return value

    def part(self, name: str) -> Fields:
        """A nested object."""
        value = self.data.get(name)
        if not isinstance(value, dict):
            self.reject(name, "not an object")
        return Fields(value, f"{self.where}: {name}")

    def missing(self, *names: str) -> NoReturn:
        """Raise MissingField for a field that has to be there."""
        raise self._missing(names)

    def _missing(self, names: tuple[str, ...]) -> MissingField:
        return MissingField(f"{self.where}: no {' or '.join(names)} in the config")
