"""The daemon on a GPU node: small, no Django, no torch.

Start in daemon.py: two loops (collect and send; sync and apply) around a journal.
May import nothing of ours; protocol.py alone is open to the Django side.
"""
