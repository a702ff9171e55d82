"""Where a request comes from: tags taken from its id, its adapter and its priority."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcatch.errors import InvalidArgument

__all__ = ["Tagger"]

_LONGEST_ID = 200
_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Tagger:
    """Gives a request its tags.

    Attributes:
        pattern: Searched in the request id; its named groups become tags, and without any the
            first group (or the whole match) becomes the tag ``source``. None for no such tag.
    """

    pattern: re.Pattern[str] | None = None

    @classmethod
    def parse(cls, text: str | None) -> Tagger:
        """From the operator's pattern; empty for none.

        Raises:
            InvalidArgument: It is no regular expression.
        """
        if not text:
            return cls()
        try:
            return cls(re.compile(text))
        except (re.error, RecursionError) as error:
            raise InvalidArgument(
                f"tag pattern {text!r}: not a regular expression: {error}"
            ) from None

    def tags(self, request_id: str, lora: str | None, priority: int | None) -> dict[str, str]:
        """Tags of one request: ``lora`` and ``priority`` where it has them, and those of the pattern."""
        found: dict[str, str] = {}
        if self.pattern is not None:
            match = self.pattern.search(request_id[:_LONGEST_ID])
            if match is not None:
                named = match.groupdict()
                if not named:
                    named = {"source": match[1] if match.re.groups else match[0]}
                found = {name: value[:_LONGEST_VALUE] for name, value in named.items() if value}
        if lora:
            found["lora"] = lora[:_LONGEST_VALUE]
        if priority:
            found["priority"] = str(priority)
        return found
