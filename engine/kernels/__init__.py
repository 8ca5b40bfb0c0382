"""Triton kernels of the engine, each beside its torch reference: one file an op.

Start in interface.py (what attention is asked), attention.py (how it answers), lang.py (how a
kernel is launched: on a GPU, in Triton's interpreter, or only compiled, by build.py).
Nothing here imports Triton before a kernel is launched; may import nothing else of the engine.
"""
