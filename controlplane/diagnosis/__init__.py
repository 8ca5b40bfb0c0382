"""Why: incidents, the causes examined for each, and their evidence.

cause.py is the contract, causes/<cause>.py its implementations. services.py opens and closes
incidents, explaining.py asks the causes about each.
May import fleet, slo, tracing, accounts.
"""
