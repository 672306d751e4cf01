"""`fmha_kvcache` and `explain` of a cache: what is wrong is named, with what came and what is accepted."""

import pytest
import torch
from cached_calls import dense, drawn, paged
from refused import assert_refused, rows

import multiattn
from multiattn import Plan
from multiattn.sequences import SPLITS_MAX, Batching

INT = torch.int32


def called(make, changes):
    """A call, some of whose arguments are made of the right ones."""
    tensors, rest = make()
    right = dict(zip(("q", "k_cache", "v_cache"), tensors, strict=True)) | rest
    return right | {name: change(right.get(name)) if callable(change) else change for name, change in changes.items()}


def strided_on_d(tensor):
    return tensor.mT.contiguous().mT


def zeros(*shape, dtype=INT):
    return torch.zeros(shape, dtype=dtype)


def with_value(place, value):
    def changed(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return changed


WRONG = {
    TypeError: [
        (dense, {"q": [0.0]}, "q must be a torch.Tensor; got list"),
        (dense, {"k_cache": lambda k: k.to_sparse()}, "k_cache must be a dense strided tensor; got layout"),
        (dense, {"k_cache": lambda k: k.half()}, "must share one dtype; got torch.bfloat16, torch.float16, "),
        (dense, {"sinks": zeros(4)}, "sinks must be a dense floating-point tensor; got torch.int32"),
        (dense, {"seqlens_kv": [3, 4, 5]}, "seqlens_kv must be a torch.Tensor; got list"),
        (dense, {"seqlens_kv": 3}, "got int | torch.full((B,), seqlens_kv, dtype=torch.int32, device=q.device)"),
        (dense, {"seqlens_kv": lambda it: it.long()}, "seqlens_kv.dtype: got torch.int64; allowed torch.int32"),
        (paged, {"page_table": lambda it: it.long()}, "page_table.dtype: got torch.int64; allowed torch.int32"),
        (paged, {"cu_seqlens_q": (0, 1)}, "cu_seqlens_q must be a torch.Tensor; got tuple"),
        (paged, {"max_seqlen_q": None}, "max_seqlen_q must be an int with cu_seqlens_q; got None | the most queries"),
        (dense, {"max_seqlen_q": 1}, "max_seqlen_q: got 1; allowed None without cu_seqlens_q"),
        (paged, {"max_seqlen_q": 3.0}, "max_seqlen_q must be an int or None; got float"),
        (dense, {"num_splits": True}, "num_splits must be an int or None; got bool"),
        (dense, {"num_splits": "two"}, "num_splits must be an int or None; got str"),
    ],
    ValueError: [
        (dense, {"v_cache": torch._neg_view}, "v_cache must hold its own values"),
        (dense, {"q": lambda q: q[0]}, "q must be [B, Hq, Sq, D]; got shape (4, 1, 64)"),
        (dense, {"q": lambda q: q[:, :, 0]}, "got shape (3, 4, 64) | q.unsqueeze(2)"),
        (paged, {"q": lambda q: q[None]}, "q must be [T, Hq, D]; got shape (1, 4, 4, 64)"),
        (dense, {"k_cache": lambda k: k[0]}, "k_cache must be [B, Hkv, S, D]; got shape (2, 40, 64)"),
        (paged, {"v_cache": lambda v: v[0]}, "v_cache must be [pages, Hkv, page, D]; got shape"),
        (dense, {"v_cache": strided_on_d}, "v_cache must have unit stride on D; got strides (5120, 2560, 1"),
        (dense, {"k_cache": lambda k: k.to("meta")}, "must be on one device; got cpu, meta, cpu"),
        (dense, {"v_cache": lambda v: v[:, :, :-1]}, "must have one shape; got | v_cache=(3, 2, 39, 64)"),
        (dense, {"q": lambda q: q[..., :32]}, "must share head_dim; got q=(3, 4, 1, 32), k_cache=(3, 2"),
        (dense, {"q": lambda q: q[:, :0]}, "heads and head_dim must be at least 1; got q=(3, 0, 1, 64)"),
        (dense, {"q": lambda q: q[:, :3]}, "must be a multiple of | got q=(3, 3, 1, 64) | k_cache.transpose(1, 2)"),
        (dense, {"sinks": torch.zeros(2)}, "sinks: got shape [2]; allowed [4], one for each head of q"),
        (dense, {"softcap": 0.0}, "softcap: got 0.0; allowed positive and finite numbers"),
        (dense, {"scale": float("nan")}, "scale must be finite"),
        (dense, {"seqlens_kv": zeros(3, 1)}, "seqlens_kv: got shape (3, 1); allowed [B] | dimension 3"),
        (dense, {"seqlens_kv": zeros(2)}, "seqlens_kv: got shape (2,); allowed [B] | dimension 3 | a number for each"),
        (dense, {"seqlens_kv": zeros(6)[::2]}, "seqlens_kv must have unit stride | got strides (2,)"),
        (dense, {"seqlens_kv": lambda it: it.to("meta")}, "seqlens_kv must be on the device of q, cpu; got meta"),
        (dense, dict.fromkeys(("k_cache", "v_cache"), lambda it: it[:2]), "each of 3 sequences; got | k_cache[:3]"),
        (paged, {"page_table": lambda it: it[0]}, "page_table: got shape (4,); allowed [B, max_pages]"),
        (paged, {"page_table": lambda it: it[:2]}, "page_table: got shape (2, 4); allowed | dimension 3"),
        (paged, {"page_table": strided_on_d}, "page_table must have unit stride on its last dimension; got"),
        (paged, {"cu_seqlens_q": zeros(3)}, "cu_seqlens_q: got shape (3,); allowed [B + 1] | dimension 4"),
        (paged, {"max_seqlen_q": -1}, "max_seqlen_q: got -1; allowed 0 and more"),
        (dense, {"num_splits": 0}, f"num_splits: got 0; allowed 1 to {SPLITS_MAX}, or None | leaves it to the plan"),
        (dense, {"num_splits": SPLITS_MAX + 1}, f"num_splits: got 257; allowed 1 to {SPLITS_MAX}, or None"),
    ],
}
WRONG_VALUES = {
    ValueError: [
        (dense, {"seqlens_kv": with_value(1, 41)}, "got 41 of sequence 1; allowed 0 to 40 | write the new keys"),
        (dense, {"seqlens_kv": with_value(2, -1)}, "seqlens_kv: got -1 of sequence 2; allowed 0 to 40"),
        (paged, {"seqlens_kv": with_value(0, 65)}, "seqlens_kv: got 65 of sequence 0; allowed 0 to 64"),
        (paged, {"page_table": with_value((1, 0), -1)}, "page_table: got -1 of sequence 1 at 0; allowed 0 to "),
        (paged, {"page_table": with_value((0, 1), 99)}, "got 99 of sequence 0 at 1; allowed 0 to | name a page there"),
        (paged, {"cu_seqlens_q": with_value(3, 5)}, "cu_seqlens_q: got | allowed 0 first, none below | up to 4"),
        (paged, {"cu_seqlens_q": with_value(1, 9)}, "cu_seqlens_q: got 4 at 2, behind 9, in "),
        (paged, {"cu_seqlens_q": with_value(0, -1)}, "cu_seqlens_q: got -1 first, in "),
        (paged, {"max_seqlen_q": 2}, "max_seqlen_q: got 2; allowed 3 and more, as sequence 1 of cu_seqlens_q"),
    ]
}
OVERLAPPING = (0, 64, 64, 1), (64, 64, 64, 1), (512, 32, 64, 1)
"""Strides of an out whose elements share addresses."""
OF_OUT = {
    ValueError: [
        (dense, {"out": drawn(3, 4, 2, 64)}, "out must be like q: got (3, 4, 2, 64), | allowed (3, 4, 1, "),
        (dense, {"out": drawn(3, 4, 1, 64).half()}, "must be like q: got | torch.float16 on cpu | torch.empty_like(q)"),
        (dense, {"out": drawn(3, 4, 1, 64).to("meta")}, "out must be like q: got | on meta; allowed | on cpu"),
        (dense, {"out": drawn(3, 4, 1, 64).float()}, "out must be like q: got | torch.float32"),
    ]
}
OF_THE_CALL = {
    TypeError: [
        (dense, {"v_cache": None}, "needs q, k_cache, v_cache, seqlens_kv; got None or nothing for v_cache"),
        (dense, {"out": 1}, "out must be a torch.Tensor or None; got int"),
    ],
    ValueError: [
        *((dense, {"out": drawn(4096).as_strided((3, 4, 1, 64), it)}, "no two elements") for it in OVERLAPPING),
        (paged, {"out": strided_on_d(drawn(4, 4, 64))}, "out: got strides (256, 1, 4), | allowed unit str"),
        (paged, {"out": drawn(4, 4, 67)[..., :64]}, "out: got strides (268, 67, 1), | that are multiples of 8"),
        (paged, {"out": drawn(4, 4, 72)[..., 3:67]}, "address 0x | allowed | a multiple of 16"),
    ],
}
OF_EXPLAIN = {
    TypeError: [
        (dense, {"v_cache": None}, "explain needs q, k and v"),
        (dense, {"alibi_slopes": torch.zeros(4)}, "alibi_slopes: got Tensor; allowed None with seqlens_kv"),
        (dense, {"bias": torch.zeros(1, 1, 1, 1)}, "bias: got Tensor; allowed None with seqlens_kv: fmha_kvcache has"),
        (dense, {"score_mod": lambda _: min}, "score_mod: got builtin_function_or_method; allowed None"),
        (dense, {"block_mask": 1}, "block_mask: got int; allowed None with seqlens_kv"),
        (dense, {"cu_seqlens_kv": zeros(4)}, "cu_seqlens_kv: got Tensor; allowed None with seqlens_kv"),
        (dense, {"max_seqlen_kv": 9}, "max_seqlen_kv: got int; allowed None with seqlens_kv"),
        (dense, {"seqlens_kv": None, "page_table": zeros(3, 2)}, "page_table: got Tensor; allowed None without seq"),
        (dense, {"seqlens_kv": None, "num_splits": 2}, "num_splits: got int; allowed None without seqlens_kv"),
    ],
    ValueError: [(dense, {"direction": "backward"}, "direction: got 'backward'; allowed forward with seqlens_kv")],
}


@pytest.mark.parametrize(("kind", "make", "changes", "told"), rows(WRONG, WRONG_VALUES, OF_OUT, OF_THE_CALL))
def test_what_is_wrong_is_named(kind, make, changes, told):
    given = called(make, changes)
    assert_refused(kind, lambda: multiattn.fmha_kvcache(**given), told)


@pytest.mark.parametrize(("kind", "make", "changes", "told"), rows(WRONG_VALUES, OF_OUT))
def test_a_compiled_call_names_wrong_values(kind, make, changes, told):
    """A backend crashed on them: it read pages that no table has. Nor are results cast or broadcast to fit an out."""
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, backend="eager")
    assert_refused(kind, lambda: compiled(**called(make, changes)), told)


