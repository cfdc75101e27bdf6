"""Imports go down only; the scheduler and the server never import torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "loraserve"
LAYERS = {
    "errors": 0,
    "config": 0,
    "sampling": 0,
    "compat": 0,
    "logs": 0,
    "kernels": 1,
    "kvcache": 2,
    "lora": 2,
    "scheduler": 2,
    "models": 3,
    "engine": 4,
    "server": 5,
    "inspection": 5,
    "llm": 6,
    "verify": 6,
    "cli": 7,
}
TORCH_FREE_ROOMS = {"scheduler", "server", "cli"}
# What the server may see of the rooms below it: messages to the engine, the registry's side of the adapters.
SERVER_MAY_IMPORT = {"engine.client", "engine.messages"}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "loraserve" and len(parts) > 1 and parts[1] in LAYERS else None


FILES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert room in LAYERS, f"{room} has no layer: add it to LAYERS"
    for module in imports_of(path):
        other = room_of(module)
        if other is None or other == room:
            continue
        downward = LAYERS[other] < LAYERS[room] or LAYERS[other] == LAYERS[room] == 0
        assert downward, f"{path.name} (L{LAYERS[room]}) imports {module} (L{LAYERS[other]})"
        if room == "server" and other == "engine":
            assert ".".join(module.split(".")[1:3]) in SERVER_MAY_IMPORT, f"{path.name} imports {module}"
        if room == "server":
            assert other not in {"kernels", "kvcache", "models"}, f"{path.name} imports {module}"
    if room in TORCH_FREE_ROOMS:
        assert not any(module.split(".")[0] == "torch" for module in imports_of(path)), f"{path.name} imports torch"
