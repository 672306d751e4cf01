"""`mask.cuh` on the CPU, against the mask outside the kernels: what is visible, and the blocks that loops walk over."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from cuda_runs import on_cpu

from multiattn.cuda.cpu import host
from multiattn.mask import CAUSAL, FULL, Band

pytestmark = on_cpu

TILE = 4  # of blocks that are walked over, and of the tile that walks
SOURCE = f"""
#include "multiattn/mask.cuh"

using namespace multiattn;

struct Sizes {{
  int seq_q, seq_kv, left, right;
}};

template <Band BAND>
void ask(const Sizes& sizes, int* visible, int* all, int* keys, int* queries) {{
  const Mask<BAND> mask(sizes);
  const int rows = (sizes.seq_q + {TILE - 1}) / {TILE}, columns = (sizes.seq_kv + {TILE - 1}) / {TILE};
  for (int i = 0; i < sizes.seq_q; ++i)
    for (int j = 0; j < columns * {TILE}; ++j) *visible++ = mask.visible(i, j);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) *all++ = mask.all_visible(i * {TILE}, {TILE}, j * {TILE}, {TILE});
  const auto put = [](int*& out, const Blocks& it) {{
    for (int bound : {{it.begin, it.full_begin, it.full_end, it.end}}) *out++ = bound;
  }};
  for (int i = 0; i < rows; ++i) put(keys, mask.template keys<{TILE}>(i * {TILE}, {TILE}));
  for (int j = 0; j < columns; ++j) put(queries, mask.template queries<{TILE}>(j * {TILE}, {TILE}, rows));
}}

extern "C" void ask_full(const Sizes* it, int* a, int* b, int* c, int* d) {{ ask<Band::FULL>(*it, a, b, c, d); }}
extern "C" void ask_causal(const Sizes* it, int* a, int* b, int* c, int* d) {{ ask<Band::CAUSAL>(*it, a, b, c, d); }}
extern "C" void ask_two_sided(const Sizes* it, int* a, int* b, int* c, int* d) {{
  ask<Band::TWO_SIDED>(*it, a, b, c, d);
}}
"""

BANDS = (FULL, CAUSAL, *(Band(*it) for it in itertools.product((0, 1, 3, 4, 9, None), repeat=2) if it != (None, None)))
LENGTHS = list(itertools.product((1, 3, 4, 9, 22), repeat=2))


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(SOURCE))


def check_blocks(bounds, seen):
    """`seen` is what each row of a tile sees. Blocks that any row sees are walked over, those that all see are full.

    The last block may be short.
    """
    begin, full_begin, full_end, end = bounds
    assert 0 <= begin <= full_begin <= full_end <= end
    blocks = seen.split(TILE, dim=1)
    some, every = (torch.tensor([bool(test(block)) for block in blocks]) for test in (torch.any, torch.all))
    places = torch.arange(len(blocks))
    assert torch.equal((places >= begin) & (places < end), some)
    assert torch.equal((places >= full_begin) & (places < full_end), every)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_blocks_are_those_that_are_seen(library, band):
    for seq_q, seq_kv in LENGTHS:
        rows, columns = -(-seq_q // TILE), -(-seq_kv // TILE)
        sizes = (ctypes.c_int32 * 4)(seq_q, seq_kv, *band.reach(seq_q, seq_kv))
        shapes = (seq_q, columns * TILE), (rows, columns), (rows, 4), (columns, 4)
        found = [torch.full(shape, -1, dtype=torch.int32) for shape in shapes]
        getattr(library, f"ask_{band.kind}")(ctypes.byref(sizes), *(ctypes.c_void_p(it.data_ptr()) for it in found))
        visible, all_visible, keys, queries = found
        truth = torch.zeros(seq_q, columns * TILE, dtype=torch.bool)  # keys beyond the end are invisible
        truth[:, :seq_kv] = band.visible(seq_q, seq_kv, torch.device("cpu"))
        assert torch.equal(visible.bool(), truth)
        tiles = [[tile.all() for tile in row.split(TILE, dim=1)] for row in truth.split(TILE)]
        assert torch.equal(all_visible.bool(), torch.tensor(tiles))
        for bounds, seen in zip(keys.tolist(), truth.split(TILE), strict=True):
            check_blocks(bounds, seen)
        for bounds, seen in zip(queries.tolist(), truth.T.split(TILE), strict=True):
            check_blocks(bounds, seen)
