"""The engine as a library: prompts in, texts out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch.engine.build import build_engine
from kvcatch.engine.sampling import SamplingParams
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvcatch.engine.engine import Engine
    from kvcatch.engine.output import Delta
    from kvcatch.engine.request import Request
    from kvcatch.engine.sampling import TokenLogprobs

__all__ = ["LLM", "Completion", "GeneratedOutput"]


@dataclass(slots=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        index: which of ``n``.
        text: without the stop text that ended it.
        tokens: ids, the end token among them.
        logprobs: where asked for.
        finish_reason: ``stop``, ``length`` or ``abort``.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class GeneratedOutput:
    """What one prompt gave.

    Attributes:
        request_id: the engine's name for it.
        prompt_tokens: token ids of the prompt.
        hit_tokens: of those, found in the prefix cache.
        completions: its ``n`` continuations.
        ttft: seconds from arrival to the first token.
        e2e: seconds from arrival to the last.
    """

    request_id: str
    prompt_tokens: list[int]
    hit_tokens: int
    completions: list[Completion]
    ttft: float | None = None
    e2e: float | None = None

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.completions[0].text


class LLM:
    """A model with an engine around it.

        llm = LLM()                                            # SmolLM2-135M-Instruct
        outputs = llm.generate(["The sky is"], SamplingParams(max_tokens=16, temperature=0))
        outputs[0].text

    Args:
        model: GGUF file or safetensors folder; ``None`` is the embedded default.
        options: of :func:`~kvcatch.engine.build.build_engine`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.built = build_engine(model, **options)
        self.engine: Engine = self.built.engine
        self.tokenizer = self.built.loaded.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GeneratedOutput]:
        """Continue prompts, all batched together.

        Args:
            prompts: texts, or lists of token ids.
            params: for all, or one each.

        Raises:
            InvalidArgument: a prompt that can never run; none is begun then.
        """
        texts: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._run([self._encode(prompt) for prompt in texts], params)

    def chat(
        self,
        conversations: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GeneratedOutput]:
        """The next turn of one conversation, or of several.

        Args:
            conversations: messages with ``role`` and ``content``, oldest first; or a list of such lists.
            params: for all, or one each.
        """
        several: Any = conversations
        if several and isinstance(several[0], dict):
            several = [several]
        return self._run([self.tokenizer.encode_chat(messages) for messages in several], params)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """The text of one continuation as it becomes certain. Closing the iterator ends the request."""
        request = self.engine.add(self._encode(prompt), params)
        try:
            while not request.is_finished:
                for delta in self.engine.step():
                    if delta.request_id == request.id and delta.index == 0 and delta.text:
                        yield delta.text
        finally:
            self.engine.abort(request.id)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[GeneratedOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise InvalidArgument(f"{len(each)} params for {len(prompts)} prompts")
        requests: list[Request] = []
        try:
            requests += (self.engine.add(p, one) for p, one in zip(prompts, each, strict=True))
            outputs = {
                request.id: [Completion(index) for index in range(request.params.n)]
                for request in requests
            }
            while not all(request.is_finished for request in requests):
                for delta in self.engine.step():
                    if delta.request_id in outputs:
                        _add(outputs[delta.request_id][delta.index], delta)
        finally:
            for request in requests:
                self.engine.abort(request.id)
        return [_output(request, outputs[request.id]) for request in requests]

    def __repr__(self) -> str:
        return f"<LLM {self.built.loaded.name}: {self.engine!r}>"


def _add(completion: Completion, delta: Delta) -> None:
    completion.text += delta.text
    completion.tokens += delta.tokens
    completion.logprobs += delta.logprobs
    if delta.finish is not None:
        completion.finish_reason = delta.finish.value


def _output(request: Request, completions: list[Completion]) -> GeneratedOutput:
    arrived = request.arrived
    return GeneratedOutput(
        request.id,
        request.prompt,
        request.hit_tokens or 0,
        completions,
        None if request.first_token is None else request.first_token - arrived,
        None if request.finished is None else request.finished - arrived,
    )
