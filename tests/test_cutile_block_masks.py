"""Block masks in cuTile's kernels: how tiles are cut, and what is launched and compiled. Parity has the numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn import reference, reference_backward
from multiattn.block_mask import KEYS_OF_QUERIES
from multiattn.cutile.backward import OnePassConfig, TwoPassConfig
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import PIPELINES, STEPS, CutileConfig
from multiattn.cutile.launches import within_blocks
from multiattn.mask import band_of
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import problem_of

pytest.importorskip("cuda.tile")

from cutile_checks import make_inputs

from multiattn.cutile.bind import bind_proven
from multiattn.cutile.claims import tile_ir
from multiattn.cutile.compile import get_kernel, get_signature, make_cubins

BACKEND = get("cutile")
BATCH, HEADS, SEQ_Q, SEQ_KV = 2, 2, 113, 203
DOCUMENTS_Q = torch.arange(SEQ_Q) * 7 // SEQ_Q // 2
DOCUMENTS = torch.arange(SEQ_KV) * 7 // SEQ_KV // 2


def causal(b, h, q, kv):
    return kv <= q


def document(b, h, q, kv):
    return DOCUMENTS_Q[q] == DOCUMENTS[kv]


def mask_of(mask_mod, size, *, batch=None, heads=None):
    return create_block_mask(mask_mod, batch, heads, SEQ_Q, SEQ_KV, device="cpu", BLOCK_SIZE=size)


def given(q, k, v, *, causal=False, window=None, scale=None, **score):
    """The operands of a call, and its problem."""
    named = dict.fromkeys(("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")) | score
    operands, options = with_score(Operands(q, k, v), Options(*band_of(causal, window).window, scale), **named)
    return operands, problem_of(operands, options)


def inputs(head_dim=16, heads_kv=1):
    return make_inputs(batch=BATCH, heads_q=HEADS, heads_kv=heads_kv, seq_q=SEQ_Q, seq_kv=SEQ_KV, head_dim=head_dim)


ONLINE = CutileConfig(tile_m=32, tile_n=32)
LAZY = replace(ONLINE, lazy_max=True)
WAYS = {
    **{name: (name, ONLINE) for name in STEPS},
    **{pipeline: ("full", replace(LAZY, pipeline=pipeline)) for pipeline in PIPELINES},
    "static": ("full", replace(LAZY, scheduler="static", split_head_dim=True)),
}


def check_forward(way, made, *, q_k_v, **options):
    variant, config = WAYS[way]
    options["block_mask"] = made
    operands, problem = given(*q_k_v, **options)
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], variant=variant, config=STEPS[variant].step.limit(config))
    out, lse = torch.full_like(operands.q, math.nan), torch.full(operands.q.shape[:3], math.nan)
    BACKEND.forward.prepare(plan)(operands._replace(out=out, lse=lse))
    truth, truth_lse = reference(*q_k_v, compute_dtype=torch.float64, **options)
    rounding = torch.finfo(out.dtype).eps * q_k_v[2].abs().max().item()
    torch.testing.assert_close(out.double(), truth, atol=2 * rounding, rtol=0)
    torch.testing.assert_close(lse.double(), truth_lse, atol=2e-5, rtol=1e-5)
    return launches_of(plan)[0].constants


CONFIGS = {
    "two_pass": TwoPassConfig(tile_m=16, tile_n=32, dq_tile_m=32, dq_tile_n=16),
    "atomic": OnePassConfig(tile_m=32, tile_n=32),
}


def check_backward(variant, made, *, q_k_v, **options):
    options["block_mask"] = made
    operands, problem = given(*q_k_v, **options)
    generator = torch.Generator().manual_seed(2)
    q = operands.q
    dout, dlse = torch.randn(q.shape, generator=generator).bfloat16(), torch.randn(q.shape[:3], generator=generator)
    out, lse = reference(*q_k_v, compute_dtype=torch.float64, **options)
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], direction="backward", variant=variant, config=CONFIGS[variant])
    grads = [torch.full_like(it, math.nan) for it in q_k_v]
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    read = {"out": out.bfloat16(), "lse": lse.float(), "dout": dout, "dlse": dlse}
    BACKEND.backward.prepare(plan)(operands._replace(**read, dq=grads[0], dk=grads[1], dv=grads[2]))
    truths = reference_backward(*q_k_v, out, lse, dout, dlse=dlse, compute_dtype=torch.float64, **options)
    for got, truth in zip(grads, truths, strict=True):
        torch.testing.assert_close(got.double(), truth, atol=1e-2 * truth.abs().max().item(), rtol=0)


# ---------------------------------------------------------------- launches


def launch_of(made, head_dim=128, **options):
    """The forward on sm90."""
    _, problem = given(*inputs(head_dim=head_dim), block_mask=made, **options)
    return launches_of(make_plan(BACKEND, problem, ARCHS["sm90"], probe=False))[0]


def test_blocks_of_128_keep_the_tiles_of_every_rule_and_smaller_ones_cut_them():
    _, problem = given(*inputs(), block_mask=mask_of(document, 128))
    for variant in (*BACKEND.forward.variants, *BACKEND.backward.variants):
        for rule in variant.rules:
            if "sm90" in rule.arches:
                assert within_blocks(problem, rule.config) == rule.config
    _, problem = given(*inputs(), block_mask=mask_of(document, (16, 32)))
    config = within_blocks(problem, TwoPassConfig(tile_m=64, tile_n=128, dq_tile_m=8, dq_tile_n=64))
    assert (config.tile_m, config.tile_n, config.dq_tile_m, config.dq_tile_n) == (16, 32, 8, 32)


def test_lists_are_arrays_for_all_heads_and_their_values_are_not_in_the_code():
    one, other = launch_of(mask_of(causal, 128)), launch_of(mask_of(causal, 128, batch=BATCH, heads=HEADS))
    assert get_kernel(one) is get_kernel(other)
    assert get_signature(one) == get_signature(other)
    for launch, strides in ((one, (0, 0, 2, 1)), (other, (2 * HEADS, 2, 2, 1))):  # a row of two blocks
        counts, indices, full_counts, full_indices = launch.optional["listed"]
        assert [it.tensor for it in launch.optional["listed"]] == list(KEYS_OF_QUERIES)
        assert counts.layout == full_counts.layout
        assert indices.layout == full_indices.layout
        assert indices.layout.shape == (BATCH, HEADS, 1, 2)
        assert indices.layout.strides == strides


def test_a_mask_that_is_longer_than_its_sequences_masks_its_full_blocks():
    q, k, v = (it[:, :, :64] for it in inputs())
    for length, masked in ((64, False), (128, True)):
        made = create_block_mask(lambda b, h, q, kv: kv >= 0, None, None, length, length, device="cpu", BLOCK_SIZE=32)
        _, problem = given(q, k, v, block_mask=made)
        (launch,) = launches_of(make_plan(BACKEND, problem, ARCHS["sm90"], probe=False))
        assert launch.constants.masked == masked
    check_forward("plain", made, q_k_v=(q, k, v))
    check_backward("atomic", made, q_k_v=(q, k, v))


@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))
def test_what_is_compiled_takes_what_is_bound():
    """In both directions, and at D=128 with the loads ahead that scores of a block ahead need."""
    _, problem = given(*inputs(head_dim=128), block_mask=mask_of(document, 128))
    (exported,) = BACKEND.forward.export(make_plan(BACKEND, problem, ARCHS["sm90"], probe=False), ())
    assert {"full_kv_num_blocks", "captured0"} <= {getattr(it, "tensor", None) for it in exported.binding.arguments}
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant="two_pass", probe=False)
    for launch in launches_of(plan):
        signature = get_signature(launch)
        (cubin,) = make_cubins([launch], plan.arch)
        bind_proven(launch, tile_ir(cubin), abi.read_entry(cubin, signature.symbol))
