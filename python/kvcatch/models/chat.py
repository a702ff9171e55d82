"""A model's chat template: from messages to the text of a prompt."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from kvcatch.errors import InvalidArgument
from kvcatch.models.extras import need

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A Jinja template in a sandbox, with what transformers gives templates.

    Those are ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes and the loop controls.

    Args:
        source: the template's text.
        tokens: what templates may name besides the messages: ``bos_token``, ``eos_token``...

    Raises:
        InvalidArgument: not a Jinja template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        jinja2 = need("jinja2")
        sandbox = need("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the model's chat template is damaged: {error}") from error
        self._error = jinja2.TemplateError
        self._tokens = dict(tokens)
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: what else the template may read (``tools``...).

        Raises:
            InvalidArgument: the template refuses these messages, or they lack what it reads.
        """
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise InvalidArgument(f"messages[{index}] has no role")
            if not isinstance(message.get("content", ""), str | list | type(None)):
                raise InvalidArgument(f"messages[{index}].content is neither text nor a list")
        values = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            return str(
                self._template.render(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, **values
                )
            )
        except (self._error, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidArgument(f"the chat template refuses these messages: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise InvalidArgument(message)
