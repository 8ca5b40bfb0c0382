"""The reference inference engine, a process of its own: torch, no Django.

Start in server.py (the door), core.py (the step thread), sched/scheduler.py (who runs), then
exec/runner.py (one forward). May import nothing of ours; replay.py is open to controlplane.demo.
"""
