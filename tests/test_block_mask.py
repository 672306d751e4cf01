"""Block masks that are made cheaply: the lists of `create_block_mask`, and lists that no host reads."""

import importlib
import math
import re

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask
from torch.utils._python_dispatch import TorchDispatchMode

import multiattn
from multiattn import __main__ as command
from multiattn.blocks import block_mask, document_mask
from parity.callables import CALLABLES, Sizes

lists_module = importlib.import_module("multiattn.block_mask")
builder = importlib.import_module("multiattn.blocks")
CPU = torch.device("cpu")
GRIDS = [
    ((2, 3, 150, 110), (32, 16)),
    ((1, 2, 33, 200), (16, 32)),
    ((3, 2, 97, 61), (7, 5)),
    ((1, 1, 40, 40), (128, 128)),
]


class NoWait(TorchDispatchMode):
    """Refuses what a GPU would have to be waited for."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique", "masked_select", "lift_fresh")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func._schema.name.removeprefix("aten::").startswith(self.WAITS), func
        return func(*args, **(kwargs or {}))


def natural(sizes, below, *shape, dtype=torch.int64):
    return sizes.integers(below, *shape, dtype=dtype)


def made_of(sizes):
    """Callables beside those of `parity.callables`."""
    batch, heads, length = sizes.batch, sizes.heads, sizes.longest
    documents, ids = natural(sizes, 6, length).sort().values, natural(sizes, 7, length, dtype=torch.int32)
    valid, floats, slopes = natural(sizes, 4, batch, length) > 0, sizes.normal(length, grad=False), sizes.normal(heads)
    reach, reach64 = natural(sizes, 30, heads, dtype=torch.int32), natural(sizes, 30, heads)
    floats[3], floats[5] = math.nan, math.inf
    dense = natural(sizes, 2, batch, heads, sizes.seq_q, sizes.seq_kv, dtype=torch.bool)
    edges = torch.tensor([5, 20, 60])
    return {
        "strict": lambda b, h, q, kv: q > kv,
        "window": lambda b, h, q, kv: ((q - kv).abs() < 9) & (kv <= q + 3),
        "window_of_heads": lambda b, h, q, kv: (q + 5 >= kv) & (q - kv <= reach[h]),
        "window_of_heads_64": lambda b, h, q, kv: (q >= kv) & (q - kv <= reach64[h]),
        "no_window": lambda b, h, q, kv: ~((q - kv).abs() > 4) & ~(q < kv),
        "unsorted": lambda b, h, q, kv: ids[q] == ids[kv],
        "rising_ids": lambda b, h, q, kv: ids[q] < ids[kv],
        "other_documents": lambda b, h, q, kv: documents[q] != documents[kv],
        "padded": lambda b, h, q, kv: valid[b, q] & valid[b, kv],
        "padded_causal": lambda b, h, q, kv: valid[b, kv] & (q >= kv),
        "queries_alone": lambda b, h, q, kv: q % 3 == 0,
        "heads_alone": lambda b, h, q, kv: h % 2 == 0,
        "floats": lambda b, h, q, kv: floats[q] < floats[kv],
        "float_differences": lambda b, h, q, kv: ~(floats[q] - floats[kv] > 0.5),
        "float_equality": lambda b, h, q, kv: floats[q] == floats[kv],
        "dense": lambda b, h, q, kv: dense[b, h, q, kv],
        "dense_causal": lambda b, h, q, kv: dense[b, h, q, kv] & (q >= kv),
        "alibi": lambda b, h, q, kv: slopes[h] * (q - kv) > -3.0,
        "alibi_sizes": lambda b, h, q, kv: (slopes[h] * (q - kv).abs()).abs() < 5,
        "video": lambda b, h, q, kv: (
            ((q // 40 - kv // 40).abs() <= 1)
            & (((q // 8) % 5 - (kv // 8) % 5).abs() <= 2)
            & ((q % 8 - kv % 8).abs() <= 3)
        ),
        "dilated": lambda b, h, q, kv: ((q - kv) % 7 == 0) & (q >= kv),
        "dilated_by_two": lambda b, h, q, kv: ((q - kv) % 8 == 3) | ((kv - q) % 5 == 2),
        "products": lambda b, h, q, kv: ((q - 50) * (kv - 40) >= 100) | ((q * kv) % 16 == 7),
        "wrapping": lambda b, h, q, kv: q.int() * 50_000_000 - kv.int() * 7 > 0,
        "sums": lambda b, h, q, kv: (q + kv == 90) | (q + kv < 40),
        "nothing": lambda b, h, q, kv: q < 0,
        "everything": lambda b, h, q, kv: torch.ones_like(q, dtype=torch.bool),
        "by_head": lambda b, h, q, kv: torch.where(h % 2 == 0, q >= kv, q <= kv + 3),
        "by_query": lambda b, h, q, kv: torch.where(q % 2 == 0, q >= kv, kv < 5),
        "selected": lambda b, h, q, kv: torch.where(q > kv, q - kv, kv - q) < torch.where(h == 1, 4, 17),
        "xor": lambda b, h, q, kv: (q >= kv) ^ (documents[q] == documents[kv]),
        "counted": lambda b, h, q, kv: (q >= kv).int() + (q - kv < 10).int() + (kv < 7).int() >= 2,
        "clamped": lambda b, h, q, kv: torch.minimum(q, kv) < (torch.maximum(q, kv) - 20).clamp(min=5),
        "quotients": lambda b, h, q, kv: ((q - kv) // 7 == 1) | ((q - kv) >> 2 <= 3) | (((q - kv) / 3.0).floor() == 2),
        "differences_64": lambda b, h, q, kv: (documents[q] - documents[kv] >= 0) & (q - kv < 40),
        "untraceable": lambda b, h, q, kv: torch.bucketize(q, edges) >= kv % 3,
    }


CASES = [
    *made_of(Sizes(batch=1, heads=1, seq_q=8, seq_kv=8, device=CPU)),
    *(it.name for it in CALLABLES if it.mask_mod),
]


def mask_mod_of(name, shape):
    sizes = Sizes(batch=shape[0], heads=shape[1], seq_q=shape[2], seq_kv=shape[3], device=CPU)
    known = {it.name: it for it in CALLABLES if it.mask_mod}
    return known[name].make(sizes)["mask_mod"] if name in known else made_of(sizes)[name]


def check_equal(found, expected):
    assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)
    for name in lists_module.LISTS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_lists_are_those_of_create_block_mask(name, monkeypatch):
    for place, (shape, sizes) in enumerate(GRIDS):
        monkeypatch.setattr(builder, "BYTES", (1 << 10, 1 << 28)[place % 2])  # in many pieces, or at once
        mask_mod = mask_mod_of(name, shape)
        expected = create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=sizes)
        found = block_mask(mask_mod, *shape, device="cpu", block_size=sizes)
        assert found.mask_mod is mask_mod
        check_equal(found, expected)


@pytest.mark.parametrize(
    "name", ["causal", "sliding_window", "window_of_heads", "padded", "rising_ids", "by_head", "noop"]
)
def test_a_mask_whose_form_tells_all_is_not_waited_for(name):
    shape, sizes = GRIDS[0]
    mask_mod = mask_mod_of(name, shape)
    with NoWait():
        block_mask(mask_mod, *shape, device="cpu", block_size=sizes)


def test_sizes_may_be_left_out_zero_or_wrong():
    causal = mask_mod_of("causal", GRIDS[0][0])
    check_equal(
        block_mask(causal, None, None, 300, 300, device="cpu"), create_block_mask(causal, None, None, 300, 300, "cpu")
    )
    compiled = torch.compile(lambda: block_mask(causal, 1, 1, 300, 300, device="cpu"), backend="eager", fullgraph=True)
    check_equal(compiled(), block_mask(causal, 1, 1, 300, 300, device="cpu"))
    assert block_mask(causal, 2, 1, 0, 300, device="cpu").kv_indices.shape == (2, 1, 0, 3)
    for given, error in (
        ((1, 1, -1, 4), "seq_q: got -1"),
        ((1, 0, 4, 4), "heads: got 0"),
        ((1, 1, 4.0, 4), "seq_q must"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            block_mask(causal, *given, device="cpu")
    small = torch.zeros(8, dtype=torch.bool)
    with pytest.raises(ValueError, match="captured tensor 0"):
        block_mask(lambda b, h, q, kv: small[kv], 1, 1, 9, 9, device="cpu")


# ---------------------------------------------------------------- documents on the device

LENGTHS = [
    ((5, 0, 60, 1, 34), None),
    ((0, 0, 90), None),
    ((40, 20, 0, 7), (10, 30, 9, 64)),
    ((1,) * 70, None),
    ((), None),
]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (6, None)}, {"window": (3, 2)}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda it: str(len(it[0])))
def test_documents_have_the_lists_of_their_mask_without_waiting(lengths, options):
    of_q, of_kv = lengths[0], lengths[1] or lengths[0]
    starts = [torch.tensor([0, *it]).cumsum(0).int() for it in (of_q, of_kv)]
    rows, keys, sizes = sum(of_q) + 9, sum(of_kv) + 20, (16, 32)
    visible, at_q, at_kv = torch.zeros(rows, keys, dtype=torch.bool), 0, 0
    for m, n in zip(of_q, of_kv, strict=True):
        diagonal = torch.arange(n)[None] - torch.arange(m)[:, None] - (n - m)
        left, right = options.get("window", (None, 0 if options else None))
        seen = (diagonal >= -(n + m if left is None else left)) & (diagonal <= (n + m if right is None else right))
        visible[at_q : at_q + m, at_kv : at_kv + n] = seen
        at_q, at_kv = at_q + m, at_kv + n
    with NoWait():
        found = document_mask(*starts, total_q=rows, total_kv=keys, block_size=sizes, **options)
    see = lambda b, h, q, kv: visible[q, kv]  # noqa: E731
    check_equal(found, create_block_mask(see, 1, 1, rows, keys, device="cpu", BLOCK_SIZE=sizes))
    torch.testing.assert_close(found.mask_mod(0, 0, torch.arange(rows)[:, None], torch.arange(keys)), visible)


@pytest.mark.parametrize("starts", [[0, 300, -5, 9], [7, 7], [3, 1, 2]])
def test_starts_that_are_wrong_name_no_block_that_is_not_there(starts):
    mask = document_mask(torch.tensor(starts), total_q=50, causal=True, block_size=16)
    assert mask.kv_indices.max() < 4
    assert mask.kv_num_blocks.max() <= 4


# ---------------------------------------------------------------- lists from the device


def routed(compute_q_blocks=False):
    """Two of four blocks of keys for each of three blocks of queries, as a router picks them: q, k, v and the mask."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 16) for length in (96, 128, 128))
    counts, indices = torch.full((1, 2, 3), 2, dtype=torch.int32), torch.rand(1, 2, 3, 4).argsort(-1).int()
    return (q, k, v), BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, compute_q_blocks=compute_q_blocks)


