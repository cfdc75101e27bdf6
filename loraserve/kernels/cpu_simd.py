"""Matrix tiles as vector code, for the CPU kernels: LLVM finds no good form for them in scalar loops.

Two shapes of tile carry everything that multiplies: `matmul_tile` keeps sums over rows of a matrix in registers
(linears, LoRA expand, attention's values), `dot_tile` sums along rows (LoRA shrink, attention's scores). They take
addresses, so that one operand can lie in pages. Sums are float32 and fused; their order depends on the depth alone, so
that a row's result is the same whatever rows are computed beside it. The literal arguments (sizes, flags) must be
constants where a tile is called; each combination is code of its own.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import config, types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

_host_features: Any = codegen.get_host_cpu_features


def _lanes() -> int:
    """float32 elements of the widest vector that Numba compiles for."""
    settings: Any = config  # its attributes are made when it is imported
    features: str | None = settings.CPU_FEATURES
    has = (_host_features() if features is None else features).split(",")
    if "+avx512f" in has:
        return 16
    return 8 if "+avx" in has else 4


LANES = _lanes()
# Sums of a tile, the vectors they are made of and a factor must fit in the registers: 32 of them with AVX-512 and on
# ARM, 16 otherwise, where 4 × 3 needs all of them and LLVM spills: half the speed of 6 × 2.
_MANY_REGISTERS = LANES == 16 or "aarch64" in llvmlite.binding.get_default_triple()
TILE_ROWS, TILE_VECTORS = (8, 3) if _MANY_REGISTERS else (6, 2)
SMALL_TILE = 4 if _MANY_REGISTERS else 2  # the other side of a tile of up to four rows
TILE_COLUMNS = TILE_VECTORS * LANES

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_SUFFIX = f"v{LANES}f32"
_ANY_ORDER = ("reassoc",)


_declare: Any = cgutils.get_or_insert_function


class _Emitter:
    """Shorthand over one IR builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.zero = ir.Constant(_VECTOR, None)

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def at(self, pointer: Any, offset: Any) -> Any:
        return self.builder.gep(pointer, [offset if not isinstance(offset, int) else ir.Constant(_INT64, offset)])

    def load(self, pointer: Any, bits: int, mask: Any = None) -> Any:
        """A vector of float32, or of bfloat16 (`bits` 16) widened."""
        builder = self.builder
        kind = _FLOAT if bits == 32 else ir.IntType(16)
        vector = ir.VectorType(kind, LANES)
        where = builder.bitcast(pointer, vector.as_pointer())
        if mask is None:
            loaded = builder.load(where)
            loaded.align = bits // 8
        else:
            name = f"llvm.masked.load.v{LANES}{'f32' if bits == 32 else 'i16'}.p0"
            lanes = ir.VectorType(ir.IntType(1), LANES)
            sig = ir.FunctionType(vector, [vector.as_pointer(), _INT32, lanes, vector])
            function = _declare(builder.module, sig, name)
            loaded = builder.call(function, [where, ir.Constant(_INT32, bits // 8), mask, ir.Constant(vector, None)])
        if bits == 32:
            return loaded
        wide = ir.VectorType(_INT32, LANES)
        shift = ir.Constant(wide, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(loaded, wide), shift), _VECTOR)

    def store(self, value: Any, pointer: Any, mask: Any = None) -> None:
        builder = self.builder
        where = builder.bitcast(pointer, _VECTOR.as_pointer())
        if mask is None:
            builder.store(value, where).align = 4
            return
        lanes = ir.VectorType(ir.IntType(1), LANES)
        sig = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), _INT32, lanes])
        function = _declare(builder.module, sig, f"llvm.masked.store.{_SUFFIX}.p0")
        builder.call(function, [value, where, ir.Constant(_INT32, 4), mask])

    def splat(self, value: Any, kind: Any = _VECTOR) -> Any:
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
        return self.builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_INT32, LANES), None))

    def mask(self, count: Any) -> Any:
        """True in the first `count` (int64) lanes."""
        wide = ir.VectorType(_INT64, LANES)
        return self.builder.icmp_signed("<", ir.Constant(wide, list(range(LANES))), self.splat(count, wide))

    def prefetch(self, pointer: Any, write: int = 0) -> None:
        builder = self.builder
        byte = ir.IntType(8).as_pointer()
        function = _declare(builder.module, ir.FunctionType(ir.VoidType(), [byte, *[_INT32] * 3]), "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(pointer, byte), *(ir.Constant(_INT32, v) for v in (write, 3, 1))])

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        sig = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return self.builder.call(_declare(self.builder.module, sig, f"llvm.fmuladd.{_SUFFIX}"), [a, b, c])

    def total(self, value: Any) -> Any:
        sig = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
        function = _declare(self.builder.module, sig, f"llvm.vector.reduce.fadd.{_SUFFIX}")
        return self.builder.call(function, [ir.Constant(_FLOAT, 0.0), value], fastmath=_ANY_ORDER)

    def loop(self, start: Any, stop: Any, step: int, sums: list[Any], body: Any) -> list[Any]:
        """Run `sums = body(index, sums)` while index < stop; the sums stay in registers. May run zero times."""
        builder = self.builder
        before = builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.done"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(_INT64)
        carried = [builder.phi(_VECTOR) for _ in sums]
        index.add_incoming(start, before)
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
        builder.position_at_end(inside)
        results = body(index, list(carried))
        index.add_incoming(builder.add(index, ir.Constant(_INT64, step)), builder.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return carried


def _literals(*values: Any) -> list[int] | None:
    """The constants' values; None if one is not a constant: then the call does not type."""
    if not all(isinstance(value, types.IntegerLiteral) for value in values):
        return None
    return [value.literal_value for value in values]


def _is_given(value: Any) -> bool:
    """Whether an optional argument is there: anything but the constant 0."""
    return not (isinstance(value, types.IntegerLiteral) and value.literal_value == 0)


def _bits(holder: Any) -> int:
    """Bits of an element of the array that a tile's matrix lies in: 32 is float32, 16 (as integers) bfloat16."""
    return int(holder.dtype.bitwidth)


def _matmul_tile(
    context: Any,
    rows: Any,
    vectors: Any,
    tail: Any,
    holder: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    w_stride: Any,
    w_rows: Any,
    init: Any,
    init_stride: Any,
    y: Any,
    y_stride: Any,
    y_rows: Any,
    depth: Any,
    columns: Any,
) -> Any:
    """y[r, c] = init[r, c] + Σ_k x[r, k]·w[k, c] for `rows` r and `vectors`·LANES columns c.

    Literal: `rows`, `vectors`, `tail` (1: of the last vector only the first `columns` lanes exist). x, w, init, y are
    addresses, strides count elements; `holder` is the array that w lies in, float32, or uint16 for bfloat16. `w_rows`,
    `y_rows` are 0, or the address of int32 numbers: w's row k is then w_rows[k], the row of y (and of init) r is
    y_rows[r].
    """
    shape = _literals(rows, vectors, tail)
    if shape is None:
        return None
    num_rows, num_vectors, has_tail = shape
    width = _bits(holder)
    w_listed, y_listed = (_is_given(each) for each in (w_rows, y_rows))
    given = types.intp
    signature = types.void(
        rows, vectors, tail, holder, *[given] * 4, given if w_listed else w_rows, *[given] * 4,
        given if y_listed else y_rows, given, given,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(builder)
        (
            x,
            x_stride,
            w,
            w_stride,
            w_rows,
            init,
            init_stride,
            y,
            y_stride,
            y_rows,
            depth,
            columns,
        ) = arguments[4:]
        element = _FLOAT if width == 32 else ir.IntType(16)
        x_at, w_at, y_at = emit.pointer(x, _FLOAT), emit.pointer(w, element), emit.pointer(y, _FLOAT)
        init_at = emit.pointer(init, _FLOAT)
        masks = [emit.mask(columns) if has_tail and v == num_vectors - 1 else None for v in range(num_vectors)]

        def listed(numbers: Any, index: Any) -> Any:
            return builder.sext(builder.load(emit.at(emit.pointer(numbers, _INT32), index)), _INT64)

        numbers = [listed(y_rows, r) if y_listed else ir.Constant(_INT64, r) for r in range(num_rows)]
        xs = [emit.at(x_at, builder.mul(x_stride, ir.Constant(_INT64, r))) for r in range(num_rows)]
        ys = [emit.at(y_at, builder.mul(y_stride, number)) for number in numbers]
        inits = [emit.at(init_at, builder.mul(init_stride, number)) for number in numbers]
        grid = [(r, v) for r in range(num_rows) for v in range(num_vectors)]

        def body(k: Any, sums: list[Any]) -> list[Any]:
            row = emit.at(w_at, builder.mul(listed(w_rows, k) if w_listed else k, w_stride))
            loaded = [emit.load(emit.at(row, v * LANES), width, masks[v]) for v in range(num_vectors)]
            results = list(sums)
            for r in range(num_rows):  # one factor at a time, because there is just one register for it without AVX-512
                factor = emit.splat(builder.load(emit.at(xs[r], k)))
                for v in range(num_vectors):
                    results[r * num_vectors + v] = emit.multiply_add(factor, loaded[v], sums[r * num_vectors + v])
            return results

        start = [emit.load(emit.at(inits[r], v * LANES), 32, masks[v]) for r, v in grid]
        sums = emit.loop(ir.Constant(_INT64, 0), depth, 1, start, body)
        for (r, v), value in zip(grid, sums, strict=True):
            emit.store(value, emit.at(ys[r], v * LANES), masks[v])
        return context.get_dummy_value()

    return signature, generate


def _dot_tile(
    context: Any,
    rows: Any,
    others: Any,
    holder: Any,
    a: Any,
    a_stride: Any,
    x: Any,
    x_stride: Any,
    x_rows: Any,
    depth: Any,
    out: Any,
    out_row: Any,
    out_other: Any,
    scale: Any,
) -> Any:
    """out[r·out_row + t·out_other] = scale·Σ_k a[r, k]·x[x_rows[t], k] for `rows` r and `others` t.

    Literal: `rows`, `others`. a, x, out are addresses, strides count elements; `holder` is the array that a lies in,
    float32, or uint16 for bfloat16; `x_rows` is the address of int32 numbers; scale is float32.
    """
    shape = _literals(rows, others)
    if shape is None:
        return None
    num_rows, num_others = shape
    width = _bits(holder)
    signature = types.void(rows, others, holder, *[types.intp] * 9, types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(builder)
        a, a_stride, x, x_stride, x_rows, depth, out, out_row, out_other, scale = arguments[3:]
        a_at = emit.pointer(a, _FLOAT if width == 32 else ir.IntType(16))
        x_at, out_at, numbers = emit.pointer(x, _FLOAT), emit.pointer(out, _FLOAT), emit.pointer(x_rows, _INT32)
        rows_at = [emit.at(a_at, builder.mul(a_stride, ir.Constant(_INT64, r))) for r in range(num_rows)]
        others_at = []
        for t in range(num_others):
            number = builder.sext(builder.load(emit.at(numbers, t)), _INT64)
            others_at.append(emit.at(x_at, builder.mul(number, x_stride)))
        grid = [(r, t) for r in range(num_rows) for t in range(num_others)]

        def products(k: Any, sums: list[Any], mask: Any = None) -> list[Any]:
            left = [emit.load(emit.at(pointer, k), width, mask) for pointer in rows_at]
            right = [emit.load(emit.at(pointer, k), 32, mask) for pointer in others_at]
            return [emit.multiply_add(left[r], right[t], sums[i]) for i, (r, t) in enumerate(grid)]

        whole = builder.and_(depth, ir.Constant(_INT64, -LANES))
        sums = emit.loop(ir.Constant(_INT64, 0), whole, LANES, [emit.zero] * len(grid), products)
        # At most one masked round for what does not fill a vector.
        mask = emit.mask(builder.sub(depth, whole))
        sums = emit.loop(whole, depth, LANES, sums, lambda k, sums: products(k, sums, mask))
        for (r, t), value in zip(grid, sums, strict=True):
            where = builder.add(
                builder.mul(out_row, ir.Constant(_INT64, r)), builder.mul(out_other, ir.Constant(_INT64, t))
            )
            builder.store(builder.fmul(emit.total(value), scale), emit.at(out_at, where))
        return context.get_dummy_value()

    return signature, generate


def _prefetch(context: Any, address: Any, write: Any) -> Any:
    """Ask for the cache line at an address; `write` (literal): 1 if it will be written."""
    shape = _literals(write)
    if shape is None:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(builder)
        emit.prefetch(emit.pointer(arguments[0], ir.IntType(8)), shape[0])
        return context.get_dummy_value()

    return types.void(types.intp, write), generate


prefetch: Any = intrinsic(prefer_literal=True)(_prefetch)
matmul_tile: Any = intrinsic(prefer_literal=True)(_matmul_tile)
dot_tile: Any = intrinsic(prefer_literal=True)(_dot_tile)
