"""`merge`, `merge_all` and FlashInfer's names for them: parts of the keys make attention over all of them.

Truth is attention in fp64 over all keys at once. Rows of every kind are in each case: those that see all parts, all but
one, one alone, and none.
"""

import itertools
import math

import pytest
import torch

import multiattn
from multiattn.integrations import flashinfer

HEADS, ROWS, HEAD_DIM, KEYS = 2, 9, 8, 5
LAYOUTS = pytest.mark.parametrize("layout", ["dense", "packed"])
GARBAGE = pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf], ids=str)
"""Values of out where a part sees no key."""


def attend(scores, v):
    """``[..., ROWS, keys]`` scores and ``[..., keys, D]`` values to out and lse."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weights @ v, lse


def as_laid_out(out, lse, layout):
    """``[2, HEADS, ROWS, D]`` and its lse in a layout; packed keeps the first batch entry."""
    return (out, lse) if layout == "dense" else (out[0].transpose(0, 1), lse[0])


def parts_and_whole(layout="dense", count=3, dtype=torch.float64, garbage=torch.nan, seed=0):
    """Outs and lses of `count` parts, and those of all keys in fp64. Row i sees part p unless bit p of i is set."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(2, HEADS, ROWS, count * KEYS, generator=generator, dtype=torch.float64)
    v = torch.randn(2, HEADS, count * KEYS, HEAD_DIM, generator=generator, dtype=torch.float64)
    of_key = torch.arange(count * KEYS) // KEYS
    hidden = (torch.arange(ROWS)[:, None] >> of_key) & 1 == 1
    scores = scores.masked_fill(hidden, -torch.inf)
    outs, lses = [], []
    for of_scores, of_v in zip(scores.split(KEYS, -1), v.split(KEYS, -2), strict=True):
        out, lse = as_laid_out(*attend(of_scores, of_v), layout)
        unseen = lse == -torch.inf if layout == "dense" else (lse == -torch.inf).T
        outs.append(out.masked_fill(unseen[..., None], garbage).to(dtype))
        lses.append(lse.to(torch.promote_types(dtype, torch.float32)))
    return outs, lses, as_laid_out(*attend(scores, v), layout)


def leaves_of(outs, lses):
    return [it.clone().requires_grad_() for it in (*outs, *lses)]


def merge_flat(*tensors):
    """`merge_all` of outs and lses in one list."""
    half = len(tensors) // 2
    return multiattn.merge_all(tensors[:half], tensors[half:])


