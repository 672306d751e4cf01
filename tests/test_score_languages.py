"""Printed programs, compiled for a GPU that is not here: parity and the sweep of operators judge what they compute."""

# ruff: noqa: N803 - constexprs of a Triton kernel are upper case

import io
import re

import pytest
import torch
from score_truth import CPU, SIZES, bound, element_of, values

from multiattn.score import bind_score, lower
from parity.callables import CALLABLES

SCALE = 0.3
TILE = 32
"""Rows and columns of the one tile that holds all scores of a head, and goes beyond the end of both sequences."""
PROGRAMS = [case for case in CALLABLES if case.name not in ("identity", "noop")]


class Printed:
    """A program of a case with inputs for its functions."""

    def __init__(self, case):
        _, self.bound = bound(case)
        self.lowered = lower(self.bound.program)
        self.slots = self.bound.slots_requiring_grad
        self.raw = torch.empty(SIZES.batch, SIZES.heads, TILE, TILE)
        self.dtensors = {slot: torch.zeros(self.bound.tensors[slot].shape) for slot in self.slots}

    def gradient_values(self):
        return [element_of(field, self.dtensors[field.slot]) for field in self.lowered.gradient_fields(self.slots)]


# ---------------------------------------------------------------- Triton

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402


@triton.jit
def modify(
    raw, dscore, score, dscores, again, mask, aux, daux, heads, seq_q, seq_kv,
    FUNCTIONS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All functions of one head."""
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    q, kv = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    at = tl.program_id(0) * TILE * TILE + q * TILE + kv
    if FUNCTIONS.score is not None:
        x = tl.load(raw + at)
        dx = tl.load(dscore + at)
        tl.store(score + at, FUNCTIONS.score(x, b, h, q, kv, seq_q, seq_kv, aux))
        s, slope = FUNCTIONS.score_and_slope(x, b, h, q, kv, seq_q, seq_kv, aux)
        tl.store(again + at, s)
        tl.store(dscores + at, dx * slope)
        if FUNCTIONS.load_gradients is not None:
            FUNCTIONS.load_gradients(x, dx, b, h, q, kv, seq_q, seq_kv, aux, daux, 0)
    if FUNCTIONS.mask is not None:
        visible = FUNCTIONS.mask(b, h, q, kv, seq_q, seq_kv, aux)
        tl.store(mask + at, tl.where(visible, tl.full([TILE, TILE], 1.0, tl.float32), 0.0))


# ---------------------------------------------------------------- cuTile

ct = pytest.importorskip("cuda.tile")


def tile_kernel(functions):
    """All functions of one head, as `modify`: functions are variables of a kernel's closure."""

    @ct.kernel
    def modify_tiles(raw, dscore, score, dscores, again, mask, aux, daux, seq_q, seq_kv):
        b, h = ct.bid(0), ct.bid(1)
        q = ct.arange(TILE, dtype=ct.int32)[:, None]
        kv = ct.arange(TILE, dtype=ct.int32)[None, :]
        if functions.score is not None:
            x = ct.gather(raw, (b, h, q, kv))
            dx = ct.gather(dscore, (b, h, q, kv))
            ct.scatter(score, (b, h, q, kv), functions.score(x, b, h, q, kv, seq_q, seq_kv, aux))
            s, slope = functions.score_and_slope(x, b, h, q, kv, seq_q, seq_kv, aux)
            ct.scatter(again, (b, h, q, kv), s)
            ct.scatter(dscores, (b, h, q, kv), dx * slope)
            if functions.load_gradients is not None:
                functions.load_gradients(x, dx, b, h, q, kv, seq_q, seq_kv, aux, daux, 0)
        if functions.mask is not None:
            visible = functions.mask(b, h, q, kv, seq_q, seq_kv, aux)
            ct.scatter(mask, (b, h, q, kv), ct.where(visible, ct.full((TILE, TILE), 1.0, ct.float32), 0.0))

    return modify_tiles


def tile_aux(printed):
    given = zip(printed.lowered.fields, values(printed.lowered, printed.bound, SCALE), strict=True)
    return tuple(
        it.detach().reshape(it.shape or (1,)) if field.kind == "pointer" else it
        for field, it in given
        if field.kind in ("f32", "pointer")
    )


def tile_daux(printed):
    slots = sorted({it.load.value for it in printed.lowered.gradients_of(printed.slots)})
    return tuple(printed.dtensors[slot].view(printed.dtensors[slot].shape or (1,)) for slot in slots)


# ---------------------------------------------------------------- CUDA

TENSORS = """
struct Tensors {
  const float *raw, *dscore;
  float *score, *dscores, *again, *mask;
  int batch, heads, seq_q, seq_kv, tile;
};
struct None { int nothing; };
"""
LOOP = """
extern "C" __global__ void modify_NAME(const Tensors t, const multiattn::NAME::Aux aux,
                                [[maybe_unused]] const OF_LOADS loads) {
  for (int b = 0; b < t.batch; ++b)
    for (int h = 0; h < t.heads; ++h) {
      [[maybe_unused]] float sums[8] = {};
      for (int q = 0; q < t.tile; ++q)
        for (int kv = 0; kv < t.tile; ++kv) {
          const long at = ((b * t.heads + h) * t.tile + q) * t.tile + kv;
          STATEMENTS
        }
      AT_END
    }
}
"""
PLACE = "b, h, q, kv, t.seq_q, t.seq_kv, aux"
SCORE = f"""t.score[at] = multiattn::NAME::score(t.raw[at], {PLACE});
          float slope = 0.0f;
          t.again[at] = multiattn::NAME::score_and_slope(t.raw[at], {PLACE}, slope);
          t.dscores[at] = t.dscore[at] * slope;
          """
MASK = f"t.mask[at] = multiattn::NAME::mask({PLACE});"
GRADIENTS = f"multiattn::NAME::load_gradients(t.raw[at], t.dscore[at], {PLACE}, loads, sums);"
AT_END = "multiattn::NAME::add_sums(b, h, aux, loads, sums);"


def loop_over(name, text):
    """The struct, and a kernel that runs all of its functions over a tile of each head."""
    has_gradients = "load_gradients" in text
    statements = SCORE * ("float score(" in text) + MASK * ("bool mask(" in text) + GRADIENTS * has_gradients
    parts = {
        "OF_LOADS": "multiattn::NAME::Gradients" if has_gradients else "None",
        "STATEMENTS": statements,
        "AT_END": AT_END if has_gradients else "",
        "NAME": name,
    }
    loop = LOOP
    for word, part in parts.items():
        loop = loop.replace(word, part)
    return text + loop


# ---------------------------------------------------------------- compiled, for a GPU that is not here

COMPILED = [
    case
    for case in PROGRAMS
    if case.name in ("composite", "full_bias", "bucketed_bias", "document_window", "transfusion")
]


def approximate(**options):
    return lower(bind_score(device=CPU, **options).program, approximate=True)


def compile_triton(kernel, args, constants, is_gluon):
    """PTX for sm90, by the steps of Triton's own JIT."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        options, signature, constexprs, attributes = kernel._pack_args(backend, {}, *bind(*args, **constants)[:2], None)
        source = (GluonASTSource if is_gluon else ASTSource)(kernel, signature, constexprs, attributes)
        return triton.compile(source, target=target, options=options.__dict__).asm["ptx"]


def stand_in(value):
    from triton.runtime.jit import MockTensor

    return MockTensor(value.dtype, value.shape) if isinstance(value, torch.Tensor) else value


@gluon.jit
def modify_gluon(raw, score, dtensors, aux, daux, heads, seq_q, seq_kv, FUNCTIONS: gl.constexpr, TILE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    b, h = gl.program_id(0) // heads, gl.program_id(0) % heads
    q = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, layout)), 1)
    kv = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, layout)), 0)
    at = gl.program_id(0) * TILE * TILE + q * TILE + kv
    x = gl.load(raw + at)
    if FUNCTIONS.score is not None:
        s, slope = FUNCTIONS.score_and_slope(x, b, h, q, kv, seq_q, seq_kv, aux)
        gl.store(score + at, FUNCTIONS.score(x, b, h, q, kv, seq_q, seq_kv, aux) + s * slope)
        if FUNCTIONS.load_gradients is not None:
            FUNCTIONS.load_gradients(x, s, b, h, q, kv, seq_q, seq_kv, aux, daux, 0)
    if FUNCTIONS.mask is not None:
        gl.store(score + at, gl.where(FUNCTIONS.mask(b, h, q, kv, seq_q, seq_kv, aux), x, float("-inf")))


@pytest.mark.parametrize("language", ["triton", "gluon"])
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_triton_and_gluon_compile(case, language):
    from multiattn.triton.score import functions_of

    printed = Printed(case)
    functions = functions_of(printed.lowered, printed.slots, gluon=language == "gluon")
    aux = tuple(map(stand_in, values(printed.lowered, printed.bound, SCALE)))
    daux = tuple(map(stand_in, printed.gradient_values()))
    fp32 = stand_in(torch.empty(16))
    sizes = (SIZES.heads, SIZES.seq_q, SIZES.seq_kv)
    if language == "gluon":
        ptx = compile_triton(
            modify_gluon, (fp32, fp32, fp32, aux, daux, *sizes), {"FUNCTIONS": functions, "TILE": TILE}, True
        )
    else:
        constants = {"FUNCTIONS": functions, "TILE": TILE}
        ptx = compile_triton(modify, (*(fp32,) * 6, aux, daux, *sizes), constants, False)
    added = [it for it in printed.lowered.gradients_of(printed.slots) if not it.is_exclusive]
    assert bool(re.search(r"\b(atom|red)\.global", ptx)) == bool(added)


def test_approximate_tanh_is_the_gpus_own():
    from multiattn.cuda.compile import make_ptx
    from multiattn.cuda.score import text_of
    from multiattn.triton.score import functions_of

    lowered = approximate(softcap=20.0)
    fp32 = stand_in(torch.empty(16))
    constants = {"FUNCTIONS": functions_of(lowered), "TILE": TILE}
    ptx = compile_triton(modify, (*(fp32,) * 6, (0.1, 2.0), (), 2, 20, 28), constants, False)
    assert "tanh.approx.f32" in ptx
    name, text = text_of(lowered)
    kernel = (
        f'{text}\nextern "C" __global__ void f(float* x, const multiattn::{name}::Aux aux)'
        f"{{ *x = multiattn::{name}::score(*x, 0, 0, 0, 0, 1, 1, aux); }}\n"
    )
    ptx = make_ptx(kernel, "sm_90")
    assert "tanh.approx.f32" in ptx.decode()
    assert "ex2" not in ptx.decode()


def rounded_by_themselves(s, b, h, q, kv):
    return torch.where((q * 0.7 + 0.3).floor() * (kv / 41).floor() < (q + 0.5).sqrt() % 3.3, s, 0.0)


@pytest.mark.parametrize("language", ["triton", "gluon", "cuda"])
def test_what_decides_is_rounded_by_itself_in_machine_code(language):
    from multiattn.cuda.compile import make_ptx
    from multiattn.cuda.score import text_of
    from multiattn.triton.score import functions_of

    lowered = approximate(score_mod=rounded_by_themselves)
    fp32 = stand_in(torch.empty(16))
    if language == "cuda":
        name, text = text_of(lowered)
        kernel = (
            f'{text}\nextern "C" __global__ void f(float* x, int* n, const multiattn::{name}::Aux aux)'
            f"{{ *x = multiattn::{name}::score(*x, 0, 0, n[0], n[1], 1, 1, aux); }}\n"
        )
        ptx = make_ptx(kernel, "sm_90").decode()
    else:
        functions = functions_of(lowered, gluon=language == "gluon")
        sizes = (SIZES.heads, SIZES.seq_q, SIZES.seq_kv)
        aux = tuple(map(stand_in, values(lowered, bind_score(device=CPU, score_mod=rounded_by_themselves), SCALE)))
        if language == "gluon":
            constants = {"FUNCTIONS": functions, "TILE": TILE}
            ptx = compile_triton(modify_gluon, (fp32, fp32, fp32, aux, (), *sizes), constants, True)
        else:
            constants = {"FUNCTIONS": functions, "TILE": TILE}
            ptx = compile_triton(modify, (*(fp32,) * 6, aux, (), *sizes), constants, False)
    assert {"mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= set(re.findall(r"(?:mul|div|sqrt)\.[\w.]+", ptx))
    assert "div.full" not in ptx
    assert "sqrt.approx" not in ptx


def test_two_programs_never_share_a_name_in_tritons_cache():
    """Its key has a function of a constant by module and name alone."""
    from multiattn.triton.score import functions_of

    names = set()
    for number in (2.0, 3.0):
        lowered = lower(bind_score(device=CPU, score_mod=lambda s, b, h, q, kv, n=number: s * n * q).program)
        names.add(functions_of(lowered).score.fn.__name__)
        assert functions_of(lowered).score.fn.__name__ in functions_of(lowered).score.src
    assert len(names) == 2


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_cutile_compiles(case):
    from cuda.tile.compilation import (
        ArrayConstraint,
        CallingConvention,
        KernelSignature,
        ScalarConstraint,
        TupleConstraint,
        export_kernel,
    )  # fmt: skip

    from multiattn.cutile.compile import _DTYPES
    from multiattn.cutile.score import functions_of

    def array(tensor):
        dtypes = {**_DTYPES, torch.int32: ct.int32, torch.int64: ct.int64, torch.bool: ct.bool_}
        return ArrayConstraint(
            dtypes[tensor.dtype], tensor.dim(), index_dtype=ct.int64, stride_lower_bound_incl=0, alias_groups=(),
            may_alias_internally=False,
        )  # fmt: skip

    printed = Printed(case)
    kernel = tile_kernel(functions_of(printed.lowered, printed.slots))
    aux = [array(it) if isinstance(it, torch.Tensor) else ScalarConstraint(ct.float32) for it in tile_aux(printed)]
    daux = [array(it) for it in tile_daux(printed)]
    parameters = [
        *[array(printed.raw)] * 6,
        TupleConstraint(aux),
        TupleConstraint(daux),
        *[ScalarConstraint(ct.int32)] * 2,
    ]
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2()).with_mangled_symbol("modify")
    code = io.BytesIO()
    export_kernel(kernel, [signature], code, gpu_code="sm_90", output_format="cubin")
    assert code.getbuffer().nbytes > 1000


def test_cuda_compiles_on_every_arch():
    from multiattn.cuda.compile import _compile
    from multiattn.cuda.score import text_of

    made = [text_of(it.lowered, it.slots) for it in map(Printed, PROGRAMS)]
    loops = [loop_over(name, text) for name, text in dict(made).items()]
    for target in ("sm_80", "sm_90a"):
        assert _compile(TENSORS + "\n".join(loops), target)
