"""One forward pass: rows.py (persistent per-sequence arrays), step.py (a step's), runner.py.

decode.py is what a decode step computes; capture.py records it as a graph, compiled.py has it as
machine code, build.py has that made and keeps it; kernel_step.py is a step through kernels/.
reblock.py moves running sequences into blocks of another size.
"""
