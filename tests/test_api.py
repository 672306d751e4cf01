"""The public calls: what is explained is what runs, refusals are data, nothing falls back."""

import copy
import inspect
import math
import pickle
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Plan, Problem, Unsupported
from multiattn.integrations.padding import fmha_padded
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch, detect
from multiattn.plan.backend import REFERENCE, make_plan
from multiattn.signatures import CallOptions


def qkv(head_dim=16, dtype=torch.bfloat16, requires_grad=False):
    drawn = torch.randn(3, 1, 2, 9, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [it.clone().requires_grad_(requires_grad) for it in drawn]


def contiguous(head_dim=64, **options):
    return Problem.contiguous(batch=1, heads_q=2, seq_q=128, head_dim=head_dim, **options)


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_a_refusal_says_who_got_what_and_who_else_can(backend):
    q, k, v = qkv(head_dim=12, dtype=torch.float32)
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(q, k, v, backend=backend)
    message = str(caught.value)
    assert message.startswith(f"{backend} cannot run this problem on cpu:\n")
    assert "  head_dim: got 12; allowed multiples of 8 up to " in message
    assert "  dtype: got fp32; allowed fp16, bf16 (" in message
    assert "Problem: B=1 Hq=2 Hkv=2 Sq=9 Skv=9 D=12 fp32 full forward" in message
    assert message.endswith("Can run it: reference (variant eager)")
    assert {reason.code for reason in caught.value.reasons} == {"head_dim", "dtype"}
    assert multiattn.explain(q, k, v, backend=backend) == caught.value.reasons


def test_a_refusal_can_be_sent_to_another_process():
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(*qkv(head_dim=12), backend="cuda")
    caught.value.__notes__ = ["seen"]  # as add_note does, which Python 3.10 lacks
    for again in (lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy):
        other = again(caught.value)
        assert (type(other), str(other), vars(other)) == (Unsupported, str(caught.value), vars(caught.value))
        assert other.reasons


@pytest.mark.parametrize("which", range(3))
def test_what_backward_refuses_is_told_at_forward_time(which, fresh_calls, monkeypatch):
    whole, get = registry.get("cuda"), registry.get
    bare = replace(whole, backward=replace(whole.backward, variants=()))
    monkeypatch.setattr(registry, "get", lambda asked: bare if asked == "cuda" else get(asked))
    inputs = qkv()
    inputs[which].requires_grad_()
    with pytest.raises(Unsupported, match="direction: got backward; allowed what cuda has kernels for") as caught:
        multiattn.fmha(*inputs, backend="cuda")
    assert caught.value.direction == "backward"
    assert "reference (variant eager)" in caught.value.alternatives
    assert multiattn.explain(*inputs, backend="cuda") == caught.value.reasons
    with torch.no_grad():
        assert isinstance(multiattn.explain(*inputs, backend="cuda"), Plan)
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(*qkv(head_dim=12, requires_grad=True), backend="cuda")
    assert list(dict.fromkeys(reason.code for reason in caught.value.reasons)) == ["head_dim", "direction"]
    assert caught.value.direction == "forward and backward"


def test_deterministic_passes_over_variants_that_are_not(monkeypatch):
    whole = registry.get(REFERENCE)
    (eager,) = whole.backward.variants
    loose = replace(eager, name="loose", deterministic=False)
    both = replace(whole, backward=replace(whole.backward, variants=(loose, eager)))
    monkeypatch.setattr(registry, "get", lambda name: both)
    q, k, v = qkv()
    plan = multiattn.explain(q, k, v, direction="backward")
    assert plan.variant == "loose"
    assert "deterministic: no" in plan.describe()
    plan = multiattn.explain(q, k, v, direction="backward", deterministic=True)
    assert plan.variant == "eager"
    assert "rejected: variant loose: deterministic: got variant loose" in plan.describe()
    torch.use_deterministic_algorithms(True)
    try:
        assert multiattn.explain(q, k, v, direction="backward").variant == "eager"
        assert multiattn.explain(q, k, v, direction="backward", deterministic=False).variant == "loose"
    finally:
        torch.use_deterministic_algorithms(False)
    reasons = multiattn.explain(q, k, v, direction="backward", variant="loose", backend=REFERENCE, deterministic=True)
    assert [reason.code for reason in reasons] == ["deterministic"]


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_auto_finds_a_kernel_for_every_head_dim(arch):
    for head_dim in range(8, 257, 8):
        for causal in (False, True):
            assert multiattn.explain(contiguous(head_dim, causal=causal), arch=arch).backend in multiattn.BACKENDS


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_a_call_and_a_launch_run_exactly_the_plan_on_its_tensors_alone(backend):
    q, k, v = qkv(head_dim=64)  # parity has this kernel compiled, too
    plan = multiattn.explain(q, k, v, backend=backend)
    assert isinstance(plan, Plan)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    multiattn.launch(plan, q, k, v, out, lse)
    for name, got, expected in zip(("out", "lse"), (out, lse), multiattn.reference(q, k, v), strict=True):
        close = 2e-2 if name == "out" else 1e-4
        torch.testing.assert_close(got.float(), expected, atol=close, rtol=close)
    for called, launched in zip(multiattn.fmha(q, k, v, backend=backend, return_lse=True), (out, lse), strict=True):
        torch.testing.assert_close(called, launched)
    torch.testing.assert_close(multiattn.fmha(q, k, v, backend=backend), out)
    with pytest.raises(ValueError, match="not those of the plan"):
        multiattn.launch(plan, q[:, :, :5], k, v, out, lse)


def outputs(q):
    return {"out": torch.empty_like(q), "lse": torch.empty(q.shape[:3])}


BAD_OUTPUTS = {
    "out is missing": lambda q: {"out": None},
    "out is short": lambda q: {"out": outputs(q[:, :, :4])["out"]},
    "out is fp32": lambda q: {"out": outputs(q)["out"].float()},
    "out is transposed": lambda q: {"out": torch.empty(1, 9, 2, 16, dtype=q.dtype).transpose(1, 2)},
    "out is unaligned": lambda q: {"out": torch.empty(1 * 2 * 9 * 16 + 1, dtype=q.dtype)[1:].view(q.shape)},
    "out is elsewhere": lambda q: {"out": torch.empty_like(q, device="meta")},
    "lse is fp16": lambda q: {"lse": outputs(q)["lse"].half()},
    "lse is transposed": lambda q: {"lse": torch.empty(1, 9, 2).transpose(1, 2)},
    "lse is short": lambda q: {"lse": outputs(q)["lse"][:, :1]},
}


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_launch_refuses_outputs_that_it_cannot_write(name, backend):
    q, k, v = qkv()
    plan = multiattn.explain(q, k, v, backend=backend)
    wrong = BAD_OUTPUTS[name](q)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))}"):
        multiattn.launch(plan, q, k, v, **(outputs(q) | wrong))


