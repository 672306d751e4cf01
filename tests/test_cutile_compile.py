"""The cuTile kernel through tileiras, for every arch, with no GPU."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from multiattn import Problem
from multiattn.cutile.forward import FAMILY
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan

pytest.importorskip("cuda.tile")

from cuda.tile._cext import default_tile_context

from multiattn.cutile import compile
from multiattn.cutile.families import launches_of
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")


def make(*, arch="sm90", config=None, **sizes):
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 2, "seq_q": 256, "head_dim": 64, **sizes})
    return make_plan(BACKEND, problem, ARCHS[arch], config=config, probe=False)


needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)

needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")

LAZY_64X64 = FAMILY.config(tile_m=64, tile_n=64, blocks_per_sm=2, lazy_max=True)
ONLINE_64X128 = FAMILY.config(tile_m=64, tile_n=128, blocks_per_sm=2)


def instructions(plan):
    return disassemble(BACKEND.forward.export(plan, ())[0].cubin)


@needs_compiler
@needs_cuobjdump
def test_hopper_uses_its_tensor_cores_and_tma_at_an_odd_head_dim():
    sass = instructions(make(head_dim=40))
    assert "HGMMA" in sass
    assert "UTMALDG" in sass


@needs_compiler
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


@needs_compiler
@needs_cuobjdump
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_no_product_waits_for_the_one_before(dtype):
    """With a mask of the last keys ptxas makes each do so in 128x128 tiles of two parts at D=88."""
    names = re.findall(r"HGMMA|WARPGROUP\.DEPBAR", instructions(make(head_dim=88, seq_q=3000, dtype=dtype)))
    assert 0 < 2 * names.count("WARPGROUP.DEPBAR") < names.count("HGMMA")


@needs_compiler
@needs_cuobjdump
def test_ampere_loads_an_odd_head_dim_asynchronously():
    assert "LDGSTS" in instructions(make(arch="sm80", head_dim=40))


@needs_compiler
@needs_cuobjdump
def test_what_is_done_again_costs_the_loops_no_block_of_keys_in_flight():
    """Beside the queries five blocks of keys and values fit; for want of 4 KB it once was three or four."""
    config = FAMILY.config(tile_m=128, tile_n=64, warps=8, lazy_max=True, pipeline="pairs")
    (compiled,) = BACKEND.forward.export(make(head_dim=256, seq_q=4096, causal=True, config=config), ())
    row = 256 * 2  # bytes
    assert read_entry(compiled.cubin, compiled.kernel).smem_bytes >= (128 + 5 * 64) * row


@needs_compiler
def test_tileiras_compiles_the_kernels_of_a_launch_at_one_time(monkeypatch):
    """Each waits for the other, although cuTile's lock is of all compilation."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=16)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant="two_pass", probe=False)
    known, together = compile.private.compile_cubin, threading.Barrier(2, timeout=60)

    def compile_cubin(*args, **options):
        together.wait()
        return known(*args, **options)

    monkeypatch.setattr(compile.private, "compile_cubin", compile_cubin)
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    cubins = compile.make_cubins(launches_of(plan), plan.arch)
    assert [cubin[:4] for cubin in cubins] == [b"\x7fELF"] * 2
    assert compile.private.compile_cubin is compile_cubin


@needs_compiler
def test_the_longest_kernel_is_traced_first(monkeypatch):
    """All else of a launch is done before it is compiled."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=16)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant="atomic", probe=False)
    launches, traced = launches_of(plan), []
    monkeypatch.setattr(compile, "_make_cubin", lambda launch, arch: traced.append(launch.kernel) or launch.kernel)
    assert compile.make_cubins(launches, plan.arch) == [it.kernel for it in launches]
    assert traced[0] == "all_grads" != launches[0].kernel
    assert compile.make_cubins([], plan.arch) == []


def test_compilations_that_overlap_share_the_limit_and_leave_none(monkeypatch):
    """CuTile has one limit for the process, and one lock: whoever ends last puts both back."""
    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", raising=False)
    config, known = default_tile_context.config, compile.private.compile_cubin
    before, first, second = config.compiler_timeout_sec, compile._Compiling(), threading.Event()
    inside = threading.Event()

    def overlap():
        with first:
            inside.set()
            assert second.wait(60)
            assert config.compiler_timeout_sec == compile.COMPILE_SECONDS

    with ThreadPoolExecutor(1) as thread:
        with first:
            other = thread.submit(overlap)
            assert inside.wait(60)
        assert config.compiler_timeout_sec == compile.COMPILE_SECONDS
        assert compile.private.compile_cubin is not known
        second.set()
        other.result()
    assert (config.compiler_timeout_sec, compile.private.compile_cubin) == (before, known)


def test_an_export_shares_the_limit_of_what_is_compiled_beside_it(monkeypatch):
    """Else it put back a limit that was not there when it began, after the others had ended: for ever."""
    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", raising=False)
    config = default_tile_context.config
    before, beside = config.compiler_timeout_sec, ExitStack()

    def export(*_, **__):
        beside.close()  # the others end while it is under way
        assert config.compiler_timeout_sec == compile.COMPILE_SECONDS
        raise RuntimeError("far enough")

    monkeypatch.setattr(compile, "export_kernel", export)
    beside.enter_context(compile.compiling)
    with pytest.raises(RuntimeError, match="far enough"):
        compile.compile_with_remarks(None, None, ARCHS["sm90"])
    assert config.compiler_timeout_sec == before


def test_a_fork_waits_for_compilations(monkeypatch):
    compiling, order = compile._Compiling(), []

    def fork():
        compiling.acquire()  # as `hold_across_fork` does it
        order.append("fork")
        compiling.release()

    with ThreadPoolExecutor(1) as thread:
        with compiling, compiling:
            forking = thread.submit(fork)
            time.sleep(0.05)
            order.append("compiled")
        forking.result()
    assert order == ["compiled", "fork"]
