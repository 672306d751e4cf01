"""The public calls: what is explained is what runs, refusals are data, nothing falls back."""

import copy
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Plan, Problem, Unsupported
from multiattn.__main__ import _parser, main
from multiattn.plan import backend as registry
from multiattn.plan import choice
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch, detect
from multiattn.plan.backend import DIRECTIONS, REFERENCE, make_plan
from multiattn.plan.choice import Cell, preferred_order
from multiattn.plan.config import select
from multiattn.problem import Options
from multiattn.run import calls


def qkv(head_dim=16, dtype=torch.bfloat16, **options):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 9, head_dim, generator=generator).to(dtype).requires_grad_(**options) for _ in range(3)]


def contiguous(head_dim=64, **options):
    return Problem.contiguous(batch=1, heads_q=2, seq_q=128, head_dim=head_dim, **options)


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_named_backend_runs_its_kernel_on_cpu_tensors(backend, return_lse):
    q, k, v = qkv(requires_grad=False)
    result = multiattn.fmha(q, k, v, causal=True, backend=backend, return_lse=return_lse)
    out, lse = multiattn.reference(q, k, v, causal=True)
    torch.testing.assert_close((result[0] if return_lse else result).float(), out, atol=2e-2, rtol=2e-2)
    if return_lse:
        torch.testing.assert_close(result[1], lse, atol=1e-4, rtol=1e-4)


def test_auto_on_cpu_tensors_is_the_reference():
    q, k, v = qkv(requires_grad=False)
    plan = multiattn.explain(q, k, v)
    assert isinstance(plan, Plan)
    assert (plan.backend, plan.arch.name) == ("reference", "cpu")
    torch.testing.assert_close(multiattn.fmha(q, k, v), multiattn.reference(q, k, v)[0].to(q.dtype))


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_a_refusal_says_who_got_what_and_who_else_can(backend):
    q, k, v = qkv(head_dim=12, dtype=torch.float32, requires_grad=False)
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(q, k, v, backend=backend)
    message = str(caught.value)
    assert message.startswith(f"{backend} cannot run this problem on cpu:\n")
    assert "  head_dim: got 12; allowed multiples of 8 up to 256" in message
    assert "  dtype: got fp32; allowed fp16, bf16" in message
    assert "Problem: B=1 Hq=2 Hkv=2 Sq=9 Skv=9 D=12 fp32 full forward" in message
    assert message.endswith("Can run it: reference (variant eager)")
    assert {reason.code for reason in caught.value.reasons} == {"head_dim", "dtype"}
    assert multiattn.explain(q, k, v, backend=backend) == caught.value.reasons


@pytest.mark.parametrize("again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_a_refusal_can_be_sent_to_another_process(again):
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(*qkv(head_dim=12), backend="cuda")
    caught.value.add_note("seen")
    other = again(caught.value)
    assert type(other) is Unsupported
    assert str(other) == str(caught.value)
    assert vars(other) == vars(caught.value)
    assert other.reasons


def test_a_refusal_says_once_what_its_variants_accept():
    q = torch.zeros(1, 1, 2, 20, dtype=torch.bfloat16)
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(q, q, q, backend="cuda")
    line = "  head_dim: got 20; allowed multiples of 8 up to 256 or, in another variant, multiples of 8 up to 1024\n"
    assert line in str(caught.value)
    assert str(caught.value).count("head_dim: got") == 1
    assert [reason.code for reason in caught.value.reasons].count("head_dim") == 2


def without_backward(monkeypatch, name):
    """Let the backend called `name` have no backward, as a new one would."""
    whole = registry.get(name)
    bare = replace(whole, backward=replace(whole.backward, variants=()))
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda asked: bare if asked == name else get(asked))
    calls._forward.clear()
    calls._backward.clear()


@pytest.mark.parametrize("which", range(3))
def test_what_backward_refuses_is_told_at_forward_time(which, monkeypatch):
    without_backward(monkeypatch, "cuda")
    inputs = qkv(requires_grad=False)
    inputs[which].requires_grad_()
    with pytest.raises(Unsupported, match="direction: got backward; allowed what cuda has kernels for") as caught:
        multiattn.fmha(*inputs, backend="cuda")
    assert caught.value.direction == "backward"
    assert "reference (variant eager)" in caught.value.alternatives
    assert multiattn.explain(*inputs, backend="cuda") == caught.value.reasons
    with torch.no_grad():
        assert isinstance(multiattn.explain(*inputs, backend="cuda"), Plan)


