"""A metrics endpoint that can be told to misbehave, to die and to come back."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO = 'num_gpu_blocks="1001",block_size="16",kv_cache_size_tokens="16000",kv_cache_max_concurrency="8.0"'


def body(
    seconds: float,
    *,
    ranks: int = 1,
    running: int = 4,
    waiting: int = 12,
    usage: float = 0.04,
    model: str = "m",
    rate: float = 100.0,
    start: float = 1_700_000_000.0,
) -> str:
    """A vLLM page after so many seconds: max_num_seqs binds at 4 running and 12 waiting by default."""
    lines = [f"process_start_time_seconds {start}"]
    for rank in range(ranks):
        labels = f'engine="{rank}",model_name="{model}"'
        values = {
            "num_requests_running": running,
            "num_requests_waiting": waiting,
            "kv_cache_usage_perc": usage,
            "num_preemptions_total": int(seconds),
            "prompt_tokens_total": rate * seconds,
            "generation_tokens_total": 4 * rate * seconds,
            "request_success_total": int(2 * seconds),
            "prefix_cache_queries_total": rate * seconds,
            "prefix_cache_hits_total": rate * seconds / 4,
            "time_to_first_token_seconds_sum": seconds,
            "time_to_first_token_seconds_count": 2 * seconds,
        }
        lines += [f"vllm:{name}{{{labels}}} {value}" for name, value in values.items()]
        for reason, number in (("capacity", waiting - 2), ("deferred", 2)):
            name = "num_requests_waiting_by_reason"
            lines.append(f'vllm:{name}{{{labels},reason="{reason}"}} {number}')
        lines.append(f'vllm:cache_config_info{{engine="{rank}",model_name="{model}",{INFO}}} 1.0')
    return "\n".join(lines) + "\n"


class FakeEngine:
    """Serves ``body``; ``mode`` makes it answer otherwise.

    Attributes:
        mode: ``ok``, ``html``, ``hang``, ``loop``, ``huge``, ``drip`` or an HTTP status.
        options: Arguments of ``body``.
        asked: Requests so far.
    """

    def __init__(self, mode: str = "ok", **options: Any) -> None:
        self.mode, self.options = mode, options
        self.asked = 0
        self.connections = 0
        self._began = time.monotonic()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Come up, at zero, as a restarted engine does."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10

            def setup(self) -> None:
                super().setup()
                engine.connections += 1

            def do_GET(self) -> None:
                if self.path == "/version":
                    self.respond(b'{"version": "0.32.0"}')
                    return
                engine.asked += 1
                engine.answer(self)

            def respond(self, data: bytes, kind: str = "text/plain", code: int = 200) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                return None

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                return None

        self._began = time.monotonic()
        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: Any) -> None:
        if self._server is None:
            handler.close_connection = True  # killed: a connection kept alive ends as well
        elif self.mode == "html":
            handler.respond(b"<!DOCTYPE html><html><body>hello</body></html>\n", "text/html")
        elif self.mode == "hang":
            time.sleep(5)
        elif self.mode == "loop":
            handler.send_response(302)
            handler.send_header("Location", handler.path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        elif self.mode in ("huge", "drip"):
            # 100 MB, in pieces whose number is not announced.
            handler.send_response(200)
            handler.end_headers()
            for _ in range(1600):
                handler.wfile.write(b"#" * 65536)
                if self.mode == "drip":
                    time.sleep(0.05)
            handler.close_connection = True
        elif self.mode != "ok":
            handler.respond(b"no\n", code=int(self.mode))
        else:
            text = body(time.monotonic() - self._began, start=self._began, **self.options)
            handler.respond(text.encode())

    def stop(self) -> None:
        """Die."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
