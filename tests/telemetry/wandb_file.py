"""Reads a .wandb file without a server: LevelDB's log framing over protocol buffers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_run(run_dir: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the run record and the logged rows of the one run below `run_dir`."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    run, history = None, []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "history":
            history.append(_values(record.history.item))
    return run, history


def config_of(run: Any) -> dict[str, Any]:
    """Return the configuration of a run record."""
    return _values(run.config.update)


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    offset, pieces = _FILE_HEADER, b""
    while offset + _HEADER <= len(content):
        left = _BLOCK - offset % _BLOCK
        length, kind = struct.unpack_from("<HB", content, offset + 4)
        if left < _HEADER or kind == 0:
            offset += left
            continue
        piece = content[offset + _HEADER : offset + _HEADER + length]
        offset += _HEADER + length
        if kind in (_FULL, _FIRST):
            pieces = piece
        elif kind in (_MIDDLE, _LAST):
            pieces += piece
        if kind in (_FULL, _LAST):
            yield pieces
