"""The control plane: the Django project, and the loop.

Start in loop.py: one pass of judge, explain, tell, act, verify. Rooms: accounts, fleet, diagnosis,
actions, alerts, web. settings, urls, asgi, celery and tasks assemble; nothing imports them.
"""
