"""Recorded traces as load: what was asked when, and how much.

Start in trace.py (what is sent of a file), then formats.py (how files are read).
May import engine.load; the control plane uses it.
"""
