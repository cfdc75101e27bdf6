"""The engine process: `python -m loraserve.engine.process ENDPOINT`, started by `engine.client` only.

Its config comes as JSON on standard input. Everything else comes and goes through one ZeroMQ socket.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from loraserve.config import EngineConfig
from loraserve.engine.messages import decode_config
from loraserve.kernels.threads import configure_threads
from loraserve.logs import configure_logging

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until told to stop or until the parent is gone."""
    configure_logging(os.environ.get("LORASERVE_LOG_LEVEL", "INFO"), "engine ")
    # The server decides when to stop: a Ctrl-C in a terminal reaches both processes, and requests still drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = decode_config(sys.stdin.buffer.read())
    configure_threads(config.model.threads)
    return _serve(sys.argv[1], config)


def _serve(endpoint: str, config: EngineConfig) -> int:
    import zmq  # after configure_threads: what follows imports torch and numba

    from loraserve.engine.build import build_engine
    from loraserve.engine.host import EngineHost
    from loraserve.engine.messages import Codec, ErrorInfo, StartFailed, ToEngine

    codec = Codec(ToEngine)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.connect(endpoint)
    started = time.monotonic()
    try:
        parts = build_engine(config)
    except Exception as error:
        logger.exception("the engine cannot start")
        socket.send(codec.encode(StartFailed(error=ErrorInfo.of(error))))
        socket.close()
        context.term()
        return 1
    logger.info("engine ready after %.1f s", time.monotonic() - started)
    host = EngineHost(parts, socket, codec, parent=int(os.environ.get("LORASERVE_PARENT", "0")))
    try:
        host.run()
    finally:
        parts.close()
        socket.close()
        context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
