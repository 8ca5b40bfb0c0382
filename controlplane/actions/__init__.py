"""What to change: actions with their states, knobs, verification, rollback.

knob.py is the contract, knobs/<knob>.py its implementations, verify.py the verdict.
May import diagnosis and below; not alerts.
"""
