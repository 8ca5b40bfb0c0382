"""How telemetry arrives: one file per protocol, each around the one door in.

Start at otlp_http.py; replies.py is what all of them answer. May import tracing.ingest and
tracing.wire.
"""
