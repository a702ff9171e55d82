"""What every command shares: the application, the console, one-line errors."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from kvcatch.errors import InvalidArgument, KvcatchError, SnapshotError, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 100

MAX_ROWS = 20
"""Rows of a table that names owners, tags or the like; the rest is summed in one row."""

app = typer.Typer(
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


def fail(message: str, code: int) -> NoReturn:
    """Print one line on stderr and leave with the exit code ``code``."""
    sys.stdout.flush()
    print(f"kvcatch: {message}", file=sys.stderr)  # noqa: T201
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


def percent(part: int, whole: int) -> str:
    """A share with one decimal, or a dash where there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"
