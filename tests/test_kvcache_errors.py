"""`fmha_kvcache` and `explain` of a cache: what is wrong is named, with what came and what is accepted."""

import pytest
import torch
from cached_calls import dense, drawn, paged

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


WRONG_TENSORS = [
    (dense, {"q": [0.0]}, TypeError, "q must be a torch.Tensor; got list"),
    (dense, {"v_cache": None}, TypeError, "needs q, k_cache, v_cache, seqlens_kv; got None or nothing for v_cache"),
    (dense, {"k_cache": lambda k: k.to_sparse()}, TypeError, "k_cache must be a dense strided tensor; got layout"),
    (
        dense,
        {"q": lambda q: torch.nested.nested_tensor([q[0], q[1]])},
        TypeError,
        "q must be a dense strided tensor; got a nested tensor",
    ),
    (dense, {"q": lambda q: torch.complex(q.float(), q.float()).conj().imag}, ValueError, "q must hold its own values"),
    (dense, {"q": lambda q: q.int()}, TypeError, r"q.dtype: got torch.int32; allowed torch.float16, torch.bfloat16"),
    (dense, {"q": lambda q: q[0]}, ValueError, r"q must be \[B, Hq, Sq, D\]; got shape \(4, 1, 64\)"),
    (paged, {"q": lambda q: q[None]}, ValueError, r"q must be \[T, Hq, D\]; got shape \(1, 4, 4, 64\)"),
    (dense, {"k_cache": lambda k: k[0]}, ValueError, r"k_cache must be \[B, Hkv, S, D\]; got shape \(2, 40, 64\)"),
    (paged, {"v_cache": lambda v: v[0]}, ValueError, r"v_cache must be \[pages, Hkv, page, D\]; got shape"),
    (dense, {"v_cache": strided_on_d}, ValueError, r"v_cache must have unit stride on D; got strides \(5120, 2560, 1"),
    (dense, {"k_cache": lambda k: k.half()}, TypeError, "must share one dtype; got torch.bfloat16, torch.float16, "),
    (dense, {"k_cache": lambda k: k.to("meta")}, ValueError, "must be on one device; got cpu, meta, cpu"),
    (dense, {"v_cache": lambda v: v[:, :, :-1]}, ValueError, r"must have one shape; got .*v_cache=\(3, 2, 39, 64\)"),
    (dense, {"q": lambda q: q[..., :32]}, ValueError, r"must share head_dim; got q=\(3, 4, 1, 32\), k_cache=\(3, 2"),
    (dense, {"q": lambda q: q[:, :0]}, ValueError, r"heads and head_dim must be at least 1; got q=\(3, 0, 1, 64\)"),
    (dense, {"q": lambda q: q[:, :3]}, ValueError, r"query heads must be a multiple of .*; got q=\(3, 3, 1, 64\)"),
    (dense, {"sinks": zeros(4)}, TypeError, "sinks must be a dense floating-point tensor; got torch.int32"),
    (dense, {"sinks": torch.zeros(2)}, ValueError, r"sinks: got shape \[2\]; allowed \[4\], one for each head of q"),
    (dense, {"softcap": 0.0}, ValueError, "softcap: got 0.0; allowed positive and finite numbers"),
    (dense, {"scale": float("nan")}, ValueError, "scale must be finite"),
    (dense, {"window": (1, 2, 3)}, (TypeError, ValueError), "window"),
    (dense, {"backend": "numpy"}, ValueError, "backend: got 'numpy'"),
]
WRONG_PLACES = [
    (dense, {"seqlens_kv": [3, 4, 5]}, TypeError, "seqlens_kv must be a torch.Tensor; got list"),
    (dense, {"seqlens_kv": lambda it: it.long()}, TypeError, "seqlens_kv.dtype: got torch.int64; allowed torch.int32"),
    (dense, {"seqlens_kv": zeros(3, 1)}, ValueError, r"seqlens_kv: got shape \(3, 1\); allowed \[B\], .* dimension 3"),
    (dense, {"seqlens_kv": zeros(2)}, ValueError, r"seqlens_kv: got shape \(2,\); allowed \[B\], .* dimension 3"),
    (dense, {"seqlens_kv": zeros(6)[::2]}, ValueError, r"seqlens_kv must have unit stride .*; got strides \(2,\)"),
    (
        dense,
        {"seqlens_kv": lambda it: it.to("meta")},
        ValueError,
        "seqlens_kv must be on the device of q, cpu; got meta",
    ),
    (
        dense,
        {"k_cache": lambda k: k[:2], "v_cache": lambda v: v[:2]},
        ValueError,
        "an entry for each of 3 sequences; go",
    ),
    (paged, {"page_table": [[0]]}, TypeError, "page_table must be a torch.Tensor; got list"),
    (paged, {"page_table": lambda it: it.long()}, TypeError, "page_table.dtype: got torch.int64; allowed torch.int32"),
    (paged, {"page_table": lambda it: it[0]}, ValueError, r"page_table: got shape \(4,\); allowed \[B, max_pages\]"),
    (paged, {"page_table": lambda it: it[:2]}, ValueError, r"page_table: got shape \(2, 4\); allowed .* dimension 3"),
    (paged, {"page_table": strided_on_d}, ValueError, r"page_table must have unit stride on its last dimension; got"),
    (paged, {"page_table": lambda it: it.to("meta")}, ValueError, "page_table must be on the device of q"),
    (paged, {"cu_seqlens_q": (0, 1)}, TypeError, "cu_seqlens_q must be a torch.Tensor; got tuple"),
    (
        paged,
        {"cu_seqlens_q": lambda it: it.float()},
        TypeError,
        "cu_seqlens_q.dtype: got torch.float32; allowed torch.i",
    ),
    (
        paged,
        {"cu_seqlens_q": zeros(3)},
        ValueError,
        r"cu_seqlens_q: got shape \(3,\); allowed \[B \+ 1\], .* dimension 4",
    ),
    (paged, {"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int with cu_seqlens_q; got None"),
    (dense, {"max_seqlen_q": 1}, TypeError, "max_seqlen_q: got 1; allowed None without cu_seqlens_q"),
    (paged, {"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q must be an int or None; got float"),
    (paged, {"max_seqlen_q": -1}, ValueError, "max_seqlen_q: got -1; allowed 0 and more"),
    (dense, {"num_splits": True}, TypeError, "num_splits must be an int or None; got bool"),
    (dense, {"num_splits": "two"}, TypeError, "num_splits must be an int or None; got str"),
    (dense, {"num_splits": 0}, ValueError, f"num_splits: got 0; allowed 1 to {SPLITS_MAX}, or None"),
    (dense, {"num_splits": SPLITS_MAX + 1}, ValueError, f"num_splits: got 257; allowed 1 to {SPLITS_MAX}, or None"),
]


def with_value(place, value):
    def changed(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return changed


WRONG_VALUES = [
    (
        dense,
        {"seqlens_kv": with_value(1, 41)},
        ValueError,
        "seqlens_kv: got 41 of sequence 1; allowed 0 to 40, as many",
    ),
    (dense, {"seqlens_kv": with_value(2, -1)}, ValueError, "seqlens_kv: got -1 of sequence 2; allowed 0 to 40"),
    (paged, {"seqlens_kv": with_value(0, 65)}, ValueError, "seqlens_kv: got 65 of sequence 0; allowed 0 to 64"),
    (paged, {"page_table": with_value((1, 0), -1)}, ValueError, "page_table: got -1 of sequence 1 at 0; allowed 0 to "),
    (paged, {"page_table": with_value((0, 1), 99)}, ValueError, "page_table: got 99 of sequence 0 at 1; allowed 0 to "),
    (
        paged,
        {"cu_seqlens_q": with_value(3, 5)},
        ValueError,
        "cu_seqlens_q: got .*; allowed 0 first, none below .* up to 4",
    ),
    (paged, {"cu_seqlens_q": with_value(1, 9)}, ValueError, "cu_seqlens_q: got 4 at 2, behind 9, in "),
    (paged, {"cu_seqlens_q": with_value(0, -1)}, ValueError, "cu_seqlens_q: got -1 first, in "),
    (paged, {"max_seqlen_q": 2}, ValueError, "max_seqlen_q: got 2; allowed 3 and more, as sequence 1 of cu_seqlens_q"),
]
WRONG_OUTS = [
    (dense, {"out": 1}, TypeError, "out must be a torch.Tensor or None; got int"),
    (
        dense,
        {"out": drawn(3, 4, 2, 64)},
        ValueError,
        r"out must be like q: got \(3, 4, 2, 64\), .*; allowed \(3, 4, 1, ",
    ),
    (
        dense,
        {"out": drawn(3, 4, 1, 64).half()},
        ValueError,
        "out must be like q: got .*, torch.float16 on cpu; allowed",
    ),
    (
        dense,
        {"out": drawn(3, 4, 1, 64).to("meta")},
        ValueError,
        "out must be like q: got .* on meta; allowed .* on cpu",
    ),
    (
        paged,
        {"out": strided_on_d(drawn(4, 4, 64))},
        ValueError,
        r"out: got strides \(256, 1, 4\), .*; allowed unit str",
    ),
    (
        paged,
        {"out": drawn(4, 4, 67)[..., :64]},
        ValueError,
        r"out: got strides \(268, 67, 1\), .* that are multiples of 8",
    ),
    (paged, {"out": drawn(4, 4, 72)[..., 3:67]}, ValueError, r"address 0x\w+; allowed .* a multiple of 16"),
]


@pytest.mark.parametrize(
    ("make", "changes", "kind", "said"), [*WRONG_TENSORS, *WRONG_PLACES, *WRONG_VALUES, *WRONG_OUTS]
)
def test_what_is_wrong_is_named(make, changes, kind, said):
    with pytest.raises(kind, match=said):
        multiattn.fmha_kvcache(**called(make, changes))


@pytest.mark.parametrize(("make", "changes", "kind", "said"), WRONG_VALUES)
def test_a_compiled_call_names_wrong_values(make, changes, kind, said):
    """A backend crashed on them: it read pages that no table has."""
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, fullgraph=True, backend="eager")
    with pytest.raises(kind, match=said):
        compiled(**called(make, changes))


@pytest.mark.parametrize(("make", "changes", "kind", "said"), [*WRONG_TENSORS, *WRONG_PLACES, *WRONG_VALUES])
def test_explain_names_the_same(make, changes, kind, said):
    given = called(make, changes)
    if given["v_cache"] is None:
        said = "explain needs q, k and v"
    with pytest.raises(kind, match=said):
        explain(given)


def explain(given, **more):
    q, k, v = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
    return multiattn.explain(q, k, v, **given, **more)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("cache_seqlens", "seqlens_kv"),
        ("seqused_k", "seqlens_kv"),
        ("block_table", "page_table"),
        ("cache_batch_idx", "page_table"),
        ("softmax_scale", "scale"),
        ("s_aux", "sinks"),
        ("scheduler_metadata", "nothing"),
    ],
)
def test_an_option_by_anothers_name_is_told_ours(name, ours):
    (q, k, v), rest = dense()
    with pytest.raises(TypeError, match=rf"fmha_kvcache\(\) got an unexpected .* '{name}'; here it is {ours}"):
        multiattn.fmha_kvcache(q, k, v, **rest, **{name: None})


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


