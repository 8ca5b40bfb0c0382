"""Where telemetry rests: one SQL dialect (ClickHouse), written against the contract in store.py.

Start at schema.py (the tables), then chdb.py (embedded). Nobody outside `tracing` imports this.
"""
