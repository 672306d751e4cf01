"""cuTile's kernels through tileiras with no GPU: their code, what they take of a launch, and how they are launched."""

import platform
import re
import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace

import driver_fakes
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn import Problem
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import FAMILY
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.schedule import most_multiprocessors
from multiattn.problem import problem_of
from multiattn.sequences import Batching
from multiattn.varlen import Lengths, packed_call

pytest.importorskip("cuda.tile")

from cuda.tile._cext import default_tile_context

from multiattn.cutile import bind, compile
from multiattn.cutile import launch as launching
from multiattn.cutile.claims import read_claims, tile_ir
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")
SM90 = ARCHS["sm90"]
pytestmark = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)


def plain(**sizes):
    return Problem.contiguous(**{"batch": 1, "heads_q": 2, "seq_q": 256, "head_dim": 64, **sizes})


def make(*, arch="sm90", config=None, **sizes):
    return make_plan(BACKEND, plain(**sizes), ARCHS[arch], config=config, probe=False)


needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")

LAZY_64X64 = FAMILY.config(tile_m=64, tile_n=64, blocks_per_sm=2, lazy_max=True)
ONLINE_64X128 = FAMILY.config(tile_m=64, tile_n=128, blocks_per_sm=2)


def instructions(plan):
    return disassemble(BACKEND.forward.export(plan, ())[0].cubin)


@needs_cuobjdump
def test_hopper_uses_its_tensor_cores_and_tma_at_an_odd_head_dim():
    sass = instructions(make(head_dim=40))
    assert "HGMMA" in sass
    assert "UTMALDG" in sass


@needs_cuobjdump
@pytest.mark.parametrize(
    ("q_in_registers", "config"),
    [
        pytest.param(False, LAZY_64X64, id="memory-lazy"),
        pytest.param(False, ONLINE_64X128, id="memory-online", marks=pytest.mark.nightly),
        pytest.param(True, LAZY_64X64, id="registers-lazy", marks=pytest.mark.nightly),
        pytest.param(True, ONLINE_64X128, id="registers-online"),
    ],
)
def test_products_with_keys_take_queries_from_where_they_are_asked_to(q_in_registers, config):
    plan = make(head_dim=128, causal=True, config=replace(config, q_in_registers=q_in_registers))
    products = re.findall(r"HGMMA\.\S+ R\d+, (\w+)", instructions(plan))
    assert {"R"} | ({"gdesc"} if not q_in_registers else set()) == {it.rstrip("0123456789") for it in products}


@needs_cuobjdump
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_no_product_waits_for_the_one_before(dtype):
    """With a mask of the last keys ptxas makes each do so in 128x128 tiles of two parts at D=88."""
    names = re.findall(r"HGMMA|WARPGROUP\.DEPBAR", instructions(make(head_dim=88, seq_q=3000, dtype=dtype)))
    assert 0 < 2 * names.count("WARPGROUP.DEPBAR") < names.count("HGMMA")


@needs_cuobjdump
def test_ampere_loads_an_odd_head_dim_asynchronously():
    assert "LDGSTS" in instructions(make(arch="sm80", head_dim=40))


@needs_cuobjdump
def test_what_is_done_again_costs_the_loops_no_block_of_keys_in_flight():
    """Beside the queries five blocks of keys and values fit; for want of 4 KB it once was three or four."""
    config = FAMILY.config(tile_m=128, tile_n=64, warps=8, lazy_max=True, pipeline="pairs")
    (compiled,) = BACKEND.forward.export(make(head_dim=256, seq_q=4096, causal=True, config=config), ())
    row = 256 * 2  # bytes
    assert read_entry(compiled.cubin, compiled.kernel).smem_bytes >= (128 + 5 * 64) * row