def test_launch_refuses_a_plan_for_elsewhere_and_what_is_no_plan():
    q, k, v = qkv()
    plan = multiattn.explain(q, k, v, backend="cuda", arch="sm90")
    with pytest.raises(ValueError, match="the plan is for sm90; got tensors on cpu"):
        multiattn.launch(plan, q, k, v, **outputs(q))
    with pytest.raises(TypeError, match="plan must be a Plan; got tuple"):
        multiattn.launch((), q, k, v, **outputs(q))


def test_backends_says_what_lacks_here():
    if not torch.cuda.is_available():
        assert {reasons[0].code for reasons in multiattn.backends("cuda").values()} == {"gpu"}
    with pytest.raises(ValueError, match="got meta; allowed cpu and cuda"):
        multiattn.backends("meta")
    assert set(multiattn.backends("cpu")) == set(multiattn.BACKENDS)
    assert detect(torch.device("cpu")).name == "cpu"


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_probing_beside_an_amd_gpu_raises_nothing(backend, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(registry.get(backend).probe(Arch(name="gfx942", title="AMD GPU")), tuple)


def test_a_variant_without_a_rule_tells_those_of_this_arch():
    short = Problem.contiguous(batch=1, heads_q=2, seq_q=512, head_dim=64)
    plan = multiattn.explain(short, arch="sm90", backend="cutile", direction="backward")
    (atomic,) = (line for line in plan.rejected if line.startswith("variant atomic: "))
    assert atomic.count("for callers that name the variant") == 1
    assert "for D in 129..256" in atomic
    assert "for sm100" not in atomic


def triton_of(arches):
    """Triton with only these variants, each made for some arches; `loose` is not deterministic."""
    triton = registry.get("triton")
    full = registry.find_variant(triton, "full")
    capable = {name: replace(full.capability, arches=for_these) for name, for_these in arches.items()}
    variants = (replace(full, name=it, capability=its, deterministic=it != "loose") for it, its in capable.items())
    return replace(triton, forward=replace(triton.forward, variants=tuple(variants)))


@pytest.mark.parametrize(
    ("arches", "deterministic", "told"),
    [
        ({"other": ("sm90",), "here": ("sm80",)}, False, {"dtype"}),
        ({"other": ("sm90",), "more": ("sm100",)}, False, {"arch", "dtype"}),
        ({"loose": ("sm90",), "here": ("sm80",)}, True, {"dtype"}),
        ({"loose": ("sm80",), "other": ("sm90",)}, True, {"deterministic", "dtype"}),
        ({"loose": ("sm90",)}, True, {"arch", "deterministic", "dtype"}),
    ],
)
def test_a_refusal_is_of_the_variants_made_for_the_arch(arches, deterministic, told):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=64, dtype="fp32")
    with pytest.raises(Unsupported) as caught:
        make_plan(triton_of(arches), problem, ARCHS["sm80"], deterministic=deterministic, probe=False)
    assert {reason.code for reason in caught.value.reasons} == told


