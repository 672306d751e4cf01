"""Scores in each language: whole kernels compiled for a GPU that is not here, and operators beside PyTorch's own.

Parity judges what whole kernels compute.
"""

import re

import pytest
import torch
from score_sweep import SWEEPS, differing
from score_truth import CPU, SIZES, bound
from torch.nn.attention.flex_attention import create_block_mask

import multiattn
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import problem_of
from multiattn.score import bind_score, lower
from parity.callables import CALLABLES, Sizes

PROGRAMS = [case for case in CALLABLES if case.name not in ("identity", "noop")]
LENGTH = 128
NAMED = {case.name: case.make(Sizes(batch=2, heads=2, seq_q=LENGTH, seq_kv=LENGTH, device=CPU)) for case in PROGRAMS}


def exported(
    backend, variant, *, direction="forward", texts=(), head_dim=64, score_mod=None, mask_mod=None, softcap=None
):
    """The kernels for Hopper of a call with these callables."""
    if reasons := get(backend).probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))
    q = torch.empty(2, 2, LENGTH, head_dim, dtype=torch.bfloat16)
    mask = mask_mod and create_block_mask(mask_mod, 2, 2, LENGTH, LENGTH, device="cpu")
    problem = problem_of(*with_score(Operands(q, q, q), Options(), softcap, None, None, score_mod, mask))
    plan = make_plan(get(backend), problem, ARCHS["sm90"], direction=direction, variant=variant, probe=False)
    return get(backend).op(direction).export(plan, texts)


WAYS = (
    ("triton", "forward", "full"),
    ("triton", "backward", "two_pass"),
    ("triton", "forward", "warp_specialized"),
    ("cutile", "forward", "full"),
    ("cutile", "backward", "two_pass"),
)
BY_DAY = {
    "composite": (WAYS[0], WAYS[3]),
    "bucketed_bias": (),
    "document_window": (WAYS[3],),
    "transfusion": (WAYS[0],),
}
"""Others wait for the night: whole kernels take their time."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, id="-".join((name, *way)), marks=() if way in by_day else pytest.mark.nightly)
        for name, by_day in BY_DAY.items()
        for way in WAYS
        if "mask_mod" not in NAMED[name] or way[2] != "warp_specialized"  # which takes no blocks
    ],
)
def test_whole_kernels_compile(name, way):
    backend, direction, variant = way
    kernels = exported(backend, variant, direction=direction, **NAMED[name])
    assert all(it.cubin[:4] == b"\x7fELF" for it in kernels)


def rounded_by_themselves(s, b, h, q, kv):
    return torch.where((q * 0.7 + 0.3).floor() * (kv / 41).floor() < (q + 0.5).sqrt() % 3.3, s, 0.0)


@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        ("triton", "full"),
        pytest.param("cuda", "split_q+swizzle_qkv", marks=pytest.mark.nightly),
        pytest.param("triton", "warp_specialized", marks=pytest.mark.nightly),
    ],
)
def test_what_decides_is_rounded_by_itself_and_tanh_is_the_gpus_own(backend, variant):
    plain, modified = (
        exported(backend, variant, texts=("ptx",), head_dim=16, softcap=20.0, score_mod=it)[-1].texts["ptx"].decode()
        for it in (None, rounded_by_themselves)
    )
    assert {"mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= set(re.findall(r"(?:mul|div|sqrt)\.[\w.]+", modified))
    assert modified.count("div.full") <= plain.count("div.full")
    assert "sqrt.approx" not in modified
    assert "tanh.approx.f32" in plain


def test_two_programs_never_share_a_name_in_tritons_cache():
    """Its key has a function of a constant by module and name alone."""
    from multiattn.triton.score import functions_of

    names = set()
    for number in (2.0, 3.0):
        lowered = lower(bind_score(device=CPU, score_mod=lambda s, b, h, q, kv, n=number: s * n * q).program)
        names.add(functions_of(lowered).score.fn.__name__)
        assert functions_of(lowered).score.fn.__name__ in functions_of(lowered).score.src
    assert len(names) == 2


# ---------------------------------------------------------------- CUDA

LOOP = """
extern "C" __global__ void modify_NAME(float* x, int* at, const multiattn::NAME::Aux aux, const GRADIENTS loads) {
  [[maybe_unused]] float slope, sums[8] = {};
  STATEMENTS
}
"""
PLACE = "at[0], at[1], at[2], at[3], 20, 28, aux"
STATEMENTS = {
    "float score(": f"x[1] = multiattn::NAME::score(x[0], {PLACE});\n"
    f"  x[2] = multiattn::NAME::score_and_slope(x[0], {PLACE}, slope) * slope;\n",
    "bool mask(": f"  x[3] = multiattn::NAME::mask({PLACE});\n",
    "load_gradients": f"  multiattn::NAME::load_gradients(x[0], x[4], {PLACE}, loads, sums);\n"
    "  multiattn::NAME::add_sums(at[0], at[1], aux, loads, sums);\n",
}


def test_cuda_compiles_every_program_on_every_arch():
    from multiattn.cuda.compile import _compile
    from multiattn.cuda.score import text_of

    texts = {}
    for case in PROGRAMS:
        found = bound(case, SIZES)[1]
        name, text = text_of(lower(found.program), found.slots_requiring_grad)
        loop = LOOP.replace("STATEMENTS", "".join(it for has, it in STATEMENTS.items() if has in text))
        kind = "multiattn::NAME::Gradients" if "load_gradients" in text else "int"
        texts[name] = text + loop.replace("GRADIENTS", kind).replace("NAME", name)
    for target in ("sm_80", "sm_90a"):
        assert _compile("\n".join(texts.values()), target)


# ---------------------------------------------------------------- operators

BACKENDS = ("reference", "triton", "cutile", "cuda")
OTHERS = (("triton", "warp_specialized"), ("cuda", "wgmma"))
"""Variants whose code of a score is another one than the first variant's on a CPU."""
EVERY = [*((it, None, quick) for it in BACKENDS for quick in (True, False)), *((*it, False) for it in OTHERS)]


@pytest.mark.parametrize(
    ("backend", "variant", "quick"), [pytest.param(*it, marks=() if it[2] else pytest.mark.nightly) for it in EVERY]
)
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_operators_are_pytorchs(sweep, backend, variant, quick):
    assert differing(sweep, backend, variant=variant, quick=quick) == []


@pytest.mark.parametrize(("backend", "variant"), [*((it, None) for it in BACKENDS[1:]), OTHERS[0]])
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
