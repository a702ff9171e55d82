"""What watching a fleet costs: CPU time of `kvcatch watch` over wall time, with a fleet of fake vLLMs.

The fleet runs in a process of its own: every endpoint has its own port and serves bodies of about 50 kB
with the series of a real vLLM, whose values move. The watching process is the real command: its terminal
screen in a pseudo terminal of 120 x 40, or its page (`--web`), with and without a browser that polls it.

    python benches/watch_fleet.py [--endpoints 50] [--interval 1] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_observe import body

TICK = os.sysconf("SC_CLK_TCK")
LIMIT = 0.15
SETTLE_S = 5.0


def page(at: int) -> bytes:
    """A vLLM page of about 50 kB after so many seconds."""
    text = body(at)
    # The histograms of the page are a little longer than a real one's: the last are left out.
    lines = text.split("\n")
    while len(text) > 52_000:
        cut = max(number for number, line in enumerate(lines) if "_bucket" in line)
        del lines[cut]
        text = "\n".join(lines)
    return text.encode()


async def serve_fleet(endpoints: int, seconds: float) -> None:
    """Serve so many endpoints; prints their ports on one line, then ends with its stdin."""
    start = time.monotonic()
    pages = [page(at) for at in range(int(seconds) + 60)]
    size = len(pages[0])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                data = pages[min(int(time.monotonic() - start), len(pages) - 1)]
                code, kind = b"200 OK", b"text/plain; version=0.0.4; charset=utf-8"
                if b" /metrics" not in asked.partition(b"\r\n")[0]:
                    data, kind = b'{"version": "0.32.0"}', b"application/json"
                writer.write(
                    b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
                    % (code, kind, len(data))
                )
                writer.write(data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(endpoints)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(size, *ports, flush=True)
    await asyncio.to_thread(sys.stdin.read)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().split("\n"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


class Terminal:
    """A program in a pseudo terminal; what it draws is read and counted."""

    def __init__(self, command: list[str]) -> None:
        self.drawn = 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS="", LINES="")
            os.execv(command[0], command)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        try:
            while data := os.read(self._fd, 65536):
                self.drawn += len(data)
        except OSError:
            return

    def end(self) -> int:
        """Press q; returns the exit status."""
        os.write(self._fd, b"q")
        for _ in range(100):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def measure(pid: int, seconds: float) -> tuple[float, float]:
    """Share of one core over so many seconds, and the peak memory in MiB."""
    time.sleep(SETTLE_S)
    cpu, start = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(pid) - cpu) / (time.monotonic() - start), peak_mib(pid)


class Page(threading.Thread):
    """Asks for what one open page asks for, every second.

    Attributes:
        answers: How many answers held the curves of the chosen endpoint.
        stop: Set it to end.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.answers = 0
        self.stop = threading.Event()
        self._url = f"{url}state.json?seconds=600&key="

    def run(self) -> None:
        key = ""
        while not self.stop.wait(1.0):
            asked = self._url + urllib.parse.quote(key)
            with urllib.request.urlopen(asked, timeout=10) as answer:
                state = json.load(answer)
            assert state["unreachable"] == 0, state
            self.answers += "curves" in state
            key = state["replicas"][0]["key"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--endpoints", type=int, default=50)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve_fleet(options.endpoints, 4 * options.seconds))
        return
    serving = ["--serve", "--endpoints", str(options.endpoints), "--seconds", str(options.seconds)]
    fleet = subprocess.Popen(
        [sys.executable, __file__, *serving],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert fleet.stdout is not None
        size, *ports = map(int, fleet.stdout.readline().split())
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        command = [sys.executable, "-m", "kvcatch.cli", "watch", *urls]
        command += ["--interval", str(options.interval)]
        rows = [("the screen, 120 x 40", *screen(command, options.seconds))]
        rows += [(name, *web(command, options.seconds, polled)) for name, polled in WEB]
    finally:
        fleet.communicate("")
    print(
        f"{options.endpoints} endpoints, bodies of {size:,} bytes, every {options.interval:g} s, "
        f"{options.seconds:g} s each"
    )
    print(f"{'':<28} {'of one core':>12} {'wanted':>8} {'peak memory':>12}")
    for name, share, mib in rows:
        print(f"{name:<28} {share:>11.1%} {f'<= {LIMIT:.0%}':>8} {mib:>8,.0f} MiB")
    sys.exit(0 if all(share <= LIMIT for _, share, _ in rows) else 1)


WEB = (("--web, nobody looks", False), ("--web, one page open", True))


def screen(command: list[str], seconds: float) -> tuple[float, float]:
    terminal = Terminal(command)
    found = measure(terminal.pid, seconds)
    assert terminal.drawn > 1000, "nothing was drawn"
    assert terminal.end() == 0
    return found


def web(command: list[str], seconds: float, polled: bool) -> tuple[float, float]:
    process = subprocess.Popen(
        [*command, "--web", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        page = Page(process.stdout.readline().split()[0])
        if polled:
            page.start()
        found = measure(process.pid, seconds)
        if polled:
            page.stop.set()
            page.join()
            assert page.answers >= 0.8 * seconds, f"{page.answers} answers"
        return found
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0


if __name__ == "__main__":
    main()
