"""Tenants, members, tokens: who may see and send what.

The lowest Django room; imports none of ours.
"""
