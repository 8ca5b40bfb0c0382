"""Same-run comparisons. Each prints its figures and ends in a line with PASS or FAIL."""
