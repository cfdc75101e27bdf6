"""For commands that work on files here: a refusal, or whatever keeps them from running, is one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from loraserve.errors import LoraserveError

EXIT_REFUSED = 2


def error_line(error: LoraserveError) -> str:
    """The line a person sees."""
    return f"error: {' '.join(error.message.split())} ({error.code})"


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a named error into its line on stderr and `EXIT_REFUSED`."""
    try:
        yield
    except LoraserveError as error:
        typer.echo(error_line(error), err=True)
        raise typer.Exit(EXIT_REFUSED) from error
