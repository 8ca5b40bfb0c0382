"""Paged KV memory: pool.py (the tensors), allocator.py (who owns which block)."""