@needs_cuobjdump
def test_hopper_adds_to_dq_by_tma_and_keeps_p_in_registers():
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=4096, head_dim=64)
    plan = make_plan(BACKEND, problem, SM90, direction="backward", variant="atomic", probe=False)
    compiled = BACKEND.backward.export(plan, ())
    for one, name in zip(compiled, ("row_deltas", "all_grads", "round_query_grads"), strict=True):
        assert one.kernel.startswith(name)
        assert read_entry(one.cubin, one.kernel).stack_bytes == 0
    text = disassemble(compiled[1].cubin)
    assert "UTMAREDG" in text
    assert re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", text)  # the left operand in registers: p^T, ds^T


def cached(page=None, *, splits, seq_kv=8192):
    """A plan for a step over a cache that is divided into parts."""
    room = 0 if page is None else seq_kv // page
    cache = Batching.cached(8, 8 if page is None else 3 * room, page, room, splits=splits)
    return make(batch=8, heads_q=32, heads_kv=8, seq_q=1, seq_kv=seq_kv, head_dim=128, batching=cache)


@needs_cuobjdump
@pytest.mark.parametrize(
    ("page", "load"),
    [
        pytest.param(None, "UTMALDG.4D", marks=pytest.mark.nightly),
        (16, "UTMALDG.4D"),  # of pages smaller than a block, as only these are several boxes
        pytest.param(64, "UTMALDG.4D", marks=pytest.mark.nightly),
        (5, "LDGSTS.E.BYPASS.128"),
    ],
)
def test_hopper_loads_keys_asynchronously(page, load):
    """By TMA, also of pages smaller than a block, else in vectors; and a warp's registers hold all."""
    plan = cached(page, splits=4, seq_kv=960)
    first, second = BACKEND.forward.export(plan, ())
    sass = disassemble(first.cubin)
    assert load in sass
    assert "PREEXIT" in sass
    assert "ACQBULK" in disassemble(second.cubin)
    assert first.binding is second.binding is None, "the loader of exported kernels launches one of them"
    assert read_entry(first.cubin, first.kernel).smem_bytes * plan.config.blocks_per_sm <= 227 * 1024


@needs_cuobjdump
@pytest.mark.parametrize("splits", [pytest.param(2, marks=pytest.mark.nightly), 16])
def test_no_thread_needs_another_to_merge_few_parts(splits):
    """As tiles of all parts they had 255 registers, and what was left of them was in local memory."""
    _, merge = BACKEND.forward.export(cached(splits=splits), ())
    sass = disassemble(merge.cubin)
    assert "LDG.E.128" in sass or "LDG.E.64" in sass
    assert not any(it in sass for it in ("SHFL", "STL", "LDL"))


def test_tileiras_compiles_the_kernels_of_a_launch_at_one_time(monkeypatch):
    """Each waits for the other, although cuTile's lock is of all compilation."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=16)
    plan = make_plan(BACKEND, problem, SM90, direction="backward", variant="two_pass", probe=False)
    known, together = compile.private.compile_cubin, threading.Barrier(2, timeout=60)

    def compile_cubin(*args, **options):
        together.wait()
        return known(*args, **options)

    monkeypatch.setattr(compile.private, "compile_cubin", compile_cubin)
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    cubins = compile.make_cubins(launches_of(plan), plan.arch)
    assert [cubin[:4] for cubin in cubins] == [b"\x7fELF"] * 2
    assert compile.private.compile_cubin is compile_cubin


def test_the_longest_kernel_is_traced_first(monkeypatch):
    """All else of a launch is done before it is compiled."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=16)
    plan = make_plan(BACKEND, problem, SM90, direction="backward", variant="atomic", probe=False)
    launches, traced = launches_of(plan), []
    monkeypatch.setattr(compile, "_make_cubin", lambda launch, arch: traced.append(launch.kernel) or launch.kernel)
    assert compile.make_cubins(launches, plan.arch) == [it.kernel for it in launches]
    assert traced[0] == "all_grads" != launches[0].kernel
    assert compile.make_cubins([], plan.arch) == []


# ---------------------------------------------------------------- code of rarer problems takes what is bound for it