def test_a_refusal_has_the_reasons_of_both_directions(monkeypatch):
    without_backward(monkeypatch, "cuda")
    q, k, v = qkv(head_dim=12, requires_grad=True)
    with pytest.raises(Unsupported) as caught:
        multiattn.fmha(q, k, v, backend="cuda")
    codes = list(dict.fromkeys(reason.code for reason in caught.value.reasons))
    assert codes == ["head_dim", "alignment", "direction"]  # rows of 24 bytes, which TMA does not walk
    assert caught.value.direction == "forward and backward"
    with pytest.raises(ValueError, match="got 'nope'"):
        multiattn.fmha(q, k, v, backend="nope")
    with pytest.raises(ValueError, match="got 'nope'"):
        multiattn.explain(q, k, v, backend="nope")


def test_auto_chooses_each_direction_by_itself(monkeypatch):
    first, second = "cuda", REFERENCE
    monkeypatch.setattr(choice, "preferred_order", lambda *of: ((first, "fastest"), (second, "next")))
    without_backward(monkeypatch, first)
    problem, arch = contiguous(), ARCHS["sm90"]
    plans = choice.choose(problem, arch, Options(), *choice.BOTH, probe=False)
    assert [(plan.backend, plan.direction) for plan in plans] == [(first, "forward"), (second, "backward")]
    assert [plan.why.partition(";")[0] for plan in plans] == ["fastest", "next"]


def test_explain_of_a_direction():
    q, k, v = qkv(requires_grad=True)
    for inputs in ((q, k, v), tuple(tensor.detach() for tensor in (q, k, v))):
        plan = multiattn.explain(*inputs, causal=True, direction="backward", backend="reference")
        assert (plan.direction, plan.variant, plan.problem.causal) == ("backward", "eager", True)
        assert "reference backward, variant eager" in plan.describe()
    with pytest.raises(ValueError, match="direction: got 'sideways'; allowed forward, backward"):
        multiattn.explain(q, k, v, direction="sideways")
    with pytest.raises(TypeError, match="deterministic must be a bool or None; got int"):
        multiattn.explain(q, k, v, deterministic=1)


def test_deterministic_passes_over_variants_that_are_not(monkeypatch):
    whole = registry.get(REFERENCE)
    (eager,) = whole.backward.variants
    loose = replace(eager, name="loose", deterministic=False)
    both = replace(whole, backward=replace(whole.backward, variants=(loose, eager)))
    monkeypatch.setattr(registry, "get", lambda name: both)
    q, k, v = qkv(requires_grad=False)
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


def test_explain_of_a_problem_takes_nothing_that_the_problem_has():
    with pytest.raises(TypeError, match="takes no k, v, causal or scale"):
        multiattn.explain(contiguous(), causal=True, arch="sm90")


def test_sequences_beyond_32_bit_positions_are_refused():
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=3_000_000_000, head_dim=8)
    for backend in multiattn.BACKENDS:
        reasons = multiattn.explain(problem, backend=backend, arch="sm90")
        assert "seq" in {reason.code for reason in reasons}


