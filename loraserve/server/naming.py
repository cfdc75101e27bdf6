"""The name under which clients know the base model."""

from __future__ import annotations

from pathlib import Path

from loraserve.config import ModelConfig
from loraserve.errors import ConfigError

DEMO_NAME = "smollm2-135m-instruct"


def served_name(config: ModelConfig) -> str:
    """`--served-model-name`, or the demo's name, the folder's name, the Hub id. Raises `ConfigError`."""
    name = config.served_model_name
    if name is None:
        name = DEMO_NAME if config.model is None else _derived(config.model)
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"--served-model-name {name!r} is not a name")
    return name


def _derived(model: str) -> str:
    path = Path(model).expanduser()
    if not path.exists():
        return model
    resolved = path.resolve()
    return resolved.stem if resolved.is_file() else resolved.name
