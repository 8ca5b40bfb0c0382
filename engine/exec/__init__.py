"""One forward pass: rows.py (persistent per-sequence arrays), runner.py (a mixed step).

decode.py is what a decode step computes, capture.py the same as a graph; reblock.py moves running
sequences into blocks of another size.
"""
