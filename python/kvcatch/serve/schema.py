"""What the body of a request may hold.

Types are strict, as OpenAI's are. A field that would change the output and is not served (tools, penalties) is
refused unless it has the value that changes nothing; a field nobody knows is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from kvcatch.engine.sampling import MAX_LOGPROBS, SamplingParams

__all__ = ["ChatBody", "CompletionBody", "Message", "StreamOptions"]

MAX_PROMPTS = 256
"""Most prompts of one completions call."""

Token = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
"""Fields of OpenAI's API that are not served, and the values with which they say nothing."""

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
    }
)
"""Fields that do not change the output."""


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class _Body(BaseModel):
    """What both calls share; the last group are vLLM's extensions."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: StrictInt | None = None
    ignore_eos: bool = False
    min_tokens: StrictInt = 0
    stop_token_ids: list[Token] | None = None
    priority: StrictInt = 0
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("the body must be a JSON object")
        kept = {}
        for name, value in data.items():
            if name in IGNORED:
                continue
            if name in NEUTRAL and name not in cls.model_fields:
                if value is not None and value not in NEUTRAL[name]:
                    raise ValueError(f"{name} is not served; leave it out")
                continue
            kept[name] = value
        return kept

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; InvalidArgument for values that cannot be."""
        stop = () if self.stop is None else self.stop
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            n=1 if self.n is None else self.n,
            seed=self.seed,
            stop=stop,  # type: ignore[arg-type]
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
        )


class CompletionBody(_Body):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, as text or as tokens."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @model_validator(mode="after")
    def _some_prompts(self) -> CompletionBody:
        count = len(self.prompts())
        if not 1 <= count <= MAX_PROMPTS:
            raise ValueError(f"prompt has {count} prompts: must be 1 to {MAX_PROMPTS}")
        return self


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class ChatBody(_Body):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