def assert_near(found, whole, dtype):
    """An error of one rounding of each part and one of the result, and as much of lse in its own dtype."""
    (out, lse), (true_out, true_lse) = found, whole
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), true_out, rtol=0, atol=eps * true_out.abs().max().item() + 1e-14)
    eps = torch.finfo(lse.dtype).eps
    torch.testing.assert_close(lse.double(), true_lse, rtol=2 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@GARBAGE
@LAYOUTS
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_make_the_whole(count, layout, garbage, dtype):
    outs, lses, whole = parts_and_whole(layout, count, dtype, garbage)
    sees_none = whole[1] == -torch.inf
    assert sees_none.any()
    for order in itertools.permutations(range(count)):
        found = multiattn.merge_all([outs[it] for it in order], [lses[it] for it in order])
        assert_near(found, whole, dtype)
    if count == 2:
        pair = multiattn.merge(outs[1], lses[1], outs[0], lses[0])
        torch.testing.assert_close(pair, found, rtol=0, atol=0)
    if count == 3 and dtype == torch.float64:
        pair = multiattn.merge(outs[0], lses[0], outs[1], lses[1])
        assert_near(multiattn.merge(*pair, outs[2], lses[2]), whole, dtype)


@pytest.mark.parametrize("level", [0.0, 1e3, -1e3, 1e6])
def test_lse_of_any_size_neither_overflows_nor_unbalances_weights(level):
    """At 1e6 fp32 has steps of 1/16: a weight that is exp(lse_a - lse) would be off by percents."""
    ones = torch.ones(1, 1, 3, 4)
    lse_a = torch.tensor([[[level, level, -torch.inf]]])
    lse_b = torch.tensor([[[level, level - 1e5, level]]])
    out, lse = multiattn.merge(ones, lse_a, 3 * ones, lse_b)
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([2.0, 1.0, 3.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse[0, 0], torch.tensor([level + math.log(2), level, level]))


@LAYOUTS
@GARBAGE
def test_a_part_beside_unseen_ones_keeps_its_bits(layout, garbage):
    (out, *_), (lse, *_), _ = parts_and_whole(layout, dtype=torch.bfloat16, garbage=0.0)
    nothing = torch.full_like(out, garbage), torch.full_like(lse, -torch.inf)
    for found in (multiattn.merge(out, lse, *nothing), multiattn.merge(*nothing, out, lse)):
        torch.testing.assert_close(found, (out, lse), rtol=0, atol=0)


def test_an_infinite_lse_and_a_nan_are_told():
    out = torch.ones(1, 1, 4, 2)
    lse_a = torch.tensor([[[torch.inf, torch.inf, torch.nan, 0.0]]])
    lse_b = torch.tensor([[[0.0, -torch.inf, 0.0, 0.0]]])
    nan_in_sight = out.clone()
    nan_in_sight[0, 0, 3, 1] = torch.nan
    merged, lse = multiattn.merge(out, lse_a, nan_in_sight, lse_b)
    assert merged.isnan().tolist() == [[[[True, True], [True, True], [True, True], [False, True]]]]
    torch.testing.assert_close(lse[0, 0, :3], torch.tensor([torch.inf, torch.inf, torch.nan]), equal_nan=True)


# ---------------------------------------------------------------- gradients


@GARBAGE
@LAYOUTS
def test_gradients_and_theirs(layout, garbage):
    outs, lses, _ = parts_and_whole(layout, 2, garbage=garbage)
    cut = slice(0, 4) if layout == "packed" else (slice(0, 1), slice(0, 1), slice(0, 4))  # a row of each kind
    rows = (slice(None), slice(0, 4)) if layout == "packed" else cut
    leaves = leaves_of([it[cut][..., :2] for it in outs], [it[rows] for it in lses])

    def finite(*tensors):
        """Without -inf, of which `gradcheck` would take differences."""
        out, lse = merge_flat(*tensors)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(finite, leaves)
    assert torch.autograd.gradgradcheck(finite, leaves)


@GARBAGE
@LAYOUTS
def test_empty_rows_get_zero_gradients_though_nan_comes_in(layout, garbage):
    """Into rows that see no part, and into row 1, which sees all but the first."""
    outs, lses, _ = parts_and_whole(layout, garbage=garbage)
    leaves = leaves_of(outs, lses)
    results = merge_flat(*leaves)
    spoiled = results[1] == -torch.inf
    assert not spoiled[..., 1].any()
    spoiled[..., 1] = True
    dout, dlse = (torch.randn(it.shape, dtype=it.dtype) for it in results)
    dlse[spoiled] = torch.nan
    dout[spoiled if layout == "dense" else spoiled.T] = torch.nan
    gradients = torch.autograd.grad(results, leaves, (dout, dlse))
    for of_out, of_lse, lse in zip(gradients[:3], gradients[3:], lses, strict=True):
        unseen = lse == -torch.inf
        assert not of_lse[unseen].any()
        assert not of_out[unseen if layout == "dense" else unseen.T].any()
        assert of_lse[~unseen].all()
        of_lse[..., 1] = 0.0
        assert of_lse.isfinite().all()


# ---------------------------------------------------------------- parts that fmha makes

Q_ROWS, SHARED, OWN = 7, 11, 7


def prefix(q, k, v, sinks):
    """A prefix that all queries see, and a causal suffix with the sink."""
    options = {"return_lse": True, "backend": "reference", "sinks": sinks}
    first = multiattn.fmha(q, k[:, :, :SHARED], v[:, :, :SHARED], **options | {"sinks": None})
    second = multiattn.fmha(q, k[:, :, SHARED:], v[:, :, SHARED:], causal=True, **options)
    return multiattn.merge(*first, *second), multiattn.fmha(q, k, v, causal=True, **options)


def packed(q, k, v, sinks):
    """Two sequences one after another, the second with no key in the first part."""
    q, k, v = (it[0].transpose(0, 1) for it in (q, k, v))
    lengths_q = torch.tensor([0, 3, Q_ROWS], dtype=torch.int32)

    def attend_to(keys, *starts, sinks=None):
        starts = torch.tensor(starts, dtype=torch.int32)
        lengths = {"cu_seqlens_q": lengths_q, "cu_seqlens_kv": starts, "max_seqlen_q": 4, "max_seqlen_kv": 18}
        return multiattn.fmha_varlen(q, k[keys], v[keys], **lengths, sinks=sinks, return_lse=True, backend="reference")

    of_second = torch.cat((torch.arange(5, 8), torch.arange(8, 18)))
    parts = attend_to(slice(0, 5), 0, 5, 5), attend_to(of_second, 0, 3, 13, sinks=sinks)
    return multiattn.merge(*parts[0], *parts[1]), attend_to(slice(0, 18), 0, 8, 18, sinks=sinks)


@pytest.mark.parametrize("case", [prefix, packed], ids=lambda it: it.__name__)
def test_merged_parts_of_fmha_are_the_whole(case):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, Q_ROWS, 8), (2, 2, SHARED + OWN, 8), (2, 2, SHARED + OWN, 8), (4,))
    inputs = [torch.randn(it, generator=generator).requires_grad_() for it in shapes]
    found, whole = case(*inputs)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    given = [torch.randn(it.shape, generator=generator) for it in whole]
    gradients = (torch.autograd.grad(it, inputs, given, allow_unused=True) for it in (found, whole))
    torch.testing.assert_close(*(list(filter(torch.is_tensor, it)) for it in gradients), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- PyTorch around it


@LAYOUTS
def test_compiles_whole_for_any_length(layout):
    def loss(*tensors):
        out, lse = merge_flat(*tensors)
        return out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in (0, 1):
        outs, lses, _ = parts_and_whole(layout, 2, torch.bfloat16, seed=seed)
        if seed:
            outs = [it.repeat_interleave(3, dim=2 if layout == "dense" else 0) for it in outs]
            lses = [it.repeat_interleave(3, dim=-1) for it in lses]
        eager, ours = leaves_of(outs, lses), leaves_of(outs, lses)
        expected, found = loss(*eager), compiled(*ours)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, ours), torch.autograd.grad(expected, eager))


