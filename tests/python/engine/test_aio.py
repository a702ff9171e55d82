"""Many callers on one engine: nothing is mixed up, nothing is left, errors reach those who wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from toy import GREEDY, expected, make

from kvcatch.engine.aio import AsyncEngine, EngineDied
from kvcatch.engine.engine import Rejected
from kvcatch.engine.sampling import SamplingParams


async def collect(running: AsyncEngine, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count)
    stream = await running.add(prompt, params)
    return [token async for delta in stream for token in delta.tokens]


def test_many_callers_each_get_their_own() -> None:
    async def main() -> None:
        engine = make(num_blocks=30)
        async with AsyncEngine(engine) as running:
            prompts = [[n, n + 1, n + 2, *range(n % 9)] for n in range(40)]
            got = await asyncio.gather(*(collect(running, p, 5 + len(p)) for p in prompts))
            assert got == [expected(p, 5 + len(p)) for p in prompts]
            await running.drain()
            await running.call(engine.check_idle)
        assert not running.is_alive

    asyncio.run(main())


def test_all_branches_are_delivered_to_the_end() -> None:
    async def main() -> None:
        async with AsyncEngine(make()) as running:
            stream = await running.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=6, n=3))
            got: dict[int, list[int]] = {}
            async for delta in stream:
                got.setdefault(delta.index, []).extend(delta.tokens)
            assert got == dict.fromkeys(range(3), expected([1, 2, 3], 6))

    asyncio.run(main())


def test_a_caller_who_goes_away_frees_the_blocks() -> None:
    async def main() -> None:
        engine = make(num_blocks=30)
        async with AsyncEngine(engine) as running:
            stream = await running.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=100))
            async for _ in stream:
                break
            stream.cancel()
            await running.drain()
            assert engine.counters.finished == {"abort": 1}
            forward, pause = engine.runner.forward, threading.Event()

            def slow(items: Any, pool: Any) -> Any:
                pause.wait(0.02)
                return forward(items, pool)

            engine.runner.forward = slow  # type: ignore[method-assign]
            task = asyncio.create_task(collect(running, [5] * 20, 90))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await running.drain()
            await running.call(engine.check_idle)

    asyncio.run(main())


def test_a_caller_cancelled_while_it_asks_leaves_no_request() -> None:
    async def main() -> None:
        engine = make(num_blocks=30)
        async with AsyncEngine(engine) as running:
            first = await running.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60))
            forward, begun, go_on = engine.runner.forward, threading.Event(), threading.Event()

            def slow(items: Any, pool: Any) -> Any:
                begun.set()
                assert go_on.wait(10)
                return forward(items, pool)

            engine.runner.forward = slow  # type: ignore[method-assign]
            assert await asyncio.to_thread(begun.wait, 10)
            asking = asyncio.create_task(
                running.add([4, 5], SamplingParams(max_tokens=90), request_id="nobody")
            )
            await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            go_on.set()
            assert await running.call(lambda: "nobody" in engine.requests) is False
            first.cancel()
            await running.drain()
            await running.call(engine.check_idle)
            assert engine.counters.finished["abort"] == 2

    asyncio.run(main())


def test_a_caller_whose_loop_is_closed_does_not_end_the_engine() -> None:
    async def main() -> None:
        engine = make(num_blocks=30)
        async with AsyncEngine(engine) as running:
            inside, go_on = threading.Event(), threading.Event()

            def hold() -> None:
                inside.set()
                assert go_on.wait(10)

            async def ask() -> None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(running.call(hold), 0.01)

            await asyncio.to_thread(
                asyncio.run, ask()
            )  # a loop of its own, closed before the answer
            assert inside.is_set()
            go_on.set()
            assert await collect(running, [1, 2, 3], 5) == expected([1, 2, 3], 5)
            assert running.is_alive

    asyncio.run(main())


def test_refusals_reach_the_caller() -> None:
    async def main() -> None:
        async with AsyncEngine(make()) as running:
            with pytest.raises(Rejected, match="max_model_len"):
                await running.add([1] * 200, GREEDY)
            assert await collect(running, [1], 3) == expected([1], 3)

    asyncio.run(main())


def test_an_error_in_a_step_reaches_everyone_who_waits_and_everyone_after() -> None:
    async def main() -> None:
        engine = make()
        forward = engine.runner.forward

        def fail(items: Any, pool: Any) -> Any:
            if len(items) > 1:
                raise RuntimeError("the GPU fell off")
            return forward(items, pool)

        engine.runner.forward = fail  # type: ignore[method-assign]
        async with AsyncEngine(engine) as running:
            waiting = asyncio.gather(
                *(collect(running, [n], 50) for n in range(4)), return_exceptions=True
            )
            results = await asyncio.wait_for(waiting, 10)
            assert all(isinstance(result, EngineDied) for result in results)
            assert all("the GPU fell off" in str(result) for result in results)
            with pytest.raises(EngineDied, match="RuntimeError"):
                await running.add([1], GREEDY)
            assert not running.is_alive

    asyncio.run(main())


def test_stopping_ends_those_under_way_and_hangs_nobody() -> None:
    async def main() -> None:
        engine = make()
        running = AsyncEngine(engine)
        running.start()
        stream = await running.add([1, 2], SamplingParams(temperature=0, max_tokens=100))
        forward, slow = engine.runner.forward, threading.Event()

        def wait(items: Any, pool: Any) -> Any:
            slow.wait(0.02)
            return forward(items, pool)

        engine.runner.forward = wait  # type: ignore[method-assign]
        task = asyncio.create_task(running.stop())
        with pytest.raises(EngineDied, match="stopped"):
            async for _ in stream:
                pass
        await task
        with pytest.raises(EngineDied):
            await running.call(lambda: 1)

    asyncio.run(main())
