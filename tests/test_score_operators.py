"""Operators of score_mod: each one, in each language, gives what PyTorch gives."""

import pytest
import torch
from score_sweep import SWEEPS, differing

import multiattn

BACKENDS = ("reference", "triton", "cutile", "cuda")
VARIANTS = (("triton", "warp_specialized"), ("cuda", "wgmma"))
"""Those whose code of a score is another one than the first variant's on a CPU."""
EACH = pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)


@pytest.mark.parametrize("backend", BACKENDS)
@EACH
def test_operators_are_pytorchs(sweep, backend):
    assert differing(sweep, backend, quick=True) == []


@pytest.mark.parametrize(
    ("backend", "variant"), [("triton", None), ("triton", "warp_specialized"), ("cutile", None), ("cuda", None)]
)
def test_a_division_that_has_no_result_stops_no_process(backend, variant):
    """PyTorch raises for 0, and a CPU stops at the least integer by -1; a GPU has some number that is not used."""
    x = torch.tensor([7, -(2**31), 9, 5, -(2**31)], dtype=torch.int32)
    y = torch.tensor([0, -1, 2, 0, 0], dtype=torch.int32)

    def score_mod(s, b, h, i, j):
        has_quotient = (y[i] != 0) & (y[i] != -1)
        return torch.where(has_quotient, x[i] // y[i] + x[i] % y[i] + torch.fmod(x[i], y[i]), -3)

    q, k = torch.zeros(1, 1, 5, 16, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    _, lse = multiattn.fmha(q, k, k, score_mod=score_mod, backend=backend, variant=variant, return_lse=True)
    assert lse.flatten().round().tolist() == [-3, -3, 6, -3, -3]


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "variant"), [*((it, None) for it in BACKENDS), *VARIANTS])
@EACH
def test_all_operands_give_what_pytorch_has(sweep, backend, variant):
    assert differing(sweep, backend, variant=variant) == []
