"""What people see: pages, live updates, template tags. Pages only call selectors and services.

One pages/<page>.py with one templates/<page>.html each. May import all below; not loop, cli, demo.
"""
