"""BD-LoRA: one of a module's factors is block-diagonal, and the file holds its blocks one above the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora import field_types as types
from loraserve.lora.field_types import FieldType, is_empty
from loraserve.lora.spec import Blocks
from loraserve.lora.strict_json import Json, show

_NAME = "use_bdlora"
_MAX_PATTERNS = 1000  # each is looked for in the path of every module
_FIELDS: dict[str, FieldType] = {
    "target_modules_bd_a": types.TEXTS,
    "target_modules_bd_b": types.TEXTS,
    "nblocks": types.RANK,
    "match_strict": types.BOOL,
}


class Sides(NamedTuple):
    """The number of blocks of A and of B; None is a plain matrix, and at least one of them is plain."""

    a: int | None = None
    b: int | None = None

    def divides(self, rank: int) -> bool:
        """Whether blocks can have this rank together."""
        return rank % (self.a or self.b or 1) == 0


PLAIN = Sides()


@dataclass(frozen=True, slots=True)
class BlockDiagonal:
    """`use_bdlora` of a config. A pattern fits a module whose path contains it."""

    num_blocks: int
    a_patterns: tuple[str, ...]
    b_patterns: tuple[str, ...]
    strict: bool  # every module must have a block-diagonal factor

    def sides(self, module: str) -> Sides:
        """Which factor of a module has blocks. Raises `AdapterRefused` where PEFT would not load it."""
        on_a = any(pattern in module for pattern in self.a_patterns)
        on_b = any(pattern in module for pattern in self.b_patterns)
        if on_a and on_b:
            text = f"{_NAME} makes both factors of {show(module)} block-diagonal, which PEFT refuses"
            raise AdapterRefused(AdapterFault.INVALID_CONFIG, text)
        if self.strict and not (on_a or on_b):
            text = f"{_NAME} has match_strict but names neither factor of {show(module)}, which PEFT refuses"
            raise AdapterRefused(AdapterFault.CONFIG_TENSOR_MISMATCH, text)
        return Sides(self.num_blocks if on_a else None, self.num_blocks if on_b else None)


def parse_block_diagonal(value: Json) -> BlockDiagonal | None:
    """The field's value; None if it is off. Raises `AdapterRefused`: `invalid_config`, `unsupported_variant`."""
    if value is None or value is False:
        return None
    if not types.is_object(value):
        raise _invalid("must be an object, found true")
    for name, item in value.items():
        if name not in _FIELDS and not is_empty(item):
            text = f"the field {show(name)} of {_NAME} is not known here and is set"
            raise AdapterRefused(AdapterFault.UNSUPPORTED_VARIANT, text)
        nullable = name.startswith("target_modules")
        if name in _FIELDS and not (_FIELDS[name].accepts(item) or (item is None and nullable)):
            raise _invalid(f"has {name} {show(str(item))}, which must be {_FIELDS[name].name}")
    sides = []
    for name in ("target_modules_bd_a", "target_modules_bd_b"):
        patterns = value.get(name) or []
        assert types.is_texts(patterns)
        sides.append(tuple(patterns))
    if sum(map(len, sides)) > _MAX_PATTERNS:
        raise _invalid(f"names {sum(map(len, sides))} modules, at most {_MAX_PATTERNS} are read")
    if not set(sides[0]).isdisjoint(sides[1]):
        raise _invalid("names a module in both target_modules_bd_a and target_modules_bd_b")
    num_blocks = value.get("nblocks", 1)
    assert types.is_int(num_blocks)
    return BlockDiagonal(num_blocks, sides[0], sides[1], value.get("match_strict", True) is True)


def stack_of(num_blocks: int | None, num_rows: int) -> Blocks | None:
    """A stack of `num_rows` rows in all; None for a plain matrix, which one block is too."""
    return None if num_blocks is None or num_blocks == 1 else Blocks(num_blocks, num_rows // num_blocks)


def block_places(blocks: Blocks, num_rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns that each block takes in the whole matrix, of whose rows there are `num_rows` from the first.

    A block is `width` columns wide.
    """
    for i in range(blocks.num_blocks):
        begin, end = max(i * blocks.rows - blocks.first, 0), min((i + 1) * blocks.rows - blocks.first, num_rows)
        if begin < end:
            yield slice(begin, end), slice(i * width, (i + 1) * width)


def _invalid(problem: str) -> AdapterRefused:
    return AdapterRefused(AdapterFault.INVALID_CONFIG, f"{_NAME} {problem}")