@LAYOUTS
def test_meta_tensors_autocast_and_vmap(layout):
    outs, lses, _ = parts_and_whole(layout, 2, torch.bfloat16)
    expected = merge_flat(*outs, *lses)
    for one, other in zip(merge_flat(*(it.to("meta") for it in (*outs, *lses))), expected, strict=True):
        assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)
        assert one.stride() == other.stride()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(merge_flat(*outs, *lses), expected, rtol=0, atol=0)
    twice = [torch.stack((it, it)) for it in (outs[0], lses[0])]
    found = torch.vmap(multiattn.merge, in_dims=(0, 0, None, None))(*twice, outs[1], lses[1])
    torch.testing.assert_close(found, tuple(torch.stack((it, it)) for it in expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("layout", "order"), [("dense", (0, 1, 2, 3)), ("dense", (0, 2, 1, 3)), ("packed", (0, 1, 2))])
def test_out_and_gradients_lie_in_memory_as_out_did(layout, order, dtype):
    """As `fmha` gives ``[B, S, H, D]`` memory: no kernel of a backward has to copy its dout."""
    outs, lses, whole = parts_and_whole(layout, 2, dtype)
    leaves = leaves_of([it.permute(order).contiguous().permute(order) for it in outs], lses)
    out, lse = merge_flat(*leaves)
    assert_near((out, lse), whole, dtype)
    assert lse.is_contiguous()
    for it in (out, *torch.autograd.grad(out, leaves[:2], torch.ones_like(out))):
        assert it.permute(order).is_contiguous()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (0, 2, 8)], ids=str)