def test_auto_prefers_who_runs_scores_by_the_variant_that_was_measured(monkeypatch):
    q = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16, device="cpu")
    bias = torch.zeros(1, 1, 1, 4096, device="cpu")
    plain, biased = (multiattn.explain(q, q, q, causal=True, arch="sm90", bias=it) for it in (None, bias))
    assert (plain.backend, plain.variant) == (biased.backend, biased.variant) == ("triton", "warp_specialized")

    triton = registry.get("triton")
    given = {it: replace(it.capability, scores=it.name != plain.variant) for it in triton.forward.variants}
    variants = tuple(replace(it, capability=its) for it, its in given.items())
    monkeypatch.setattr("multiattn.triton.BACKEND", replace(triton, forward=replace(triton.forward, variants=variants)))
    assert multiattn.explain(q, q, q, causal=True, arch="sm90", bias=bias).backend != "triton"


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_a_forward_does_not_mind_who_wants_a_gradient_of_its_scores(backend):
    for variant in registry.get(backend).forward.variants:
        assert variant.capability.score_gradients == variant.capability.scores, variant.name


SCORE_OPTIONS = ("alibi_slopes", "bias", "score_mod", "block_mask")


def options_shown(function):
    """The options of a call, by name, as `help` and editors show them; nothing else is taken by name alone."""
    shown = inspect.signature(function).parameters.values()
    assert {it.kind.name for it in shown} == {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"}
    return {it.name: it for it in shown if it.kind.name == "KEYWORD_ONLY"}


RETURNS = {"return_lse", "return_max"}
NARROW = {  # options of fmha that a call does not have
    multiattn.fmha_backward: RETURNS,
    multiattn.explain: {"return_lse"},
    multiattn.fmha_varlen: set(),
    multiattn.fmha_varlen_backward: RETURNS,
    multiattn.fmha_kvcache: {"dropout_p", "dropout_seed", "deterministic"},
    multiattn.reference: {"dropout_p", "dropout_seed", "backend", "variant", "return_lse", "deterministic"},
    multiattn.reference_backward: {"dropout_p", "dropout_seed", "backend", "variant", "deterministic", *RETURNS},
    fmha_padded: {*SCORE_OPTIONS, "dropout_p", "dropout_seed", "variant", *RETURNS} - {"alibi_slopes"},
}


@pytest.mark.parametrize("function", NARROW, ids=lambda it: it.__name__)
def test_every_call_shows_the_options_of_fmha(function):
    ours, its = options_shown(multiattn.fmha), options_shown(function)
    assert ours.keys() - its.keys() == NARROW[function]
    assert [its[name] for name in its if name in ours] == [ours[name] for name in its if name in ours]


def test_type_checkers_see_the_options_of_fmha():
    ours = options_shown(multiattn.fmha)
    for name in RETURNS:  # of overloads
        del ours[name]
    seen = {name: it.__forward_arg__ for name, it in CallOptions.__annotations__.items()}
    assert seen == {name: it.annotation for name, it in ours.items()}
