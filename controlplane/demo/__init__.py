"""The demo: load with a shift, the webhook receiver, the screen it prints.

May import all below, engine.load and engine.replay.
"""