@pytest.mark.parametrize(("kind", "make", "changes", "told"), rows(WRONG, WRONG_VALUES, OF_EXPLAIN))
def test_explain_names_the_same(kind, make, changes, told):
    assert_refused(kind, lambda: explain(called(make, changes)), told)


def explain(given, **more):
    q, k, v = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
    return multiattn.explain(q, k, v, **given, **more)


# ---------------------------------------------------------------- explain


def test_explain_gives_the_plan_that_runs():
    given = called(paged, {"causal": True, "num_splits": 3, "backend": "cuda"})
    plan = explain(given)
    assert isinstance(plan, Plan)
    assert (plan.backend, plan.variant, plan.config.splits) == ("cuda", "split_keys", 3)
    assert str(plan.problem) == "packed B=3 Hq=4 Hkv=2 Tq=4 Skv=64 D=64 bf16 causal cache: pages of 16 splits=3"
    assert plan.problem.batching == Batching.cached(3, 6, 16, 4, max_q=3, splits=3)
    assert plan.workspace_bytes == 3 * 4 * 4 * (64 + 1) * 4


def test_explain_has_the_options_of_the_call():
    plain = explain(called(dense, {"causal": True}))
    assert (plain.backend, plain.problem.mask, plain.problem.cache.page) == ("reference", "full", None)
    changed = explain(called(dense, {"window": (9, 0), "softcap": 3.0, "sinks": torch.zeros(4), "scale": 0.5}))
    assert (changed.problem.mask, changed.problem.has_sinks, changed.problem.scale) == ("window:9:-", True, 0.5)
    assert changed.problem.has_score


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm120"])
def test_explain_of_a_gpu_that_is_not_here(arch):
    plan = explain(called(paged, {"backend": "cuda"}), arch=arch)
    assert (plan.arch.name, plan.variant) == (arch, "split_keys")
    assert 1 <= plan.config.splits <= SPLITS_MAX


def test_a_problem_has_its_own_cache():
    (q, k, v), rest = dense()
    problem = multiattn.explain(q, k, v, **rest).problem
    assert multiattn.explain(problem, arch="sm90", backend="cuda").problem is problem
    with pytest.raises(TypeError, match="takes q alone"):
        multiattn.explain(problem, arch="sm90", seqlens_kv=rest["seqlens_kv"])