def test_lists_are_taken_as_they_are_and_their_values_never_read(monkeypatch):
    (q, k, v), mask = routed()
    for has_gradient in (False, True):
        with NoWait():
            lists, _ = lists_module.read_block_mask(mask, q, k, has_gradient=has_gradient)
        assert lists.named["kv_indices"] is mask.kv_indices
        assert lists.named["kv_num_blocks"] is mask.kv_num_blocks
        assert [tuple(it.shape) for it in lists.tensors[2:]] == [(1, 2, 4), (1, 2, 4, 3)]
    torch.testing.assert_close(lists.tensors[2:], (routed(True)[1].q_num_blocks, routed(True)[1].q_indices))
    monkeypatch.setattr(lists_module, "_transposed", lambda named: pytest.fail("a forward alone made transposed lists"))
    multiattn.fmha(q, k, v, block_mask=mask, backend="reference")
    with torch.no_grad():
        multiattn.fmha(q.requires_grad_(), k, v, block_mask=mask, backend="reference")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_gradients_are_those_of_a_mask_that_has_all_lists(backend):
    inputs, mask = routed()
    results = []
    for it in (mask, routed(True)[1]):
        q, k, v = (tensor.bfloat16().requires_grad_() for tensor in inputs)
        out = multiattn.fmha(
            q, k, v, block_mask=it, backend=backend if not multiattn.backends("cpu")[backend] else "auto"
        )
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_explain_counts_blocks(capsys):
    (q, k, v), mask = routed()
    plan = multiattn.explain(q, k, v, block_mask=mask)
    assert plan.blocks == (0, 12, 12)
    assert "  blocks: 0 full, 12 partial, 12 skipped, of 24" in plan.describe().splitlines()
    assert multiattn.explain(q, k, v).blocks is None
    command.main(["explain", "--shape", "1,8,512,64", "--block", "128", "--arch", "sm90"])
    assert re.search(r"blocks of a causal block mask: 6 full, 4 partial, 6 skipped, of 16", capsys.readouterr().out)


