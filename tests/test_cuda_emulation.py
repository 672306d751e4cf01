"""The emulation of a thread block: rounding, votes, and every mistake it promises to find.

tests/test_cuda_layout.py has ldmatrix, mma and bank conflicts.
"""

from __future__ import annotations

import ctypes
import math
import re
from pathlib import Path

import pytest
import torch
from cuda_runs import on_cpu

from multiattn.cuda.cpu import host

pytestmark = on_cpu

KERNELS = Path(__file__).parent / "cuda_units" / "verbs.cpp"
MISTAKE = r'^MISTAKE_OF\((\d+), (\w+), "(.*)"\) \{'


class Arguments(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("c", ctypes.c_void_p))


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(KERNELS.read_text()))


def run(library, kernel, *, b=None, threads=32):
    a, c = torch.zeros(512, dtype=torch.float16), torch.full((128,), math.nan)
    arguments = Arguments(a.data_ptr(), 0 if b is None else b.data_ptr(), c.data_ptr())
    host.run(library, kernel, arguments, blocks=1, threads=threads, smem_bytes=1024)
    return c


def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite(library):
    values = torch.tensor(
        [0.0, -0.0, 1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2**-24,
         2.0**-14 - 2.0**-26, -3.14159, 1e-30, 3.3e38, math.inf, -math.inf, 1e38, 1 + 2**-8, 1 + 3 * 2**-9,
         6.1e-5, 0.1, 1 / 3, -2.5e-7, 12345.678, -1e-8, 5e-8, 100.0, 1000.0, 2049.0, 2051.0, 0.5]
    )  # fmt: skip
    c = run(library, "round_floats", b=values)
    rounded = c[:64].to(torch.int64)
    for half, dtype in ((rounded[:32], torch.float16), (rounded[32:], torch.bfloat16)):
        assert torch.equal(half, values.to(dtype).view(torch.int16).to(torch.int64) & 0xFFFF)


def test_votes_and_shuffles(library):
    c = run(library, "vote", threads=64)
    expected = torch.arange(64) ^ 3
    expected[32:] += 100
    assert torch.equal(c[:64], expected.float())


@pytest.mark.parametrize(("threads", "kernel", "error"), re.findall(MISTAKE, KERNELS.read_text(), re.MULTILINE))
def test_a_mistake_is_an_error_that_says_where(library, kernel, threads, error):
    with pytest.raises(host.EmulationError, match=rf"{kernel}: block 0, thread \d+: ") as raised:
        run(library, kernel, threads=int(threads))
    assert error in str(raised.value)
    run(library, "nothing", threads=int(threads))  # and nothing is broken by it


def test_shared_memory_starts_as_nan(library):
    c = run(library, "read_unwritten")
    assert c[:32].isnan().all()


def test_what_does_not_compile_is_an_error_with_the_compilers_words():
    with pytest.raises(host.BuildError, match="no_such_verb"):
        host.build_source('#include "multiattn/ptx.cuh"\nint x = no_such_verb();\n')