def test_unknown_names_are_told_with_the_known_ones():
    q, k, v = qkv(requires_grad=False)
    with pytest.raises(ValueError, match=r"got 'cutlass'; allowed auto, reference, triton, cutile, cuda"):
        multiattn.fmha(q, k, v, backend="cutlass")
    with pytest.raises(TypeError, match="backend must be a string; got list"):
        multiattn.fmha(q, k, v, backend=["triton"])
    with pytest.raises(ValueError, match=r"variant: got ''; cuda has "):
        multiattn.fmha(q, k, v, backend="cuda", variant="")
    with pytest.raises(ValueError, match=r"variant: got 'v2'; cuda has "):
        multiattn.fmha(q, k, v, backend="cuda", variant="v2")
    with pytest.raises(ValueError, match="needs a named backend"):
        multiattn.fmha(q, k, v, variant="v2")
    with pytest.raises(ValueError, match="got 'sm75'; allowed cpu, sm80"):
        multiattn.explain(q, k, v, arch="sm75")


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_every_arch_and_head_dim_has_a_rule_that_fits(backend, arch):
    for head_dim in range(8, 257, 8):
        for causal in (False, True):
            plan = multiattn.explain(contiguous(head_dim, causal=causal), backend=backend, arch=arch)
            assert isinstance(plan, Plan), f"D={head_dim}: {plan}"


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_an_arch_without_rules_is_refused_by_name(backend):
    with pytest.raises(Unsupported, match="arch: got sm75; allowed"):
        make_plan(registry.get(backend), contiguous(), Arch(name="sm75", title="Turing"), probe=False)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_every_rule_has_evidence_and_can_be_reached(backend, direction):
    tables = {}  # variants may share one: it is reached by the first of them, which takes as much as any other
    for variant in registry.get(backend).op(direction).variants:
        tables.setdefault(id(variant.rules), variant)
    for variant in tables.values():
        archs = [ARCHS[name] for name in variant.capability.arches]
        edges = {edge for rule in variant.rules for edge in (rule.seq_min, rule.seq_max) if edge}
        sizes = [(batch, seq) for batch in (1, 64) for seq in {128, 1 << 20, *edges}]
        head_dims = (*range(8, 257, 8), *range(264, variant.capability.head_dim_max + 1, 8))
        reached = set()
        dtypes = ("bf16", "fp16") if any(rule.dtype for rule in variant.rules) else ("bf16",)
        for (batch, seq), head_dim, causal, dtype in itertools.product(sizes, head_dims, (False, True), dtypes):
            problem = Problem.contiguous(
                batch=batch, heads_q=2, seq_q=seq, head_dim=head_dim, causal=causal, dtype=dtype
            )
            reached |= {id(select(variant.rules, problem, arch)[0]) for arch in archs}
        for rule in variant.rules:
            assert rule.why, f"{variant.name}: {rule.config} has no reason"
            assert id(rule) in reached, f"{variant.name}: nothing ever takes {rule}"


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_launch_runs_exactly_the_plan_and_only_on_its_tensors(backend):
    q, k, v = qkv(requires_grad=False)
    plan = multiattn.explain(q, k, v, backend=backend)
    assert isinstance(plan, Plan)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    multiattn.launch(plan, q, k, v, out, lse)
    torch.testing.assert_close(out.float(), multiattn.reference(q, k, v)[0], atol=2e-2, rtol=2e-2)
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
    q, k, v = qkv(requires_grad=False)
    plan = multiattn.explain(q, k, v, backend=backend)
    wrong = BAD_OUTPUTS[name](q)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))}"):
        multiattn.launch(plan, q, k, v, **(outputs(q) | wrong))


def test_launch_refuses_a_plan_for_elsewhere_and_what_is_no_plan():
    q, k, v = qkv(requires_grad=False)
    plan = multiattn.explain(q, k, v, backend="cuda", arch="sm90")
    with pytest.raises(ValueError, match="the plan is for sm90; got tensors on cpu"):
        multiattn.launch(plan, q, k, v, **outputs(q))
    with pytest.raises(TypeError, match="plan must be a Plan; got tuple"):
        multiattn.launch((), q, k, v, **outputs(q))


