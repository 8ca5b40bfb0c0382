"""What one sender may cost: every limit of ingest in one place, unit last."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Limits of the door in.

    A body of nothing but empty spans costs about 80 times its size while it is parsed, so the body
    is held to the Collector's 20 MiB rather than to the 64 MiB that OTLP recommends.
    """

    body_bytes_max: int = 20 * MIB  # after decompression too (OTLP/HTTP Request)
    queue_bytes_max: int = 128 * MIB
    queue_spans_max: int = 200_000
    commit_rows_max: int = 100_000
    commit_linger_ms: int = 200  # only while other requests are being decoded
    request_spans_max: int = 50_000
    request_samples_max: int = 100_000
    histogram_buckets_max: int = 200
    value_abs_max: float = 1e30  # of a sample: sums of such values are still numbers
    ahead_s_max: int = 600  # how far a sender's clock may be ahead of ours
    span_attributes_max: int = 128
    series_labels_max: int = 30
    name_chars_max: int = 256
    value_chars_max: int = 4096
    series_cached_max: int = 200_000
    memo_bytes_max: int = 32 * MIB  # what is remembered of attributes, resources, series, each
    memo_item_bytes_max: int = 64 * 1024
