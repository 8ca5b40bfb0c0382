"""KV memory: pool.py (the tensors), allocator.py and contiguous.py (who owns which block),
prefix.py (which blocks begin a sequence), tier.py (host memory), stats.py (what is wasted).
"""
