"""Logging of the server's and the engine's process."""

from __future__ import annotations

import logging

OURS = ("loraserve", "uvicorn")


def configure_logging(level: str, who: str = "") -> None:
    """Log to standard error. `who` stands before each logger's name.

    Of other packages only what is wrong is logged, at every level: the clients of the Hub and of object stores log
    addresses, which may be signed, and headers.
    """
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
