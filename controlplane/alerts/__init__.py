"""Who hears of it: channels, one message per incident, an outbox that survives a kill.

channel.py is the contract, channels/<channel>.py its implementations.
May import diagnosis and below; not actions.
"""
