"""One benchmark matrix over the backends and their peers: ``python -m bench``, ``pytest bench --benchmark-only``."""
