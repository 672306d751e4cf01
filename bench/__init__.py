"""One benchmark matrix over the backends and their peers: ``python -m bench``, ``pytest --benchmark-only``."""

import os

os.environ["MULTIATTN_TUNED"] = "0"  # Tables are of the package's own rules, whatever this user has tuned
