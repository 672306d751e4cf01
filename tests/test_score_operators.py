"""Operators of score_mod: each one, in each language, gives what PyTorch gives."""

import pytest
from score_sweep import SWEEPS, differing

BACKENDS = ("reference", "triton", "cutile", "cuda")
EACH = pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)


@pytest.mark.parametrize("backend", BACKENDS)
@EACH
def test_operators_are_pytorchs(sweep, backend):
    assert differing(sweep, backend, quick=True) == []
