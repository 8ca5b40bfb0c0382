"""Who goes first, who waits, who is turned away.

request.py is one request, scheduler.py who runs in the next step. Each policy is a file of its own:
length_window.py (with length_fit.py) and priority.py are asked by the scheduler; quotas.py and
backpressure.py at the door, by Core.submit.
"""
