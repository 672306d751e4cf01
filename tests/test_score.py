"""Scores as expressions: what a trace holds, its derivatives, what kernels compute, and when it is traced again."""

import functools
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from score_truth import CPU, SIZES, bound, gradients, scores_of, tolerance, true_mask, true_scores, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import and_masks

from multiattn.score import UntraceableError, bind_score, eager, expression, lower, program
from multiattn.score.arithmetic import in_fp32
from multiattn.score.expression import apply, cast, const, derivative, read
from multiattn.score.lower import LOG2_E
from parity.callables import CALLABLES

SHAPE = (SIZES.batch, SIZES.heads, SIZES.seq_q, SIZES.seq_kv)


def bind(**options):
    return bind_score(device=CPU, **options)


def kernel_inputs(found, raw, scale):
    """All that the form for kernels is computed from, floats in fp64."""
    fields = lower(found.program).fields
    numbers = {
        field.name: torch.tensor(number, dtype=torch.float64 if field.kind == "f32" else torch.int32)
        for field, number in zip(fields, values(lower(found.program), found, scale), strict=True)
        if field.kind != "pointer"
    }
    return {**eager.places_of(SHAPE, CPU), **numbers, "raw": raw}


def digest(score_mod, **options):
    return bind(score_mod=score_mod, **options).program.digest


# ---------------------------------------------------------------- values and slopes


@pytest.mark.parametrize("case", [it for it in CALLABLES if it.mask_mod], ids=lambda case: case.name)
def test_a_mask_is_what_vmap_computes(case):
    made, found = bound(case)
    mask = eager.visible(found, SHAPE, CPU) if found else torch.tensor(True)
    assert torch.equal(mask.expand(SHAPE), true_mask(made["mask_mod"], SIZES))
    assert found is None or 0 < mask.expand(SHAPE).float().mean() < 1


def test_a_tensor_has_one_slot_and_no_gradient_where_only_a_mask_reads_it():
    scores, masks = (torch.zeros(24, requires_grad=True) for _ in range(2))
    made = {"score_mod": lambda s, b, h, q, kv: s + scores[kv], "mask_mod": lambda b, h, q, kv: masks[q] >= masks[kv]}
    found = bind_score(device=CPU, **made)
    assert [found.tensors[slot] is scores for slot in found.slots_requiring_grad] == [True]
    assert len(found.tensors) == 2
    first, second = torch.rand(2), torch.rand(2)
    assert bind(score_mod=lambda s, b, h, q, kv: s + first[h] * first[b]).tensors == (first,)  # captured twice
    assert len(bind(score_mod=lambda s, b, h, q, kv: s + first[h] * second[b]).tensors) == 2
    assert len(bind(alibi_slopes=first, score_mod=lambda s, b, h, q, kv: s * first[h]).tensors) == 1


@pytest.mark.parametrize("case", [it for it in CALLABLES if it.score_mod], ids=lambda case: case.name)
def test_eager_and_kernel_form_have_values_and_slopes_of_vmap(case):
    """In fp64, so that only the form itself can be wrong: the scale, log2(e), hoisted scalars, clamped indices."""
    made, found = bound(case)
    raw, scale = scores_of(SIZES), 1.3
    scores = (raw * scale).requires_grad_()
    truth = true_scores(made["score_mod"], scores, SIZES).double()
    if found is None:
        torch.testing.assert_close(truth, scores)
        return
    lowered = lower(found.program)
    inputs = kernel_inputs(found, raw, scale)

    def run(node):
        return eager.evaluate(node, found, inputs, torch.float64).expand(SHAPE)

    result = eager.modified(found, scores)
    torch.testing.assert_close(result, truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run(lowered.score) / LOG2_E, result)
    upstream = scores_of(SIZES)
    wanted = [found.tensors[slot] for slot in found.slots_requiring_grad]
    dscores, *dtensors = ours = gradients(result, [scores, *wanted], upstream)
    for mine, true in zip(ours, gradients(truth, [scores, *wanted], upstream), strict=True):
        torch.testing.assert_close(mine, true, **tolerance(true))
    torch.testing.assert_close(run(lowered.slope) * upstream, dscores)
    for slot, true in zip(found.slots_requiring_grad, dtensors, strict=True):
        total = torch.zeros(true.shape, dtype=torch.float64)
        for it in lowered.gradients_of((slot,)):
            at = [eager.evaluate(index, found, inputs, torch.float64).expand(SHAPE).long() for index in it.load.args]
            its = run(it.slope) * upstream
            total.index_put_(tuple(at), its, accumulate=True) if at else total.add_(its.sum())
        torch.testing.assert_close(total, true.double(), **tolerance(true))


