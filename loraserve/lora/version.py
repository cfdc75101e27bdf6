"""Identity is content: the hash that names an adapter version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from loraserve.lora.container import TensorReader
from loraserve.lora.files import AdapterFolder
from loraserve.lora.spec import AdapterSpec, TensorRef


def content_version(spec: AdapterSpec, folder: Path | AdapterFolder) -> str:
    """sha256, in hex, over what the adapter computes: modules, ranks, scalings, dtypes, shapes and bytes.

    Spelling does not count: names of files, order, metadata, prefixes of keys, how the config expresses a scaling.
    """
    digest = hashlib.sha256(b"loraserve adapter 1\n")
    with TensorReader(folder) as reader:
        for target in spec.targets:
            record: list[object] = [target.module, target.rank, float(target.scaling).hex()]
            for ref in (target.a, target.b):
                if ref is not None:
                    record.append([ref.dtype, *ref.shape] + (["transposed"] if ref.transposed else []))
            for part in ("magnitude", "lora_bias", "bias"):
                vector: TensorRef | None = getattr(target, part)
                if vector is not None:
                    record.append([part, vector.dtype, *vector.shape])
            record += [[name, *blocks] for name, blocks in (("A", target.a_blocks), ("B", target.b_blocks)) if blocks]
            digest.update(json.dumps(record).encode() + b"\n")
            for ref in target.refs:
                for piece in reader.chunks(ref):
                    digest.update(piece)
        for table, rows_part in ((rows.table, part) for rows in spec.replaced for part in rows.parts):
            ids, delta = rows_part.ids, rows_part.delta
            which: list[object] = [ids.start, ids.stop] if isinstance(ids, range) else [list(ids)]
            which += [] if delta is None else [float(delta.scaling).hex()]
            for ref in rows_part.refs:
                digest.update(json.dumps([str(table), *which, ref.dtype, *ref.shape]).encode() + b"\n")
                for piece in reader.chunks(ref):
                    digest.update(piece)
    if spec.added_tokens:
        digest.update(json.dumps(["tokens", *map(asdict, spec.added_tokens)]).encode() + b"\n")
    if spec.invocation:
        digest.update(json.dumps(["invocation", *spec.invocation]).encode() + b"\n")
    return digest.hexdigest()
