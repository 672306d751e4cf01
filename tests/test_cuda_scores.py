"""Modified scores in CUDA beyond what parity runs: hidden blocks, distances as floats, what a launch hands over."""

import ctypes
import math
from dataclasses import replace

import cuda_fakes
import pytest
import torch
from cuda_runs import on_cpu

from multiattn import fmha, reference
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.cpu import host
from multiattn.cuda.instances import kernels_of
from multiattn.cuda.score import lowered_of, text_of, with_aux
from multiattn.cuda.source import ForwardParams
from multiattn.cuda.variants import WGMMA
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.score import bind_score, lower

CPU = torch.device("cpu")
can_compile = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_expression_hides_the_blocks_that_a_warpgroup_begins_with(dtype):
    """A bias hides most rows of the last blocks, which are walked over first, and all keys of the first rows."""
    q, k, v = (torch.randn(1, 2, length, 40, dtype=dtype) for length in (150, 170, 170))
    hide = {"score_mod": lambda score, b, h, q, kv: torch.where(kv > q - 7, -torch.inf, score)}
    results = fmha(q, k, v, **hide, backend="cuda", variant=WGMMA.name, return_lse=True)
    for got, true in zip(results, reference(q, k, v, **hide), strict=True):
        torch.testing.assert_close(got, true.to(got.dtype), rtol=0.02, atol=0.02)
    assert torch.isneginf(results[1][..., :7]).all()


DISTANCES = {
    "q - kv": lambda q, kv: q - kv,
    "kv - q": lambda q, kv: kv - q,
    "a band": lambda q, kv: torch.abs(3 * q - kv).clamp(max=1 << 30),
    "a sum": lambda q, kv: -(q // 2 + kv - 5),
}
DISTANT = """
extern "C" float score(int q, int base, int step) {{
  return multiattn::{name}::score(0.0f, 0, 0, q, multiattn::Position(base, step), 0, 0, {{}});
}}
"""


@on_cpu
@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_a_distance_of_keys_is_as_near_as_the_nearest_float(distance):
    """It is exact below 2^24, where the factor of the log2 domain is rounded; elsewhere a bit may go."""
    program = bind_score(score_mod=lambda score, b, h, q, kv: score + distance(q, kv), device=CPU).program
    name, text = text_of(lower(program))
    assert "kv.base" in text
    assert "kv.index()" not in text
    run = host.load(host.build_source(text + DISTANT.format(name=name))).score
    run.restype = ctypes.c_float
    near, far = ((0, 0, 0), (3, 4, 255), (9, 0, 2)), ((2**24 + 3, 2**24, 1), (2**29 + 7, 2**29, 7), (5, 2**30 + 1, 97))
    for q, base, step in (*near, *far):
        true = int(distance(torch.tensor(q), torch.tensor(base + step)))
        assert run(q, base, step) == pytest.approx(true * math.log2(math.e), rel=3 * 2**-24), (q, base, step)


@pytest.mark.parametrize("made", [lambda q, kv: kv * kv, lambda q, kv: kv // 3, lambda q, kv: kv + kv - q])
def test_other_functions_of_a_key_stay_integers(made):
    program = bind_score(score_mod=lambda score, b, h, q, kv: score + made(q, kv), device=CPU).program
    assert "kv.base" not in text_of(lower(program))[1]


def asked(*, softcap=None, alibi=None, bias=None, head_dim=64, direction="forward", variant=SPLIT_Q.name):
    """Operands, and a Plan for sm90 of a call with this modification."""
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    operands, options = with_score(Operands(q, k, v), Options(), softcap, alibi, bias, None)
    problem = problem_of(operands, options)
    plan = make_plan(BACKEND, problem, by_name("sm90"), direction=direction, variant=variant, probe=False)
    return operands, plan


@can_compile
def test_a_launch_hands_over_what_the_expression_reads(monkeypatch, tmp_path):
    bias = torch.zeros(1, 2, 48, 96)[..., ::2]
    operands, plan = asked(softcap=5.0, bias=bias)
    driver = cuda_fakes.install(monkeypatch, tmp_path, with_aux(ForwardParams, lowered_of(plan)))
    BACKEND.forward.prepare(plan)(operands._replace(out=operands.q.clone(), lse=torch.empty(1, 2, 48)))
    ((params,), (kernel,)) = driver.structs, driver.kernels
    aux = params.aux
    assert kernel == kernels_of(plan)[0].name
    assert params.plain.q == operands.q.data_ptr()
    assert aux.tensor0 == bias.data_ptr()
    assert (aux.tensor0_stride1, aux.tensor0_stride2, aux.tensor0_stride3) == bias.stride()[1:]
    assert aux.x0 == pytest.approx(plan.problem.scale / 5.0)
    assert aux.x1 == pytest.approx(5.0 * math.log2(math.e))
    assert (params.plain.scale_sign, params.plain.scale_log2) == (1, 1.0)


@can_compile
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
def test_alibi_costs_hopper_three_instructions_a_score():
    """A subtraction, a product and an FMA, all of fp32: positions become floats once a block for each of two rows."""
    plain, sloped = (asked(alibi=it, head_dim=128, variant=WGMMA.name)[1] for it in (None, torch.ones(2)))
    plain = replace(plain, config=sloped.config)
    (before,), (after,) = map(read_plan, (plain, sloped))
    scores = sloped.config.tile_n // 2 * 2  # of a thread in the hot loops, masked and full
    kinds = ("FP32", "INT", "conversion")
    more = {kind: after.hot.classes[kind] - before.hot.classes[kind] for kind in kinds}
    assert after.hot_spills == 0
    assert more["FP32"] <= 3 * scores
    assert more["INT"] <= 24
    assert more["conversion"] == 2 * 2