def test_order_is_softcap_alibi_bias_score_mod():
    slopes, bias, scale_of = torch.rand(2), torch.randn(2, 1, 20, 28), torch.rand(2)
    found = bind(
        softcap=3.0, alibi_slopes=slopes, bias=bias, score_mod=lambda s, b, h, q, kv: s * scale_of[h],
        mask_mod=lambda b, h, q, kv: q >= kv,
    )  # fmt: skip
    scores = scores_of(SIZES)
    query, key = torch.arange(20)[:, None], torch.arange(28)[None, :]
    expected = 3.0 * torch.tanh(scores / 3.0) - slopes[:, None, None].double() * (query + 8 - key).abs() + bias
    torch.testing.assert_close(eager.modified(found, scores), expected * scale_of[:, None, None])
    assert torch.equal(eager.visible(found, SHAPE, CPU).expand(SHAPE), (query >= key).expand(SHAPE))
    assert [captured.rank for captured in found.program.tensors] == [1, 4, 1]


@pytest.mark.parametrize("shape", [(2, 2, 20, 28), (1, 2, 1, 28), (2, 1, 20, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("slopes_rank", [1, 2])
def test_named_modifications_broadcast(shape, slopes_rank):
    slopes, bias = torch.rand((2, 2)[:slopes_rank]), torch.randn(shape)
    found = bind(alibi_slopes=slopes, bias=bias)
    scores = scores_of(SIZES)
    distance = (torch.arange(20)[:, None] + 8 - torch.arange(28)[None, :]).abs()
    expected = scores - slopes[..., None, None].double() * distance + bias
    torch.testing.assert_close(eager.modified(found, scores), expected)
    strides = [field.axis for field in lower(found.program).fields if field.kind == "stride" and field.slot == 1]
    assert strides == [axis for axis, size in enumerate(shape) if size > 1]


def test_infinities_make_no_nan_in_slopes():
    bias = torch.full((1, 1, 20, 28), -float("inf")).requires_grad_()
    modifications = [
        lambda s, b, h, q, kv: s,
        lambda s, b, h, q, kv: 5 * torch.tanh(s / 5),
        lambda s, b, h, q, kv: torch.exp(s) + torch.sigmoid(s) + F.softplus(s),
        lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")) * 0.5,
        lambda s, b, h, q, kv: torch.where(q == kv, s, s / (q - kv)),
        lambda s, b, h, q, kv: s.clamp(min=-3.0).abs(),
    ]
    for score_mod in modifications:
        found = bind(bias=bias, score_mod=score_mod)
        root = found.program.score
        load = next(it for it in found.program.loads)
        for seed in (read("score"), load):
            places = eager.places_of(SHAPE, CPU)
            slope = eager.evaluate(derivative(root, seed), found, {**places, "score": scores_of(SIZES)}, torch.float64)
            assert torch.isfinite(slope).all(), found.program.text


def test_indices_stay_inside_a_captured_tensor():
    """A pair that a mask hides may ask for an element that is not there."""
    table = torch.arange(4.0)
    found = bind(score_mod=lambda s, b, h, q, kv: s + table[q - kv])
    offset = torch.arange(20)[:, None] - torch.arange(28)[None, :]
    wrapped = torch.where(offset < 0, offset + 4, offset).clamp(0, 3).double()
    torch.testing.assert_close(eager.modified(found, torch.zeros(SHAPE).double()), wrapped.expand(SHAPE))
    last = bind(score_mod=lambda s, b, h, q, kv: s + table[-1]).program.loads[0].args
    assert last == (const(3, "i32"),)
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        bind(score_mod=lambda s, b, h, q, kv: s + table[4])
    with pytest.raises(ValueError, match=r"captured tensor 0: got shape \(4,\).*indexed by kv"):
        bind(score_mod=lambda s, b, h, q, kv: s + table[kv]).check(batch=2, heads=2, seq_q=20, seq_kv=28)


def test_products_of_positions_keep_their_sign_or_are_refused():
    found = bind(score_mod=lambda s, b, h, q, kv: s + (q * 64) // 7)
    found.check(batch=2, heads=2, seq_q=1, seq_kv=2**24)
    with pytest.raises(ValueError, match=r"a sequence of 16777217 .*allowed lengths up to 16777216"):
        found.check(batch=2, heads=2, seq_q=1, seq_kv=2**24 + 1)
    bind(alibi_slopes=torch.rand(2)).check(batch=2, heads=2, seq_q=1, seq_kv=2**30)
    assert "lt" not in {it.op for it in expression.walk(lower(found.program).score)}  # natural numbers need no sign


# ---------------------------------------------------------------- digests and nodes


def test_digests_tell_code_apart_and_nothing_else():
    def make(table, number=2.0):
        return lambda s, b, h, q, kv: s * number + table[h]

    first = digest(make(torch.rand(2)))
    assert digest(make(torch.rand(2))) == digest(make(torch.rand(5)[::2])) == first
    assert digest(make(torch.rand(2)), softcap=5.0) == digest(make(torch.rand(2)), softcap=7.0) != first
    others = [make(torch.rand(2).bfloat16()), make(torch.rand(2), 3.0), lambda s, b, h, q, kv: s * 2.0]
    assert len({first, *map(digest, others)}) == 4


def test_nodes_are_shared_immutable_and_let_go():
    node = apply("add", read("score"), const(3.25))
    assert apply("add", read("score"), const(3.25)) is node
    assert pickle.loads(pickle.dumps(node)) is node
    assert const(-0.0) is not const(0.0)
    assert const(float("nan")) is const(float("nan"))
    with pytest.raises(AttributeError, match="immutable"):
        node.op = "sub"
    del node
    gc.collect()
    assert not any("3.25" in key for key in expression._interned)


@pytest.mark.parametrize("divisor", [1, 2, 3, -3, 8])
def test_integer_division_of_constants_rounds_as_python_does(divisor):
    for value in range(-9, 10):
        for op, expected in (("floordiv", value // divisor), ("mod", value % divisor)):
            assert apply(op, const(value, "i32"), const(divisor, "i32")).value == expected


def test_constants_are_folded_as_fp32_and_int32_compute_them():
    """Numbers that a callable makes are PyTorch's: its arithmetic with them is not that of doubles."""

    def folded(function):
        found = bind(score_mod=lambda s, b, h, q, kv: function(torch.tensor(0.1), torch.tensor(2**30).int()))
        return in_fp32(found.program.score.value)

    for function in (
        lambda x, n: x * 3,
        lambda x, n: x * 3 - 0.3,
        lambda x, n: (x * 30).floor(),
        lambda x, n: 1 / x,
        lambda x, n: n * 2.0**-20,
        lambda x, n: (n * 4) + (n + n) // 3 + -(-n - n) % 7 + (n * 2).abs() // 5,
        lambda x, n: n >> 40,
        lambda x, n: (x + 0.9).int(),
        lambda x, n: (x * 10).int(),
    ):
        assert folded(function) == function(torch.tensor(0.1), torch.tensor(2**30).int()).float().item()


def test_sines_have_derivatives():
    scores = scores_of(SIZES).requires_grad_()

    def score_mod(s, b, h, q, kv):
        return torch.sin(s) * torch.cos(2 * s) + torch.erf(s) + F.gelu(s) + torch.fmod(s, 1.5) + s % 0.7 + s.sign()

    found = bind(score_mod=score_mod)
    (wanted,) = gradients(score_mod(scores, 0, 0, 0, 0), [scores], torch.ones(SHAPE).double())
    torch.testing.assert_close(eager.slope(found, scores.detach()), wanted)
    inputs = kernel_inputs(found, scores.detach(), 1.0)
    lowered = eager.evaluate(lower(found.program).slope, found, inputs, torch.float64)
    torch.testing.assert_close(lowered, wanted, rtol=1e-6, atol=1e-6)


def test_folding_keeps_what_is_not_a_number():
    score = read("score")
    assert apply("mul", score, const(0.0)) is not const(0.0)
    assert apply("add", score, const(0.0)) is score
    assert apply("div", const(1.0), const(0.0)).op == "div"
    assert cast(const(float("inf")), "i32").op == "cast"


# ---------------------------------------------------------------- refusals

VECTOR, MATRIX, NUMBER = torch.rand(4), torch.rand(4, 4), torch.tensor(2.0)
ELSEWHERE = torch.rand(4, device="meta")
VISIBLE, BYTES = torch.ones(28, dtype=torch.bool), torch.ones(28, dtype=torch.uint8)


REFUSED = {
    "if": (lambda s, b, h, q, kv: s if q > kv else -s, r"control flow.*torch\.where\(condition, x, y\) for `if`"),
    "and": (lambda s, b, h, q, kv: torch.where(q > kv and kv > 2, s, 0.0), "control flow.*& | ~ for `and`"),
    "item": (lambda s, b, h, q, kv: s + VECTOR[h].item(), "item: control flow"),
    "float of a captured number": (lambda s, b, h, q, kv: s * float(NUMBER), "__float__: control flow"),
    "tolist": (lambda s, b, h, q, kv: s * VECTOR.tolist()[0], "tolist"),
    "a loop over positions": (lambda s, b, h, q, kv: s + len(range(q)), "__index__"),
    "lgamma": (lambda s, b, h, q, kv: torch.lgamma(s), "aten.lgamma"),
    "a mask_mod": (lambda s, b, h, q, kv: q >= kv, r"a result of bool; .*block_mask=create_block_mask.*torch.where\("),
    "a mask by a table": (lambda s, b, h, q, kv: VISIBLE[kv], "a result of bool"),
    "division by 0": (lambda s, b, h, q, kv: s + q // 0, "an integer and 0"),
    "remainder by 0": (lambda s, b, h, q, kv: s + kv % 0, "an integer and 0"),
    "writing by out": (lambda s, b, h, q, kv: torch.add(s, q, out=NUMBER), "writes to a captured tensor"),
    **{
        f"int32 {name}": (function, r"2147483648.* among int32; allowed -2147483648 to 2147483647.*\.long\(\)")
        for name, function in {
            "*": lambda s, b, h, q, kv: s * ((q * 21474836480) % 7),
            "%": lambda s, b, h, q, kv: s + q % 2147483648,
            "//": lambda s, b, h, q, kv: s + q // 2147483648,
            "<": lambda s, b, h, q, kv: torch.where(q < 2147483648, s, 0.0),
            "==": lambda s, b, h, q, kv: torch.where(kv == 2147483648, s, 0.0),
            "clamp": lambda s, b, h, q, kv: s + q.clamp(max=2147483648),
            "masked_fill": lambda s, b, h, q, kv: s + q.masked_fill(q > kv, 2147483648),
            "full_like": lambda s, b, h, q, kv: s + torch.full_like(q, 2147483648),
            "&": lambda s, b, h, q, kv: s + (q & 2147483648),
        }.items()
    },
    **{
        f"uint8 {name}": (function, r"-1 among uint8; allowed 0 to 255\. \.int\(\) makes int32")
        for name, function in {
            ">": lambda s, b, h, q, kv: torch.where(BYTES[kv] > -1, s, 0.0),
            "clamp": lambda s, b, h, q, kv: s + BYTES[kv].clamp(max=-1),
        }.items()
    },
    "random numbers": (lambda s, b, h, q, kv: s + torch.rand(()), "aten.rand"),
    "a whole tensor": (lambda s, b, h, q, kv: s + VECTOR, r"VECTOR, a tensor of shape \(4,\), as a whole"),
    "another device": (lambda s, b, h, q, kv: s + ELSEWHERE[h], r"ELSEWHERE, .* of shape \(4,\), on meta; .* cpu"),
    "a sum": (lambda s, b, h, q, kv: s + VECTOR.sum(), "as a whole"),
    "a row": (lambda s, b, h, q, kv: s + MATRIX[h], r"\(4, 4\)"),
    "a slice": (lambda s, b, h, q, kv: s + MATRIX[h, :].sum(), "slice"),
    "too many indices": (lambda s, b, h, q, kv: s + VECTOR[b, h], "2 indices"),
    "an index that is no integer": (lambda s, b, h, q, kv: s + VECTOR[s], "indexed by f32"),
    "writing": (lambda s, b, h, q, kv: s * NUMBER.mul_(2), "writes to a captured tensor"),
    "complex numbers": (lambda s, b, h, q, kv: s * 1j, "complex"),
    "a power": (lambda s, b, h, q, kv: s**s, "power"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_is_wrong_and_what_is_allowed(name):
    score_mod, words = REFUSED[name]
    with pytest.raises(UntraceableError, match=words) as caught:
        bind(score_mod=score_mod)
    assert "allowed" in str(caught.value)
    assert "<lambda>" in str(caught.value)
    assert not isinstance(caught.value, TypeError)


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(UntraceableError, match="result of i32; allowed a bool"):
        bind(mask_mod=lambda b, h, q, kv: q - kv)


def test_int64_takes_numbers_beyond_int32():
    found = bind(score_mod=lambda s, b, h, q, kv: s * 0 + (q.long() * 3_000_000_000) % 7 + (kv.float() < 2**40))
    wanted = (torch.arange(20)[:, None] * 3_000_000_000) % 7 + 1 + torch.zeros(28)
    torch.testing.assert_close(eager.modified(found, torch.zeros(SHAPE)), wanted.expand(SHAPE))


def test_operations_write_to_what_they_are_told():
    """``out=`` and in-place operations change the score's name, and no position of the mask_mod that comes after."""

    def score_mod(s, b, h, q, kv):
        torch.add(s, kv, out=s)
        torch.mul(s, 2.0, out=s)
        q.add_(1)
        return s + q

    found = bind(score_mod=score_mod, mask_mod=lambda b, h, q, kv: q >= kv)
    query, key = torch.arange(20)[:, None], torch.arange(28)
    assert torch.equal(eager.modified(found, torch.zeros(SHAPE)), (2.0 * key + query + 1).expand(SHAPE))
    assert torch.equal(eager.visible(found, SHAPE, CPU).expand(SHAPE), (query >= key).expand(SHAPE))


def test_numbers_that_a_callable_makes_are_read_under_a_fake_mode():
    with FakeTensorMode():
        found = bind(score_mod=lambda s, b, h, q, kv: s * torch.tensor(0.25) + torch.tensor(3))
    assert value_of(found) == 3.25


def test_an_error_of_the_callable_passes_through():
    with pytest.raises(ZeroDivisionError):
        bind(score_mod=lambda s, b, h, q, kv: s * (1 / 0))


# ---------------------------------------------------------------- traced again, or not


@pytest.fixture
def traces(monkeypatch):
    """Counts traces."""
    counted, trace = [], program.trace_program
    monkeypatch.setattr(program, "trace_program", lambda *args: counted.append(None) or trace(*args))
    monkeypatch.setattr(program, "_known", {})
    monkeypatch.setattr(program, "_KNOWN_MAX", 8)
    return counted


def value_of(found):
    """The modified score of 1 at the first place."""
    return eager.modified(found, torch.ones(1, 1, 1, 1, dtype=torch.float64)).item() if found else 1.0


def value(score_mod, **options):
    return value_of(bind(score_mod=score_mod, **options))


GLOBAL = 2.0
TABLE = torch.tensor([7.0])


def helper(s):
    return s * GLOBAL


def test_values_of_tensors_are_bound_at_each_call(traces):
    def make(table):
        return lambda s, b, h, q, kv: s + table[h]

    assert [value(make(torch.tensor([float(n)]))) for n in range(4)] == [1, 2, 3, 4]
    assert [value(lambda s, b, h, q, kv: s, bias=torch.full((1, 1, 1, 1), float(n))) for n in range(3)] == [1, 2, 3]
    assert [round(value(None, softcap=float(n)), 6) for n in (1, 2)] == [0.761594, 0.924234]
    assert len(traces) == 3


def test_whatever_changes_is_traced_again(traces, monkeypatch):
    cell = 3.0

    def score_mod(s, b, h, q, kv, *, factor=5.0):
        return helper(s) * cell * factor + TABLE[h]

    assert value(score_mod) == 2 * 3 * 5 + 7
    cell = 4.0
    assert value(score_mod) == 2 * 4 * 5 + 7
    score_mod.__kwdefaults__["factor"] = 6.0
    assert value(score_mod) == 2 * 4 * 6 + 7
    monkeypatch.setitem(globals(), "GLOBAL", 1.0)
    assert value(score_mod) == 1 * 4 * 6 + 7
    monkeypatch.setitem(globals(), "TABLE", torch.tensor([9.0]))
    assert value(score_mod) == 1 * 4 * 6 + 9
    assert len(traces) == 4
    monkeypatch.setitem(globals(), "helper", lambda s: s * -1.0)
    assert value(score_mod) == -1 * 4 * 6 + 9
    assert len(traces) == 5


def test_lambdas_of_a_loop_differ(traces):
    assert [value(lambda s, b, h, q, kv, n=n: s * n) for n in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert len(traces) == 2
    mods = [lambda s, b, h, q, kv: s * n for n in (1.0, 5.0)]  # noqa: B023 - both see the last n
    assert [value(mod) for mod in mods] == [5, 5]
    assert [value(lambda s, b, h, q, kv, n=n: s * n) for n in (0.0, -0.0, 1, True)] == [0, 0, 1, 1]


def test_partials_and_nested_functions_count_by_what_they_hold(traces):
    def scaled(factor, table, s, b, h, q, kv):
        return s * factor + table[h]

    def partial(factor, number):
        return functools.partial(scaled, factor, torch.tensor([number]))

    assert [value(partial(2.0, 1.0)), value(partial(2.0, 5.0)), value(partial(3.0, 1.0))] == [3, 7, 4]
    assert len(traces) == 2

    def mask_of(limit):
        return and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < limit)

    masks = [eager.visible(bind(mask_mod=mask_of(n)), (1, 1, 4, 4), CPU).sum().item() for n in (1, 2, 1)]
    assert masks == [4, 7, 4]
    assert len(traces) == 4


def test_two_tensors_are_not_taken_for_one_that_came_twice(traces):
    def make(first, second, third):
        return lambda s, b, h, q, kv: s + first[h] + 10 * second[h] + 100 * third[h]

    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    orders = [(one, one, one), (one, two, one), (one, two, two), (two, one, one)]
    assert [value(make(*order)) for order in orders] == [112, 122, 222, 113]
    assert len(traces) == 3


def test_what_cannot_be_compared_is_traced_each_time(traces):
    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, s, b, h, q, kv):
            return s * self.factor

        def method(self, s, b, h, q, kv):
            return s * self.factor

    scaled, listed, keyed = Scaled(2.0), [2.0], {"factor": 2.0}
    mods = [
        scaled,
        scaled.method,
        lambda s, b, h, q, kv: s * scaled.factor,
        lambda s, b, h, q, kv: s * listed[0],
        lambda s, b, h, q, kv: s * keyed["factor"],
        lambda s, b, h, q, kv: s * globals()["GLOBAL"],
        lambda s, b, h, q, kv: s * getattr(scaled, "factor"),  # noqa: B009
    ]
    assert [value(mod) for mod in mods] == [2.0] * 7
    scaled.factor = listed[0] = keyed["factor"] = 3.0
    assert [value(mod) for mod in mods] == [3.0] * 5 + [2.0, 3.0]
    assert len(traces) == 14


def test_state_that_a_callable_keeps_is_seen(traces):
    turn = 0

    def alternating(s, b, h, q, kv):
        nonlocal turn
        turn = 1 - turn
        return s * turn

    def with_attribute(s, b, h, q, kv):
        return s * with_attribute.factor

    assert [value(alternating) for _ in range(4)] == [1, 0, 1, 0]
    for factor in (2.0, 3.0):
        with_attribute.factor = factor
        assert value(with_attribute) == factor


def test_properties_of_a_tensor_that_python_reads_count(traces):
    def make(table):
        return lambda s, b, h, q, kv: s * table.shape[0] + (table[-1] if table.is_contiguous() else 0.0)

    tables = [torch.ones(2), torch.ones(3), torch.ones(2, 2)[:, 0], torch.ones(2)]
    assert [value(make(table)) for table in tables] == [3, 4, 2, 3]
    assert len(traces) == 3


def test_a_cache_of_traces_keeps_no_tensor_and_stays_small(traces):
    def once():
        table = torch.rand(3)
        value(lambda s, b, h, q, kv: s + table[h])
        return weakref.ref(table)

    reference = once()
    gc.collect()
    assert reference() is None
    for n in range(20):
        value(lambda s, b, h, q, kv, n=n: s * n)
    assert 0 < len(program._known) <= 8
