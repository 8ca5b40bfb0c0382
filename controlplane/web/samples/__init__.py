"""One of everything, in every state, for the page of components. Nothing here is measured.

The rows are the rooms' own types, unsaved, so the page is drawn by the same parts as all others.
Only pages/ui.py imports from here.
"""
