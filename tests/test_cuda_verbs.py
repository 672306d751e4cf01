"""The verbs of sm90 as the GPU has them: what NVRTC makes of each, without a GPU."""

from __future__ import annotations

import pytest
from cuda_runs import with_nvrtc

from multiattn.cuda.source import _wgmma

pytestmark = with_nvrtc

COLUMNS = 40
KERNEL = """
#include "multiattn/wgmma.cuh"
{wgmma}
using namespace multiattn;
struct Arguments {{
  float* floats;
  int32* counter;
  uint64 a, b;
}};
KERNEL(128, 1) verb(PARAMETERS(Arguments) arguments) {{
  {body}
}}
"""
MULTIPLY = """
  float d[{columns} / 2] = {{}};
  wgmma_fence();
  {verb}<{kind}, {columns}>(d, arguments.a, arguments.b, true);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < {columns} / 2; ++i) store_global_4_if(true, arguments.floats + i, d[i]);
"""
LINES = {
    "bulk_load": (
        "bulk_load(1024, arguments.floats, 512, 64);",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [",
    ),
    "bulk_add": (
        "bulk_add(arguments.floats, 1024, 512); tma_store_commit(); tma_store_wait_read<0>();",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [",
    ),
    "ordered_add_global": (
        "arguments.counter[1] = ordered_add_global(arguments.counter, 3);",
        "atom.acq_rel.gpu.global.add.s32 %r",
    ),
}


def compiled(body, wgmma=""):
    """The PTX of a kernel with this body, which ptxas took for sm_90a."""
    from multiattn.cuda.compile import _compile, make_ptx

    source = KERNEL.format(wgmma=wgmma, body=body)
    assert len(_compile(source, "sm_90a")) > 1000
    return make_ptx(source, "sm_90a").decode()


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", "f16"), ("bf16", "bf16")])
@pytest.mark.parametrize(("verb", "mn_major"), [("wgmma_ss", "0, 0"), ("wgmma_ss_mn", "1, 1")])
def test_operands_in_shared_memory_are_both_k_major_or_both_mn_major(verb, mn_major, kind, dtype):
    ptx = compiled(MULTIPLY.format(verb=verb, kind=kind, columns=COLUMNS), _wgmma(COLUMNS))
    (line,) = (line for line in ptx.splitlines() if "wgmma.mma_async" in line)
    assert f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.{dtype}.{dtype} {{" in line
    assert line.endswith(f", add, 1, 1, {mn_major};}}")


@pytest.mark.parametrize("verb", LINES)
def test_a_verb_is_one_instruction(verb):
    body, instruction = LINES[verb]
    assert compiled(body).count(instruction) == 1
