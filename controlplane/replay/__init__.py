"""`trimtab replay`: a recorded trace against any OpenAI-compatible engine, open loop.

Start in __main__.py, then figures.py (what is said of the answers) and results.py (Parquet).
May import engine.load, engine.replay and engine.traces.
"""