SEQ_Q, SEQ_KV = 49, 83
MANY = {"batch": 64, "heads_q": 64, "seq_q": 65536}
"""More than 2^31 elements."""
TABLE = torch.randn(40, 2).requires_grad_()
BIAS = torch.randn(2, 2, SEQ_Q, SEQ_KV).requires_grad_()
DOCUMENTS = torch.arange(SEQ_KV) // 9
BLOCKS = create_block_mask(
    lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv], None, None, SEQ_Q, SEQ_KV, device="cpu", BLOCK_SIZE=128
)


def scored(head_dim=16, **score):
    q, k = (torch.empty(2, 2, length, head_dim, dtype=torch.bfloat16) for length in (SEQ_Q, SEQ_KV))
    named = dict.fromkeys(("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")) | score
    return problem_of(*with_score(Operands(q, k, k), Options(None, None, 0.3), **named))


def packed_blocks(head_dim, **options):
    """Two sequences, of which neither begins nor ends with a block."""
    q, k = (torch.empty(length, 2, head_dim, dtype=torch.bfloat16) for length in (SEQ_Q, SEQ_KV))
    starts = (torch.tensor([0, 20, length], dtype=torch.int32) for length in (SEQ_Q, SEQ_KV))
    return problem_of(*packed_call(q, k, k, {"block_mask": BLOCKS, **options}, Lengths(*starts, SEQ_Q, SEQ_KV)))


def relative(s, b, h, q, kv):
    """An index that is computed, and clamped by the table's ends."""
    return s + TABLE[q - kv + 20, h]


ROWS = {
    "many, sinks": ("forward", "full", lambda: plain(has_sinks=True, causal=True, batch=2**17)),
    "many, a window": ("forward", "full", lambda: plain(window=(300, 20), **MANY)),
    "many, a window, gradients": ("backward", "two_pass", lambda: plain(window=(300, 20), **MANY)),
    "sinks, a negative scale": ("forward", "full", lambda: plain(has_sinks=True, causal=True, scale=-1.0, head_dim=40)),
    "a scale of zero": ("forward", "full", lambda: plain(seq_q=100, scale=0.0, head_dim=16)),
    "many, ragged": (
        "backward", "two_pass",
        lambda: plain(head_dim=40, causal=True, scale=0.0, seq_kv=129, **MANY | {"seq_q": 65537}),
    ),
    "blocks": ("forward", "full", lambda: scored(64, block_mask=BLOCKS)),
    "blocks, gradients": ("backward", "two_pass", lambda: scored(128, block_mask=BLOCKS)),
    "packed blocks": ("forward", "full", lambda: packed_blocks(64)),
    "packed blocks, gradients": ("backward", "atomic", lambda: packed_blocks(128, causal=True)),
    "gradients of a table": ("backward", "atomic", lambda: scored(score_mod=relative)),
    "gradients of a bias": ("backward", "two_pass", lambda: scored(bias=BIAS)),
    "gradients of a wide bias": ("backward", "atomic", lambda: scored(64, bias=BIAS)),
}  # fmt: skip
AT_NIGHT = {
    "many, a window", "many, a window, gradients", "blocks, gradients", "packed blocks, gradients",
    "gradients of a wide bias",
}  # fmt: skip
"""Others have their arguments, one at a time."""


@pytest.mark.parametrize("name", [pytest.param(it, marks=pytest.mark.nightly if it in AT_NIGHT else ()) for it in ROWS])
def test_what_is_compiled_takes_what_is_bound(name):
    direction, variant, make = ROWS[name]
    plan = make_plan(BACKEND, make(), SM90, direction=direction, variant=variant, probe=False)
    launches = launches_of(plan)
    for launch, made in zip(launches, BACKEND.op(direction).export(plan, ()), strict=True):
        bind.bind_proven(launch, tile_ir(made.cubin), read_entry(made.cubin, made.kernel))
        assert launch.is_64bit == ("many" in name)


