"""Large files of the Hub, gone on with where an earlier pull stopped, even one that was killed.

The Hub's client gives every download a file of its own name and loses it when it ends early. Here the bytes lie in the
cache under the hash that they are to have, so whoever asks for them next appends to them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from huggingface_hub import hf_hub_url
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import tqdm as HubBar

from loraserve.errors import HubChecksumMismatch
from loraserve.lora.files import CHUNK
from loraserve.lora.hub_errors import retrying
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import exclusive

Token = str | bool | None
"""None: the token of this machine's login or environment; False: none at all."""


def fetch_blob(
    repo: str,
    commit: str,
    path: str,
    *,
    size: int,
    sha256: str,
    cache: Path,
    token: Token,
    endpoint: str | None,
    meter: type[HubBar],
) -> None:
    """Bring one large file into the cache's blobs, where the client finds it. Raises `HubError` and its kind."""
    blobs = cache / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    blob, part = blobs / sha256, blobs / f"{sha256}.part"
    blobs.mkdir(parents=True, exist_ok=True)
    with exclusive(blobs / f"{sha256}.lock"):
        if blob.exists():
            return
        url = hf_hub_url(repo, path, revision=commit, endpoint=endpoint)
        headers = build_hf_headers(token=token)
        with part.open("ab+") as file:

            def go_on() -> None:
                if file.seek(0, os.SEEK_END) > size:
                    file.truncate(0)
                    file.seek(0)
                http_get(
                    url,
                    file,
                    resume_size=file.tell(),
                    headers=headers,
                    expected_size=size,
                    displayed_filename=path,
                    tqdm_class=meter,
                )
                file.flush()

            retrying(go_on, repo, commit)
            if _sha256(part) != sha256:
                # What an earlier pull left may be the bad part: once more from the beginning.
                file.truncate(0)
                retrying(go_on, repo, commit)
        if _sha256(part) != sha256:
            part.unlink()
            raise HubChecksumMismatch(f"{show(path)} of {repo} arrived damaged twice")
        os.replace(part, blob)
    (blobs / f"{sha256}.lock").unlink(missing_ok=True)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as reading:
        while piece := reading.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
