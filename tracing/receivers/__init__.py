"""How telemetry arrives: one file per protocol, each an app around the one door in.

Start at otlp_http.py. May import tracing.ingest and tracing.wire; no Django.
"""
