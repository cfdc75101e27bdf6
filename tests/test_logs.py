"""What is logged, at the most talkative level."""

from __future__ import annotations

import subprocess
import sys


def test_only_our_own_talk_is_logged() -> None:
    """Clients of the Hub and of object stores log addresses with signatures, and headers with keys."""
    code = (
        "import logging; from loraserve.logs import configure_logging; configure_logging('debug', 'engine ')\n"
        "for name in ('httpx', 'httpx2', 'httpcore', 'botocore.auth', 's3fs', 'urllib3', 'huggingface_hub'):\n"
        "    logging.getLogger(name).info('?X-Amz-Signature=secret')\n"
        "logging.getLogger('loraserve.lora').debug('ours')\n"
        "logging.getLogger('httpx2').warning('wrong')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 2)[2] for line in found.stderr.splitlines()]
    assert lines == ["DEBUG engine loraserve.lora: ours", "WARNING engine httpx2: wrong"]
