"""Throughput of a real vLLM server with the plugin and without it, in pairs.

    VLLM_ENV/bin/python benches/vllm_server.py --model MODEL_FOLDER [--with pool,evict,observe] [--pairs 5]

``VLLM_ENV`` is an environment that ``tests/vllm/make_env.sh`` made, with kvcatch installed. Both servers run all the
while and are loaded in turn, which of them first changes from pair to pair: an idle vLLM takes no CPU time. Prompts are
new in every round and the same for both servers of a pair. Prints each pair, then the median ratio of output tokens per
second.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from openai_load import Load, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 600.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(args: argparse.Namespace, switches: str, folder: Path) -> Iterator[str]:
    """A server's URL; it is ready to answer."""
    port = free_port()
    log = folder / f"server-{port}.log"
    environ = os.environ | {
        "KVCATCH_VLLM": switches,
        "KVCATCH_VLLM_SOCKET": str(folder / f"{port}.sock"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "2048", "--num-gpu-blocks-override", str(args.blocks)]
    command += ["--block-size", "32", "--max-num-seqs", str(args.requests), "--enforce-eager"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"vLLM does not serve:\n{log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                    break
            except OSError:
                time.sleep(1.0)
        if switches and f"kvcatch: {switches.replace(',', ', ')} in vLLM" not in log.read_text():
            raise SystemExit(f"kvcatch is not at work: is it installed in {sys.prefix}?")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as tests/vllm/make_model.py writes it")
    parser.add_argument("--with", dest="switches", default="pool,evict,observe")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="at once")
    parser.add_argument("--prompt", type=int, default=100, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--blocks", type=int, default=400, help="of 32 tokens")
    args = parser.parse_args()
    load = Load(args.requests, args.prompt, args.output)
    with (
        tempfile.TemporaryDirectory() as name,
        serving(args, "", Path(name)) as plain,
        serving(args, args.switches, Path(name)) as with_kvcatch,
    ):
        urls = {"plain": plain, "kvcatch": with_kvcatch}
        for url in urls.values():
            measure(url, "model", load, seed=0)  # compiles and allocates what the first round needs
        ratios = []
        print(f"{load}, {args.pairs} pairs, kvcatch: {args.switches}")
        for pair in range(args.pairs):
            found = {
                which: measure(urls[which], "model", load, seed=1 + pair).throughput
                for which in (list(urls) if pair % 2 else list(urls)[::-1])
            }
            ratios.append(found["kvcatch"] / found["plain"])
            print(
                f"plain {found['plain']:8.1f} tokens/s   kvcatch {found['kvcatch']:8.1f} tokens/s"
                f"   ratio {ratios[-1]:.4f}",
                flush=True,
            )
        print(f"median ratio {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
