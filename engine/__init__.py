"""The reference inference engine, a process of its own: torch, no Django.

Start in server.py (the door), then sched/scheduler.py (one step) and exec/runner.py (one forward).
May import nothing of ours; replay.py is open to controlplane.demo.
"""
