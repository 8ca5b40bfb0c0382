"""The reference inference engine, a process of its own: torch, no Django.

Start in server.py (the door), core.py (the step thread), sched/scheduler.py (who runs), then
exec/runner.py (one forward), reconfig.py and barrier.py (a change while it serves); router/ is
a process of its own, before several of them.
May import nothing of ours. The control plane's demo and replay use load.py, replay.py, traces/.
"""
