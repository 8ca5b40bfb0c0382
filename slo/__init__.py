"""What was promised and how it stands: objectives, readings, budget, burn rate.

Start in services.py (judge); budget.py and burn.py are pure arithmetic without Django.
May import accounts and tracing's types, query and analysis.
"""
