"""Decode speed of transformers' ``generate``, for ``benches/engine.py``, under any Python that has it.

    python benches/transformers_decode.py FOLDER < job.json

The job has ``prompts`` (lists of token ids) and ``output_tokens``. Prompts are padded on the left to one length. Prints
JSON: seconds of a call that generates one token and of one that generates all, medians and best of ``repeats``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Read the job, run it, print the times."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, job["dtype"]))
    model.eval()
    prompts = job["prompts"]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        assert out.shape[1] == longest + count
        return time.perf_counter() - begin

    seconds(2)
    first = [seconds(1) for _ in range(job["repeats"])]
    whole = [seconds(job["output_tokens"]) for _ in range(job["repeats"])]
    threads = torch.get_num_threads()
    json.dump(
        {
            "first": statistics.median(first),
            "whole": statistics.median(whole),
            "threads": threads,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
