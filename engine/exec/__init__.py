"""One forward pass: rows.py (persistent per-sequence arrays), runner.py (a mixed step)."""