def test_nothing_is_merged_to_nothing(shape):
    rows = shape[:3] if len(shape) == 4 else (shape[1], shape[0])
    out, lse = merge_flat(*[torch.zeros(shape)] * 2, *[torch.zeros(rows)] * 2)
    assert (out.shape, lse.shape) == (shape, rows)


OUT, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"out_a": [0.0]}, TypeError, "out_a must be a torch.Tensor; got list"),
        ({"lse_b": None}, TypeError, "got None or nothing for lse_b"),
        ({"out_b": OUT.to_sparse()}, TypeError, "out_b must be a dense strided tensor; got layout torch.sparse_coo"),
        ({"out_a": OUT.int()}, TypeError, "out_a.dtype: got torch.int32; allowed torch.float16"),
        ({"out_b": OUT.half()}, TypeError, "out_a and out_b must share one dtype; got .*out_b=torch.float16"),
        ({"lse_a": LSE.half()}, TypeError, "lse_a.dtype: got torch.float16; allowed torch.float32, torch.float64"),
        ({"lse_a": LSE.double()}, TypeError, "lse_a and lse_b must share one dtype"),
        ({"lse_b": LSE.to("meta")}, ValueError, "lse_a and lse_b must be on one device; got lse_a=cpu, lse_b=meta"),
        ({"lse_a": LSE.to("meta"), "lse_b": LSE.to("meta")}, ValueError, "lse must be on the device of out, cpu"),
        ({"out_a": OUT[0, 0], "out_b": OUT[0, 0]}, ValueError, r"out_a: got shape \[4, 8\]; allowed \[B, Hq, Sq, D"),
        ({"out_b": OUT[:1]}, ValueError, r"out_b: got shape \[1, 3, 4, 8\]; allowed \[2, 3, 4, 8\], that of out_a"),
        ({"lse_b": LSE[..., None]}, ValueError, r"lse_b: got shape \[2, 3, 4, 1\]; allowed \[2, 3, 4\], \[B, Hq, Sq\]"),
        ({"out_a": OUT[0], "out_b": OUT[0]}, ValueError, r"lse_a: got shape \[2, 3, 4\]; allowed \[4, 3\], \[Hq, T\]"),
    ],
)
def test_bad_arguments_are_named(changes, error, said):
    with pytest.raises(error, match=said):
        multiattn.merge(**{"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE} | changes)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "said"),
    [
        ([], [], ValueError, "outs and lses: got 0 outs and 0 lses; allowed as many of each, at least one"),
        ([OUT, OUT], [LSE], ValueError, "got 2 outs and 1 lses"),
        (OUT, [LSE], TypeError, "outs must be a list or tuple of tensors; got Tensor"),
        ([OUT], LSE, TypeError, "lses must be a list or tuple of tensors; got Tensor"),
        ([OUT, OUT[:1]], [LSE, LSE], ValueError, r"outs\[1\]: got shape \[1, 3, 4, 8\]"),
    ],
)
def test_bad_lists_are_named(outs, lses, error, said):
    with pytest.raises(error, match=said):
        multiattn.merge_all(outs, lses)


# ---------------------------------------------------------------- FlashInfer's names


def states(count=3, dtype=torch.bfloat16, garbage=torch.nan):
    """FlashInfer's states of parts, and that of all keys."""
    outs, lses, (out, lse) = parts_and_whole("packed", count, dtype, garbage)
    of_lse = [(it.double() / math.log(2)).T.contiguous() for it in (*lses, lse)]
    return outs, [it.float() for it in of_lse[:-1]], (out, of_lse[-1])


def assert_state(found, whole, dtype=torch.bfloat16):
    (v, s), (true_v, true_s) = found, whole
    assert (v.dtype, s.dtype) == (dtype, torch.float32)
    assert v.is_contiguous()
    assert s.is_contiguous()
    assert_near((v, s), (true_v, true_s), dtype)


@GARBAGE
@pytest.mark.parametrize("count", [1, 2, 3])
def test_flashinfer_merges_states(count, garbage):
    vs, ss, whole = states(count, garbage=garbage)
    leaves = torch.stack(vs, 1).requires_grad_(), torch.stack(ss, 1).requires_grad_()
    merged = flashinfer.merge_states(*leaves)
    assert_state([it.detach() for it in merged], whole)
    sees = (whole[1] > -torch.inf).float()  # gradients of its parts add up to one: plain PyTorch has the rest
    of_v, of_s = (it.float().sum(1) for it in torch.autograd.grad([it.sum() for it in merged], leaves))
    torch.testing.assert_close(of_v, sees[..., None].expand_as(of_v), rtol=0.01, atol=0)
    torch.testing.assert_close(of_s, sees, rtol=0.01, atol=0)
    if count == 2:
        assert_state(flashinfer.merge_state(vs[0], ss[0], vs[1], ss[1]), whole)
        assert_state(flashinfer.merge_state(vs[1], ss[1].double(), vs[0], ss[0]), whole)


def test_flashinfer_merges_no_states_to_nothing():
    v, s = flashinfer.merge_states(torch.empty(ROWS, 0, HEADS, HEAD_DIM), torch.empty(ROWS, 0, HEADS))
    torch.testing.assert_close(v, torch.zeros(ROWS, HEADS, HEAD_DIM))
    torch.testing.assert_close(s, torch.full((ROWS, HEADS), -torch.inf))


@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.uint8], ids=str)
def test_flashinfer_merge_state_in_place(mask_dtype):
    vs, ss, whole = states(2)
    mask = None if mask_dtype is None else (torch.arange(ROWS) % 3 != 1).to(mask_dtype)
    v, s = vs[0].clone(), ss[0].clone()
    assert flashinfer.merge_state_in_place(v, s, vs[1], ss[1], mask) is None
    is_merged = torch.ones(ROWS, dtype=torch.bool) if mask is None else mask.bool()
    assert_state((v[is_merged], s[is_merged]), [it[is_merged] for it in whole])
    torch.testing.assert_close(v[~is_merged], vs[0][~is_merged], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(s[~is_merged], ss[0][~is_merged], rtol=0, atol=0)


def test_flashinfer_states_keep_their_bits_beside_empty_ones():
    """However often: a graph may merge padding into a state at each step."""
    (v, *_), (s, *_), _ = states(garbage=0.0)
    nothing = torch.full_like(v, torch.nan), torch.full_like(s, -torch.inf)
    torch.testing.assert_close(flashinfer.merge_state(v, s, *nothing), (v, s), rtol=0, atol=0)
    torch.testing.assert_close(flashinfer.merge_states(v[:, None], s[:, None]), (v, s), rtol=0, atol=0)


V, S = torch.zeros(4, 3, 8), torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: flashinfer.merge_state(V, None, V, S), TypeError, "s_a must be a torch.Tensor; got NoneType"),
        (lambda: flashinfer.merge_state(V[None], S, V, S), ValueError, r"v_a must have rank 3, \[T, H, D\]; got shape"),
        (lambda: flashinfer.merge_state(V, S, V, S.T), ValueError, r"s_b: got shape \[3, 4\]; allowed \[4, 3\]"),
        (lambda: flashinfer.merge_state(V, S, V.half(), S), TypeError, "v_a and v_b must share one dtype"),
        (lambda: flashinfer.merge_states(V, S), ValueError, r"v must have rank 4, \[T, N, H, D\]; got shape"),
        (lambda: flashinfer.merge_state_in_place(V, S.half(), V, S), TypeError, "s.dtype: got torch.float16"),
        (lambda: flashinfer.merge_state_in_place(V, S, V, S, S[:3, 0]), ValueError, r"mask: got shape \[3\]; .* \[4\]"),
    ],
)
def test_flashinfer_bad_arguments_are_named(call, error, said):
    with pytest.raises(error, match=said):
        call()