@pytest.mark.parametrize("backend", ["auto", *multiattn.BACKENDS])
def test_problems_without_queries_or_keys(backend):
    none = torch.zeros(0, 2, 9, 16, dtype=torch.bfloat16)
    assert multiattn.fmha(none, none, none, backend=backend).shape == none.shape
    q, empty = torch.ones(1, 2, 9, 16, dtype=torch.bfloat16), torch.ones(1, 2, 0, 16, dtype=torch.bfloat16)
    out, lse = multiattn.fmha(q, empty, empty, backend=backend, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert multiattn.fmha(empty, q, q, backend=backend).shape == empty.shape


def test_backends_says_what_lacks_here():
    if not torch.cuda.is_available():
        assert {reasons[0].code for reasons in multiattn.backends("cuda").values()} == {"gpu"}
    with pytest.raises(ValueError, match="got meta; allowed cpu and cuda"):
        multiattn.backends("meta")
    assert set(multiattn.backends("cpu")) == set(multiattn.BACKENDS)
    assert detect(torch.device("cpu")).name == "cpu"


def test_auto_follows_the_nearest_measured_cell(monkeypatch):
    def cell(head_dim, heads=8, **tflops):
        return Cell(
            arch="sm90", gpu="H200", date="2026-11-21", head_dim=head_dim, seq_kv=4096, causal=False,
            heads=heads, tflops=tuple(tflops.items()),
        )  # fmt: skip

    cells = [cell(64, triton=3.0, cutile=2.0), cell(256, cutile=3.0, triton=1.0)]
    monkeypatch.setattr("multiattn.plan.choice.measured_cells", lambda: cells)
    order = preferred_order(contiguous(72), ARCHS["sm90"])
    assert [name for name, _ in order] == ["triton", "cutile", "cuda"]
    assert order[0][1] == "3 TFLOPS on H200, 2026-11-21, D=64 N=4096 B*H=8 full forward"
    assert preferred_order(contiguous(248), ARCHS["sm90"])[0][0] == "cutile"
    assert "a guess" in preferred_order(contiguous(72), ARCHS["sm80"])[0][1]
    borrowed = preferred_order(contiguous(72), ARCHS["sm90"], "backward")[0]
    assert borrowed[0] == "triton"
    assert borrowed[1].endswith("full forward (no backward measured on sm90 yet)")
    cells.append(cell(64, heads=512, cuda=5.0))
    assert preferred_order(contiguous(72), ARCHS["sm90"])[0][0] == "triton"
    assert preferred_order(replace(contiguous(72), batch=100), ARCHS["sm90"])[0][0] == "cuda"
    cells.append(replace(cell(64, cutile=7.0), group=4))
    assert preferred_order(contiguous(72), ARCHS["sm90"])[0][0] == "triton"
    shared = preferred_order(replace(contiguous(72), heads_q=8, heads_kv=2), ARCHS["sm90"])[0]
    assert shared == ("cutile", "7 TFLOPS on H200, 2026-11-21, D=64 N=4096 B*H=8 Hq/Hkv=4 full forward")
    cells.append(replace(cell(64, cuda=9.0), direction="backward"))
    assert preferred_order(contiguous(72), ARCHS["sm90"])[0][0] == "triton"
    own = preferred_order(contiguous(72), ARCHS["sm90"], "backward")[0]
    assert own == ("cuda", "9 TFLOPS on H200, 2026-11-21, D=64 N=4096 B*H=8 full backward")


def test_explain_auto_for_an_arch_needs_no_gpu():
    plan = multiattn.explain(contiguous(128, causal=True), arch="sm90")
    assert isinstance(plan, Plan)
    assert plan.backend in multiattn.BACKENDS


def test_a_variant_without_a_rule_tells_those_of_this_arch():
    long = Problem.contiguous(batch=1, heads_q=2, seq_q=4096, head_dim=128)
    plan = multiattn.explain(long, arch="sm90", backend="cutile", direction="backward")
    (atomic,) = (line for line in plan.rejected if line.startswith("variant atomic: "))
    assert atomic.count("for callers that name the variant") == 1
    assert "for D in 129..256" in atomic
    assert "for sm100" not in atomic


class TestCommandLine:
    def test_explain_prints_a_plan_for_each_backend(self, capsys):
        assert main(["explain", "--shape", "2,16,1024,128", "--kv-heads", "4", "--causal", "--arch", "sm90"]) == 0
        printed = capsys.readouterr().out
        assert "B=2 Hq=16 Hkv=4 Sq=1024 Skv=1024 D=128 bf16 causal forward on sm90" in printed
        for backend in multiattn.BACKENDS:
            assert f"\n{backend} forward, variant " in printed
        assert "  config: tile_m=" in printed
        assert "  why: " in printed
        assert "  workspace: 0 bytes" in printed
        assert "  rejected: rule tile_m=" in printed

    def test_explain_and_compile_take_a_direction(self, capsys):
        arguments = ["--shape", "1,2,128,64", "--arch", "sm90", "--direction", "both"]
        main(["explain", *arguments])
        printed = capsys.readouterr().out
        assert " full forward on sm90" in printed
        assert " full backward on sm90" in printed
        assert _parser().parse_args(["compile"]).direction == "both"

    def test_explain_says_which_variant_is_taken(self, capsys):
        main(["explain", "--shape", "2,16,4096,128", "--arch", "sm90", "--direction", "backward"])
        printed = capsys.readouterr().out
        assert "\ncutile backward takes two_pass\n" in printed
        assert "\ncuda backward takes atomic; deterministic: two_pass\n" in printed

    def test_explain_prints_the_reasons(self, capsys):
        assert main(["explain", "--shape", "1,1,64,260", "--arch", "sm80"]) == 1
        assert "head_dim: got 260; allowed multiples of 8 up to 256" in capsys.readouterr().out

    def test_doctor_names_every_backend(self, capsys):
        assert main(["doctor"]) == 0
        printed = capsys.readouterr().out
        assert all(f"\n{backend}: " in printed for backend in multiattn.BACKENDS)
        assert "run on CPU tensors: yes" in printed

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["explain", "--shape", "1,2,3"], "allowed four counts B,H,S,D"),
            (["explain", "--shape", "1,2,3,8", "--arch", "sm75"], "invalid choice: 'sm75'"),
            (["compile", "--shape", "1,2,3,8", "--backend", "x"], "got 'x'; allowed triton, cutile, cuda"),
            (["compile", "--arch", "sm90,sm75"], "got 'sm75'; allowed sm80, sm86"),
            (["compile", "--head-dim", "64,zwei"], "got zwei; allowed whole numbers from 1 on"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments, message, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--variant", "split_q", "--backend", "cutile"], "variant: got 'split_q'; cutile has full, memory, math"),
            (
                ["--variant", "nobody"],
                "--variant: got 'nobody', which none of these backends has; allowed offered",
            ),
            (["--shape", "1,2,64,64", "--head-dim", "128"], "got 128 with a shape of D=64"),
            (["--shape", "1,3,64,64", "--kv-heads", "2"], "got Hq=3, Hkv=2"),
            (["--emit", "cubin,exe", "somewhere"], "got exe; allowed cubin, ptx, sass, tileir, ttgir"),
        ],
    )
    def test_what_cannot_be_compiled_is_named(self, arguments, message, capsys):
        assert main(["compile", *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_a_negative_length_is_named(self):
        with pytest.raises(SystemExit, match="sizes must not be negative"):
            main(["explain", "--shape", "1,2,64,64", "--kv-len", "-1"])

    def test_a_bad_problem_is_named(self):
        with pytest.raises(SystemExit, match="got Hq=3, Hkv=2"):
            main(["explain", "--shape", "1,3,5,8", "--kv-heads", "2"])


# ---------------------------------------------------------------- who is asked why


def triton_of(arches):
    """Triton with only these variants, each made for some arches; `loose` is not deterministic."""
    triton = registry.get("triton")
    full = registry.find_variant(triton, "full")
    variants = [
        replace(full, name=name, capability=replace(full.capability, arches=for_these), deterministic=name != "loose")
        for name, for_these in arches.items()
    ]
    return replace(triton, forward=replace(triton.forward, variants=tuple(variants)))


@pytest.mark.parametrize(
    ("arches", "deterministic", "told"),
    [
        ({"other": ("sm90",), "here": ("sm80",)}, False, {"dtype"}),
        ({"other": ("sm90",), "more": ("sm100",)}, False, {"arch", "dtype"}),
        ({"loose": ("sm90",), "here": ("sm80",)}, True, {"dtype"}),
        ({"loose": ("sm80",), "other": ("sm90",)}, True, {"deterministic"}),
        ({"loose": ("sm90",)}, True, {"arch", "dtype"}),
    ],
)
def test_a_refusal_is_of_the_variants_made_for_the_arch(arches, deterministic, told):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=64, dtype="fp32")
    with pytest.raises(Unsupported) as caught:
        make_plan(triton_of(arches), problem, ARCHS["sm80"], deterministic=deterministic, probe=False)
    assert {reason.code for reason in caught.value.reasons} == told
