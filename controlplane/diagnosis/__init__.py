"""Why: incidents, the causes examined for each, and their evidence.

cause.py is the contract, causes/<cause>.py its implementations, services.py ranks them.
May import fleet, slo, tracing, accounts.
"""
