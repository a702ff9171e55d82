"""What observing costs vLLM's scheduler: steps of 256 running requests with and without the hooks.

    PYTHONPATH=python VLLM_PYTHON benches/vllm_observe.py [--steps 300] [--rounds 5] [--running 256] [--waiting 0]

``VLLM_PYTHON`` is the Python of an environment with vLLM 0.32 (``tests/vllm``). One scheduler of vLLM is
stepped with the hooks and without them in turn; a step is ``schedule`` and ``update_from_output``, with no
model behind it. Times are CPU time of the thread: other
processes do not count. A step with a model takes longer: its length is given with ``--step-ms``, and the cost
is shown as a share of either.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm" / "observe"))


WARM_STEPS = 20  # after a change of hooks, not timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0, help="requests that cannot enter")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--step-ms", type=float, default=15.0, help="a step with its model")
    parser.add_argument(
        "--scrape-s", type=float, default=0.0, help="read /metrics so often; 0: not"
    )
    args = parser.parse_args()

    from real_scheduler import Scheduler, make_request, make_scheduler, step

    from kvcatch.vllm.observe.hooks import observer_of, watch
    from kvcatch.vllm.observe.pages import EnginePages, Names
    from kvcatch.vllm.observe.tags import Tagger

    length = args.prompt + 2 * (args.steps + WARM_STEPS) * args.rounds + 64
    blocks = args.running * -(-length // 16) + 64
    folder = Path(tempfile.mkdtemp())

    def make() -> Scheduler:
        scheduler = make_scheduler(
            folder,
            num_blocks=blocks,
            max_num_seqs=args.running,
            max_num_batched_tokens=args.running * args.prompt,
        )
        for at in range(args.running + args.waiting):
            scheduler.add_request(
                make_request(f"request-{at}", args.prompt, seed=at, max_tokens=1_000_000)
            )
        step(scheduler)
        assert len(scheduler.running) == args.running
        return scheduler

    names = ("schedule", "update_from_output", "finish_requests", "make_stats")
    own = {name: getattr(Scheduler, name) for name in names}
    watch(Scheduler, Tagger(), 512, lambda observer: None)
    hooked = {name: getattr(Scheduler, name) for name in names}
    scheduler = make()
    observer = observer_of(scheduler)
    assert observer is not None

    def switch(*, on: bool) -> None:
        """The same scheduler with or without hooks: two of them differ by more than the hooks cost."""
        for name, method in (hooked if on else own).items():
            setattr(Scheduler, name, method)
        if on:
            observer.begin()
            observer.bind()
        else:
            observer.unbind()
        for _ in range(WARM_STEPS):
            step(scheduler)

    stop = threading.Event()
    if args.scrape_s:
        pages = EnginePages(observer, Names("model", 0, "0.32", "bench"), 10, 16)

        def scrape() -> None:
            while not stop.wait(args.scrape_s):
                pages.metrics()

        threading.Thread(target=scrape, daemon=True).start()

    def run() -> float:
        start = time.thread_time()
        for _ in range(args.steps):
            step(scheduler)
        return (time.thread_time() - start) / args.steps

    times: dict[str, list[float]] = {"plain": [], "observed": []}
    observer.clock = time.thread_time  # what the hooks themselves measure, in CPU time too
    spent = 0.0
    for at in range(args.rounds):
        for name in ("plain", "observed")[:: 1 if at % 2 else -1]:
            switch(on=name == "observed")
            before, steps = observer.spent_s, observer.steps
            times[name].append(run())
            spent += observer.spent_s - before
            assert observer.steps - steps == (args.steps if name == "observed" else 0)
    stop.set()
    assert observer.faults == 0
    base, with_hooks = (statistics.median(times[name]) for name in ("plain", "observed"))
    pairs = [b - a for a, b in zip(times["plain"], times["observed"], strict=True)]
    more = statistics.median(pairs)
    spent /= args.steps * args.rounds
    print(
        f"{args.running} running, {args.waiting} waiting, {args.rounds} rounds of {args.steps} steps"
    )
    print(f"plain      {base * 1e6:8.0f} us per step")
    print(f"observed   {with_hooks * 1e6:8.0f} us per step")
    print(
        f"difference {more * 1e6:8.1f} us per step, median of pairs = {more / base:.2%} of the scheduler's own"
    )
    print(f"in hooks   {spent * 1e6:8.1f} us per step = {spent / base:.2%} of the scheduler's own")
    whole = args.step_ms / 1e3
    print(
        f"of a step of {args.step_ms:g} ms: difference {more / whole:.2%}, in hooks {spent / whole:.2%}"
    )


if __name__ == "__main__":
    main()
