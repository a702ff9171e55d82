# ruff: noqa: T201
"""Write ``goldens.npz``: what transformers makes of the default model's own file.

    pip install transformers accelerate      (once; the tests do not need them)
    python tests/python/models/make_goldens.py

Tokens are transformers' ``generate`` (greedy, float32, one prompt at a time, ends ignored); logits are
one forward pass over prompt and tokens. Stored are, for every generated token, the largest logit, the
one behind it and the log of the sum of exponentials, and for the first and last token the logits of
some columns.

transformers (5.24) reads every byte-level GGUF vocabulary with GPT-2's splitting rule and leaves out
that this model's (``tokenizer.ggml.pre`` = smollm) splits digits off first, which shows where two
spaces stand before a digit. That rule is put back before anything is encoded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from golden_texts import CHATS, MESSAGES, NUM_TOKENS, PLAIN, STRINGS
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcatch.models.pull import pull

COLUMNS = 256
MIN_GAP = 0.01
TARGET = Path(__file__).with_name("goldens.npz")


def main() -> None:
    path = pull()
    source, name = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    rendered = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in MESSAGES
    ]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], tokenize=False, add_generation_prompt=True
        )
        for chat in CHATS
    ] + list(PLAIN)
    columns = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, COLUMNS, False))
    prompts, tokens, tops, sums, logits = [], [], [], [], []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
            rows = model(made).logits[0, len(ids) - 1 : -1].double()
        new = made[0, len(ids) :]
        assert len(new) == NUM_TOKENS
        assert torch.equal(rows.argmax(-1), new)
        prompts.append(ids)
        tokens.append(new.numpy())
        tops.append(rows.topk(2).values.numpy())
        sums.append(rows.logsumexp(-1).numpy())
        logits.append(rows[[0, -1]][:, columns].numpy())
        print(len(ids), repr(tokenizer.decode(new)), file=sys.stderr)
    gaps = np.array(tops)[:, :, 0] - np.array(tops)[:, :, 1]
    print(f"least gap between first and second: {gaps.min():.4f}", file=sys.stderr)
    close = [texts[row] for row in np.flatnonzero(gaps.min(1) < MIN_GAP)]
    assert not close, f"nearly a tie, and rounding would decide: take other prompts for {close}"
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in STRINGS]
    np.savez_compressed(
        TARGET,
        prompts=json.dumps(prompts),
        strings=json.dumps(encoded),
        rendered=json.dumps(rendered),
        columns=columns.astype(np.int32),
        tokens=np.array(tokens, np.int32),
        tops=np.array(tops, np.float32),
        sums=np.array(sums, np.float32),
        logits=np.array(logits, np.float32),
    )
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
