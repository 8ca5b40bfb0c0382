"""How an engine's configuration is read and changed: one file per kind of engine.

Start with reference.py. Found by `engine_adapter.adapter_classes`; may import engine_adapter only.
"""
