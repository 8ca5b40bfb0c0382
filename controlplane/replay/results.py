"""Each request of a replay as a row of Parquet.

Written by pyarrow, which the control plane has anyway; chDB, which it has too, would start a
database for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.replay import Record
from engine.traces.formats import Row
from engine.traces.trace import TraceRequest

METADATA = "trimtab.replay"  # key of the file's own metadata: how it was made, as JSON
ROWS_PER_GROUP = 65_536


def _recorded(record: Record) -> Row:
    assert isinstance(record.request, TraceRequest)
    return record.request.row


# Times are seconds after the start; null: not seen.
COLUMNS: dict[str, tuple[pa.DataType, Callable[[Record], Any]]] = {
    "id": (pa.string(), lambda record: record.request.id),
    "status": (pa.dictionary(pa.int8(), pa.string()), lambda record: str(record.status)),
    "http_status": (pa.int16(), lambda record: record.http_status or None),
    "trace_row": (pa.int64(), lambda record: _recorded(record).number),
    "trace_prompt_tokens": (pa.int64(), lambda record: _recorded(record).prompt_tokens),
    "trace_output_tokens": (pa.int64(), lambda record: _recorded(record).output_tokens),
    "prompt_tokens": (pa.int64(), lambda record: record.request.prompt_tokens),
    "output_tokens": (pa.int64(), lambda record: record.request.output_tokens),
    "generated_tokens": (pa.int64(), lambda record: record.tokens),
    "answers": (pa.int64(), lambda record: record.answers),
    "due_s": (pa.float64(), lambda record: record.request.at_s),
    "sent_s": (pa.float64(), lambda record: record.sent_s),
    "late_s": (pa.float64(), lambda record: record.late_s),
    "first_s": (pa.float64(), lambda record: record.first_s),
    "end_s": (pa.float64(), lambda record: record.end_s),
    "ttft_s": (pa.float64(), lambda record: record.ttft_s),
    "tpot_s": (pa.float64(), lambda record: record.tpot_s),
    "e2e_s": (pa.float64(), lambda record: record.e2e_s),
}
SENT_AT = pa.field("sent_at", pa.timestamp("us", "UTC"))
SCHEMA = pa.schema([SENT_AT, *((name, kind) for name, (kind, _) in COLUMNS.items())])


def write(
    path: Path, records: Sequence[Record], started_at: datetime, how: Mapping[str, Any]
) -> None:
    """`started_at`: when the replay's second 0 was, aware; `how` it was made. Raises OSError."""
    with pq.ParquetWriter(
        path, SCHEMA.with_metadata({METADATA: json.dumps(how)}), compression="zstd"
    ) as file:
        for begin in range(0, max(1, len(records)), ROWS_PER_GROUP):
            part = records[begin : begin + ROWS_PER_GROUP]
            sent_at = [
                None
                if math.isnan(record.sent_s)
                else started_at.astimezone(UTC) + timedelta(seconds=record.sent_s)
                for record in part
            ]
            columns = [pa.array(sent_at, SENT_AT.type)] + [
                # from_pandas: NaN, which is not seen, becomes null.
                pa.array([value(record) for record in part], kind, from_pandas=True)
                for kind, value in COLUMNS.values()
            ]
            file.write_table(pa.table(columns, schema=file.schema))
