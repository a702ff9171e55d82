"""A folder with a tiny model that a command can be given: it has a chat template and never ends by itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tiny_model as tiny

from kvcatch.models.gguf import GGUFFile
from kvcatch.models.tokenizer import tokenizer_from_gguf

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tiny_folder(where: Path, **changes: Any) -> Path:
    """Token by token its greedy output goes on to the limit: the end token's row is 0, never the likeliest."""
    tensors = tiny.hf_tensors()
    tensors["model.embed_tokens.weight"][1] = 0
    gguf = tiny.write_gguf(where / "tokenizer.gguf", tensors)
    tokenizer = tokenizer_from_gguf(GGUFFile(gguf))._tokenizer
    config = tiny.hf_config(**{"max_position_embeddings": 32_768, **changes})
    folder = tiny.write_folder(where / "tiny", tensors, config, tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
