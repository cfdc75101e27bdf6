"""PEFT gives the patterns of a config to Python's `re`, which a hostile one keeps busy for ever: try them out first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping

PATTERN_SECONDS = 5.0
"""Far beyond what the patterns of a real adapter take."""

# How PEFT uses each field's texts: the function of `re`, and what it puts around the text.
_USES: dict[str, tuple[str, str, str]] = {
    "exclude_modules": ("fullmatch", "", ""),
    "layers_pattern": ("match", r"(?:^|.*?\.)", r"\.(?P<idx>\d+)\."),
    "rank_pattern": ("match", r"(.*\.)?(", ")$"),
    "alpha_pattern": ("match", r"(.*\.)?(", ")$"),
    "modules_to_save": ("match", r"(^|.*\.)", r"($|\..*)"),
    "target_modules": ("fullmatch", "", ""),  # the last, for it is the one that can be done without
}
_LISTS_ARE_NAMES = frozenset({"target_modules", "exclude_modules"})  # only a single text is a pattern

# Broken patterns are PEFT's to refuse. Each field that is through is a line.
_CHILD = """
import json, re, sys
given = json.load(sys.stdin)
for field, (function, patterns) in given["fields"].items():
    for pattern in patterns:
        try:
            for module in given["modules"]:
                getattr(re, function)(pattern, module)
        except (re.error, RecursionError, OverflowError):
            pass
    print(field, flush=True)
"""


def endless_patterns(
    config: Mapping[str, object], modules: Iterable[str], seconds: float = PATTERN_SECONDS
) -> list[str]:
    """Fields of a config whose patterns Python's `re` has not matched with all `modules` in time, the first one first.

    They run in a process of their own, which is ended then.
    """
    fields = {}
    for field, (function, before, after) in _USES.items():
        if texts := _texts(field, config.get(field)):
            fields[field] = function, [f"{before}{text}{after}" for text in texts]
    if not fields:
        return []
    given = json.dumps({"fields": fields, "modules": list(modules)}).encode()
    try:
        done = subprocess.run([sys.executable, "-I", "-c", _CHILD], input=given, capture_output=True, timeout=seconds)
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    through = output.decode().split()
    return [field for field in fields if field not in through]


def _texts(field: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict | list) and field not in _LISTS_ARE_NAMES:
        return [text for text in value if isinstance(text, str)]
    return []
