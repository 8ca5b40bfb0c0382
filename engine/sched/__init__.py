"""Who runs in the next step: request.py (one request), scheduler.py (the policy)."""
