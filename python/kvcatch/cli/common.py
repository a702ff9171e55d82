"""What every command shares: the application, the console, one-line errors, progress."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvcatch.errors import InvalidArgument, KvcatchError, SnapshotError, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

WIDTH = 100

MAX_ROWS = 20
"""Rows of a table that names owners, tags or the like; the rest is summed in one row."""

MAX_MESSAGE = 2_000
"""Characters of an error's line; of a longer one the middle is left out."""

_USAGE_ERROR, _COMMAND_ERROR = typer.BadParameter.__mro__[1:3]


class _Commands(TyperGroup):
    """The root command. What it cannot parse, or cannot print, is one line with exit code 2 as well."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; exits with its code in ``standalone_mode``."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                # Closed by the caller (>&-): what is printed goes nowhere, as with print().
                nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
                setattr(sys, name, nowhere)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            if not standalone_mode:
                raise
            if isinstance(error, _COMMAND_ERROR):
                _usage_error(error)
            if isinstance(error, OSError):
                _exit_with(f"cannot write: {error.strerror or error}", 2)
            raise
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: Exception) -> NoReturn:
    message = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)  # noqa: T201
        sys.exit(2)
    param, problem = getattr(error, "param", None), error.__cause__ or error.__context__
    if param is not None and problem is not None and hasattr(problem, "errors"):
        wrong = problem.errors()[0]
        kind = str(wrong.get("type", "")).partition("_")[0]
        wanted = {"int": "whole number", "float": "number"}.get(kind, "value that fits")
        option = next(iter(getattr(param, "opts", ())), param.name)
        message = f"{option} = {wrong.get('input')!r}: not a {wanted}"
    context = getattr(error, "ctx", None)
    if context is not None and isinstance(error, _USAGE_ERROR):
        message = f"{message.rstrip('.')}; see {context.command_path} --help"
    _exit_with(message, getattr(error, "exit_code", 2))


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": WIDTH, "help_option_names": ["-h", "--help"]},
)


def make_console(*, stderr: bool = False) -> Console:
    """A console of 100 columns without markup; on stdout unless ``stderr``."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.width = WIDTH
    return console


def one_line(message: str) -> str:
    """``message`` on one line: signs that a terminal would act on are escaped, a long middle left out."""
    text = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in message.strip()
    )
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    return text


def _exit_with(message: str, code: int) -> NoReturn:
    print(f"kvcatch: {one_line(message)}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def fail(message: str, code: int) -> NoReturn:
    """Print one line on stderr and leave with the exit code ``code``."""
    sys.stdout.flush()
    print(f"kvcatch: {one_line(message)}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what kvcatch and the file system refuse into one line and an exit code."""
    try:
        yield
    except (InvalidArgument, TraceError, SnapshotError) as error:
        fail(str(error), 2)
    except KvcatchError as error:
        fail(str(error), 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        fail(f"{name}{error.strerror or error}", 2)


def read_text(path: Path, most_bytes: int) -> str:
    """The UTF-8 text of a file, or of stdin for ``-``; read no further than ``most_bytes``.

    Raises:
        InvalidArgument: it is longer, or not UTF-8.
        OSError: it cannot be read; the message names it.
    """
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(most_bytes + 1)
        else:
            with path.open("rb") as file:
                content = file.read(most_bytes + 1)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if len(content) > most_bytes:
        raise InvalidArgument(f"more than {most_bytes >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"not UTF-8 text ({error.reason})") from None


class Ticker:
    """Says on stderr what is under way: after 2 seconds, then every 5. Used with ``with``.

    Attributes:
        text: What to say; empty for nothing.
    """

    def __init__(self, first_seconds: float = 2.0, every_seconds: float = 5.0) -> None:
        self.text = ""
        self._first, self._every = first_seconds, every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def say(self, text: str) -> None:
        """Change what is under way."""
        self.text = text

    def _run(self) -> None:
        begin, wait = time.monotonic(), self._first
        while not self._stop.wait(wait):
            wait = self._every
            if self.text:
                line = f"kvcatch: {self.text}, {time.monotonic() - begin:.0f} s"
                print(line, file=sys.stderr, flush=True)  # noqa: T201


def percent(part: int, whole: int) -> str:
    """A share with one decimal, or a dash where there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"
