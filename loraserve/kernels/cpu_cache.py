"""What a compiled kernel on disk depends on besides its own file, which is all that Numba looks at.

A kernel contains what it calls from other files. After an upgrade that changed only those, Numba would go on running
the old code from the user's cache.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
_PACKAGE = __name__.rpartition(".")[0]


@cache
def imports_digest(module: str, folder: Path = _FOLDER) -> str:
    """A hash of all sources of this package that a module of it imports, directly or not. `module` has no dots.

    Raises OSError if a source cannot be read.
    """
    found: set[str] = set()
    unseen = {module}
    while unseen:
        found |= unseen
        unseen = {name for seen in unseen for name in _imports(folder, seen)} - found
    digest = hashlib.sha256()
    for name in sorted(found - {module}):
        digest.update(hashlib.sha256(_source(folder, name)).digest())
    return digest.hexdigest()[:16]


@cache
def _source(folder: Path, module: str) -> bytes:
    return (folder / f"{module}.py").read_bytes()


@cache
def _imports(folder: Path, module: str) -> frozenset[str]:
    """Modules of this package that one imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(_source(folder, module))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    inside = {name.removeprefix(f"{_PACKAGE}.").partition(".")[0] for name in names if name.startswith(f"{_PACKAGE}.")}
    return frozenset(name for name in inside if (folder / f"{name}.py").is_file())