def test_explain_refuses_as_data():
    reasons = explain(called(dense, {"backend": "cuda", "variant": "split_q"}))
    assert [reason.code for reason in reasons if reason.code == "cache"] == ["cache"]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"alibi_slopes": torch.zeros(4)}, TypeError, "alibi_slopes: got Tensor; allowed None with seqlens_kv"),
        (
            {"bias": torch.zeros(1, 1, 1, 1)},
            TypeError,
            "bias: got Tensor; allowed None with seqlens_kv: fmha_kvcache has",
        ),
        (
            {"score_mod": lambda _: min},
            TypeError,
            "score_mod: got builtin_function_or_method; allowed None with seqlens_kv",
        ),
        ({"block_mask": 1}, TypeError, "block_mask: got int; allowed None with seqlens_kv"),
        ({"cu_seqlens_kv": zeros(4)}, TypeError, "cu_seqlens_kv: got Tensor; allowed None with seqlens_kv"),
        ({"max_seqlen_kv": 9}, TypeError, "max_seqlen_kv: got int; allowed None with seqlens_kv"),
        ({"direction": "backward"}, ValueError, "direction: got 'backward'; allowed forward with seqlens_kv"),
        (
            {"seqlens_kv": None, "page_table": zeros(3, 2)},
            TypeError,
            "page_table: got Tensor; allowed None without seq",
        ),
        ({"seqlens_kv": None, "num_splits": 2}, TypeError, "num_splits: got int; allowed None without seqlens_kv"),
    ],
)
def test_explain_names_what_a_cache_does_not_have(changes, kind, said):
    with pytest.raises(kind, match=said):
        explain(called(dense, changes))


def test_a_problem_has_its_own_cache():
    (q, k, v), rest = dense()
    problem = multiattn.explain(q, k, v, **rest).problem
    assert multiattn.explain(problem, arch="sm90", backend="cuda").problem is problem
    with pytest.raises(TypeError, match="takes q alone"):
        multiattn.explain(problem, arch="sm90", seqlens_kv=rest["seqlens_kv"])