# ---------------------------------------------------------------- over packed sequences


SPEC = lists_module.BlockSpec(128, 128, has_full=True)


def causal_mask(b, h, i, j):
    return i >= j


PACKED = {
    "blocks that sequences share": ((16, 16), [5, 40, 0, 1, 60], [5, 40, 0, 1, 60], {}),
    "other lengths of keys": ((32, 16), [20, 0, 33, 7], [11, 30, 64, 0], {"causal": True}),
    "blocks of several tiles": ((256, 160), [100, 190], [300, 90], {"window": (70, 30)}),
    "no keys at all": ((16, 16), [9, 20], [0, 0], {}),
    "positions of each sequence": ((16, 48), [9, 50], [70, 21], {"score_mod": lambda s, b, h, i, j: s + i - j + 3 * b}),
}


def packed_truth(q, k, v, starts_q, starts_kv, mask_mod, causal=False, window=None, score_mod=None):
    """Attention of packed rows by one dense mask of all of them, in fp64."""
    rows_q, rows_kv = torch.arange(q.shape[0]), torch.arange(k.shape[0])
    of_q, of_kv = (
        torch.searchsorted(it[1:], rows, right=True) for it, rows in ((starts_q, rows_q), (starts_kv, rows_kv))
    )
    b, i = of_q[:, None], (rows_q - starts_q[of_q.clamp(max=len(starts_q) - 2)])[:, None]
    j = rows_kv - starts_kv[of_kv.clamp(max=len(starts_kv) - 2)]
    level = i + (starts_kv.diff() - starts_q.diff())[b.clamp(max=len(starts_q) - 2)]
    heads = torch.arange(q.shape[1])[:, None, None]
    seen = mask_mod(torch.zeros((), dtype=torch.int64), heads, rows_q[:, None], rows_kv) & (b == of_kv)
    seen &= (b < len(starts_q) - 1) & (not causal or j <= level)
    seen &= window is None or ((j >= level - window[0]) & (j <= level + window[1]))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = scores if score_mod is None else score_mod(scores, b, heads, i, j)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, v)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_mask_is_over_the_axis_and_of_each_sequence(name):
    size, queries, keys, options = PACKED[name]
    starts = [torch.tensor([0, *it], dtype=torch.int32).cumsum(0, dtype=torch.int32) for it in (queries, keys)]
    made = torch.Generator().manual_seed(0)
    rows_q, rows_kv = int(starts[0][-1]) + 7, int(starts[1][-1]) + 4 * any(keys)
    q, k, v, dout = (
        torch.randn(rows, 2, 8, dtype=torch.float64, generator=made) for rows in (rows_q, rows_kv, rows_kv, rows_q)
    )
    blocks = torch.randint(3, (2, -(-rows_q // size[0]), -(-rows_kv // size[1])), generator=made)
    scattered = torch.rand(rows_q, rows_kv, generator=made) < 0.6

    def mask_mod(b, h, i, j):  # none of a batch entry but the first
        kind = blocks[h, i // size[0], j // size[1]]
        return ((kind == 2) | ((kind == 1) & scattered[i, j])) & (b == 0)

    mask = block_mask(mask_mod, 1, 2, rows_q, rows_kv, device="cpu", block_size=size)
    q, k, v = (it.requires_grad_() for it in (q, k, v))
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True))
    lengths |= {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}
    asked = {**lengths, **options, "block_mask": mask, "backend": "reference"}
    out, lse = multiattn.fmha_varlen(q, k, v, return_lse=True, **asked)
    truth = packed_truth(q, k, v, *starts, mask_mod, **options)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(truth, (q, k, v), dout)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), gradients, atol=1e-5, rtol=1e-5
    )
    # Without autograd, of a mask that has the lists of one direction alone.
    mask.q_num_blocks = mask.q_indices = mask.full_q_num_blocks = mask.full_q_indices = None
    q, k, v, out, lse = (it.detach() for it in (q, k, v, out, lse))
    torch.testing.assert_close(
        multiattn.fmha_varlen_backward(q, k, v, out, lse, dout, **asked), gradients, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("has_gradient", [False, True])
def test_lists_of_sequences_are_made_without_waiting(has_gradient):
    lists = lists_module.BlockLists.among(vars(create_block_mask(causal_mask, 1, 1, 600, 600, device="cpu")), SPEC)
    starts = torch.tensor([0, 9, 600], dtype=torch.int32)
    with NoWait():
        made = lists_module.of_sequences(lists, [starts, starts], has_gradient=has_gradient)
    assert [it.shape for it in made.tensors] == [(1, 1, 7), (1, 1, 7, 5)] * 4
    assert made.named["kv_num_blocks"].flatten().tolist() == [1, 1, 1, 1, 1, 5, 0]
    assert made.named["full_kv_num_blocks"].flatten().tolist() == [0, 0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("starts", [[0, 300, -5, 900], [7, 7], [3, 1, 2], [0]])
def test_wrong_starts_name_no_list_or_block_that_is_not_there(starts):
    lists = lists_module.BlockLists.among(vars(create_block_mask(causal_mask, 1, 1, 600, 600, device="cpu")), SPEC)
    made = lists_module.of_sequences(lists, [torch.tensor(starts)] * 2)
    assert all(it.min() >= 0 and it.max() <= 5 for it in made.tensors)


def test_lists_name_the_blocks_of_their_sequence_alone():
    seen = create_block_mask(noop_mask, 1, 1, 600, 600, device="cpu")
    lists = lists_module.BlockLists.among(vars(seen), SPEC)
    starts = torch.tensor([0, 300, 300, 520], dtype=torch.int32)
    named = lists_module.of_sequences(lists, [starts, starts]).named
    for names in (lists_module.KEYS_OF_QUERIES, lists_module.QUERIES_OF_KEYS):
        for of_counts, of_indices in (names[:2], names[2:]):
            counts, rows = named[of_counts].flatten().tolist(), named[of_indices][0, 0].tolist()
            for sequence, blocks in ((0, {0, 1, 2}), (2, {2, 3, 4})):
                assert all({*rows[it + sequence][: counts[it + sequence]]} <= blocks for it in blocks)


def test_an_error_of_a_packed_mask_names_the_callers_function():
    def number(b, h, i, j):
        return i - j

    q, starts = torch.zeros(20, 1, 8, dtype=torch.bfloat16), torch.tensor([0, 20], dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 20, "max_seqlen_kv": 20}
    mask = create_block_mask(causal_mask, 1, 1, 20, 20, device="cpu")
    mask.mask_mod = number
    with pytest.raises(Exception, match=r"number: a result of i32"):
        multiattn.fmha_varlen(q, q, q, **lengths, block_mask=mask)
