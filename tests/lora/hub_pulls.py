"""Pulls of one adapter from the test suite's Hub, as the Hub's tests make them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_hub import FakeHub

from loraserve.errors import AdapterError
from loraserve.lora.hub import HubRepo, fetch_hub
from loraserve.lora.sources import FetchedFolder

FILES = ["adapter_config.json", "adapter_model.safetensors"]
SQL = HubRepo("org/sql")


def pull(hub: FakeHub, tmp_path: Path, place: HubRepo = SQL, **options: object) -> FetchedFolder:
    return fetch_hub(place, cache_dir=tmp_path / "cache", endpoint=hub.endpoint, **options)


def refusal(hub: FakeHub, tmp_path: Path, place: HubRepo = SQL, **options: object) -> tuple[str, int]:
    with pytest.raises(AdapterError) as caught:
        pull(hub, tmp_path, place, **options)
    assert hub.endpoint not in caught.value.message
    return caught.value.code, caught.value.http_status