def test_packed_batches_of_other_lengths_take_the_same_code():
    """Its claims are read once."""
    problem = plain(seq_q=600, batching=Batching.packed(5))
    plan = make_plan(BACKEND, problem, SM90, direction="backward", variant="atomic", probe=False)
    exported, read = BACKEND.backward.export(plan, ()), None
    for sizes in ({}, {"seq_q": 904, "seq_kv": 1208}):
        for launch, made in zip(launches_of(replace(plan, problem=replace(problem, **sizes))), exported, strict=True):
            bind.bind_proven(launch, tile_ir(made.cubin), read_entry(made.cubin, made.kernel))
        read = read or read_claims.cache_info().misses
    assert read_claims.cache_info().misses == read


@pytest.mark.parametrize("batch", [2, pytest.param(2**24, marks=pytest.mark.nightly)])
def test_what_is_not_what_was_compiled_is_found(batch):
    """Captured tensors of every type, in 32 bits and in 64: types, and the strides that gathers take."""
    table, rows = torch.zeros(3, SEQ_KV, dtype=torch.uint8).T, torch.linspace(-3, 300, SEQ_Q)
    seen, documents = torch.ones(SEQ_KV, 4, dtype=torch.bool), torch.zeros(SEQ_KV, dtype=torch.int64)

    def score_mod(s, b, h, q, kv):
        return torch.where(seen[kv, h], s + table[kv, b], documents[q - kv] * rows[q])

    problem = scored(64, softcap=3.0, alibi_slopes=torch.ones(2), bias=BIAS.detach(), score_mod=score_mod)
    plan = make_plan(BACKEND, replace(problem, batch=batch), SM90, probe=False)
    (exported,) = BACKEND.forward.export(plan, ("tileir",))
    binding, text = exported.binding, exported.texts["tileir"].decode()
    assert {it.kind for it in binding.arguments[1:3]} == {"i32" if batch == 2 else "i64"}
    bind.prove(binding, text)
    places = {it.tensor: place for place, it in enumerate(binding.arguments) if isinstance(it, abi.Pointer)}
    for tensor, rank in (("captured1", 4), ("captured2", 2)):
        one = places[tensor] + rank + 1  # its first stride: taken for its second
        swapped = re.sub(rf"%arg({one}|{one + 1})\b", lambda it, both=2 * one + 1: f"%arg{both - int(it[1])}", text)
        with pytest.raises(ValueError, match=f"arrays: argument {one} is .*arg{one + 1} there"):
            bind.prove(binding, swapped)
    with pytest.raises(ValueError, match="parameters: got"):
        bind.prove(replace(binding, constants=binding.constants | {"captured2_dtype": "float64"}), text)
    arguments = [abi.Pointer(tensor="q") if it == abi.Pointer(tensor="captured1") else it for it in binding.arguments]
    with pytest.raises(ValueError, match="got"):
        bind.prove(replace(binding, arguments=tuple(arguments)), text)


# ---------------------------------------------------------------- launched by the driver, or else by cuTile itself


def plan_of(**sizes):
    return make(**{"seq_q": 128, "head_dim": 32, **sizes})


@pytest.fixture
def driver(monkeypatch):
    """A driver of a process that has compiled nothing and launches by cuTile into `by_cutile`."""
    fake = driver_fakes.FakeDriver()
    fake.by_cutile = []
    monkeypatch.setattr(launching, "_known", {})
    monkeypatch.setattr(launching, "_ahead", {})
    monkeypatch.setattr("multiattn.run.launch._warned", set())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    device = SimpleNamespace(multi_processor_count=most_multiprocessors(SM90))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr("cuda.tile.launch", lambda stream, grid, kernel, args: fake.by_cutile.append((grid, args)))
    return driver_fakes.install(monkeypatch, fake)


