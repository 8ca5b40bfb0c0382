"""Everything the fleet tells us: spans and metrics, in and out.

One door in (ingest.py), one door out (query.py); between them the store (ClickHouse SQL).
types.py is pure and imported by everyone. May import accounts.
"""
