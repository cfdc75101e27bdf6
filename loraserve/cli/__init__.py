"""The command line: `loraserve serve`, `pull`, `loraserve adapters …`, `loraserve verify`, `loraserve version`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loraserve import __version__
from loraserve.cli.adapters import adapters_app
from loraserve.cli.pull import pull
from loraserve.cli.refusals import error_line
from loraserve.cli.serve import add_serve
from loraserve.cli.verify import verify
from loraserve.errors import ConfigError, LoraserveError

EXIT_FAILED = 1
EXIT_USAGE = 2


def make_app() -> typer.Typer:
    """The whole command tree."""
    app = typer.Typer(
        name="loraserve",
        help="Serve one base LLM with many LoRA adapters, mixed in the same forward passes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        pass

    @app.command("version", help="Show the version.")
    def show_version() -> None:
        typer.echo(__version__)

    add_serve(app)
    app.command("pull")(pull)
    app.add_typer(adapters_app(), name="adapters")
    app.command("verify")(verify)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; every failure is one line on stderr and a non-zero exit."""
    try:
        make_app()()
    except LoraserveError as error:
        print(error_line(error), file=sys.stderr)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