@pytest.fixture
def compiled(monkeypatch):
    """Compilations: (signature, the limit of time)."""
    seen, export_kernel = [], compile.export_kernel

    def export(kernel, signatures, *arguments, **options):
        seen.append((signatures[0].symbol, default_tile_context.config.compiler_timeout_sec))
        export_kernel(kernel, signatures, *arguments, **options)

    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", raising=False)
    monkeypatch.setattr(compile, "export_kernel", export)
    return seen


@pytest.mark.parametrize(
    ("direction", "variant"), [("forward", "full"), ("backward", "atomic"), ("backward", "two_pass")]
)
def test_the_driver_is_handed_every_tensor_of_each_kernel(driver, compiled, direction, variant):
    """With and without dlse, the kernel of which is compiled when it comes."""
    given, problem = driver_fakes.asked(direction)
    plan = make_plan(BACKEND, problem, SM90, direction=direction, variant=variant, probe=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch = BACKEND.op(direction).prepare(plan)
        count = len(compiled)
        for dlse in (None, given.lse.clone() if direction == "backward" else None):
            bindings = [it.binding for it in launches_of(plan, has_dlse=dlse is not None)]
            driver_fakes.check_run(driver, launch, bindings, given._replace(dlse=dlse))
    assert {limit for _, limit in compiled} == {120.0}
    assert len(compiled) == len(driver.loaded) == count + (direction == "backward")
    assert driver.by_cutile == []
    assert {(it.block, it.smem_bytes) for it in driver.launched} == {((1, 1, 1), 0)}


def test_plans_with_one_signature_share_code(driver, compiled):
    launchers = [BACKEND.forward.prepare(plan_of(**sizes)) for sizes in ({}, {"seq_q": 256}, {"batch": 3}, {})]
    assert len(compiled) == len(driver.loaded) == 1
    assert len({launcher.kernels[0].function for launcher in launchers}) == 1
    BACKEND.forward.prepare(plan_of(causal=True))
    assert len(compiled) == len(driver.loaded) == 2


def test_what_was_compiled_ahead_is_loaded_and_kept_no_longer(driver, compiled):
    for _ in range(2):
        BACKEND.forward.compile_ahead(plan_of())
    assert (len(compiled), len(driver.loaded), len(launching._ahead)) == (1, 0, 1)
    launchers = [BACKEND.forward.prepare(plan_of(**sizes)) for sizes in ({}, {"seq_q": 256})]
    assert (len(compiled), len(driver.loaded), launching._ahead) == (1, 1, {})
    assert len({launcher.kernels[0].function for launcher in launchers}) == 1


def test_a_compiler_that_takes_too_long_is_an_error(driver, monkeypatch):
    def export(*arguments, **options):
        raise TimeoutError("too long")

    monkeypatch.setattr(compile, "export_kernel", export)
    with pytest.raises(TimeoutError, match="too long"):
        BACKEND.forward.prepare(plan_of())
    assert driver.by_cutile == []


def test_another_machine_is_left_to_cutile(driver, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    given, problem = driver_fakes.asked("forward")
    plan = make_plan(BACKEND, problem, SM90, probe=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch = BACKEND.forward.prepare(plan)
    launch(given)
    ((grid, args),) = driver.by_cutile
    assert grid == bind.bind(plan).grid
    assert (args[0].shape, driver.launched) == (given.q.shape, [])


def test_a_release_that_is_not_known_is_left_to_cutile_and_says_so_once(driver, monkeypatch):
    def nothing(cubin):
        raise ValueError("cubin: got 0 sections .nv.tileir.debug_txt; allowed one")

    monkeypatch.setattr("multiattn.cutile.launch.tile_ir", nothing)
    given, problem = driver_fakes.asked("forward")
    plan = make_plan(BACKEND, problem, SM90, probe=False)
    with pytest.warns(RuntimeWarning, match="got 0 sections .*; ct.launch is used"):
        launch = BACKEND.forward.prepare(plan)
    launch(given)
    assert (len(driver.by_cutile), driver.launched) == (1, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BACKEND.forward.prepare(plan)
