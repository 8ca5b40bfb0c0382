"""Where telemetry comes from: one file per source, found by `source.source_classes`.

Start with nvml.py (GPUs) and engine_metrics.py (an engine's /metrics). May import source.py only.
"""
