"""Reads what W&B wrote offline: wandb itself has no reader for its own files any more."""

import json
import struct
from pathlib import Path
from typing import Any


def records(path: Path) -> list[Any]:
    """The records of a .wandb file: blocks of 32 KiB as in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, position, data, found = path.read_bytes(), 7, b"", []
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # too short for a header: padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
            data = b""
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The logged rows; values that W&B nests (plots, tables) under their first key."""
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                row[item.key or item.nested_key[0]] = json.loads(item.value_json)
            rows.append(row)
    return rows
