"""The parity suite: every backend against one truth, within a derived tolerance, and against each other.

``python -m parity`` writes the report; ``pytest parity`` runs the same cases.
"""

import os

os.environ["MULTIATTN_TUNED"] = "0"  # Verdicts are of the package's own rules, whatever this user has tuned
