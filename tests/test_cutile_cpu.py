"""The interpreter of cuTile kernels: what it computes, and that it refuses what cuTile leaves undefined."""

import math

import pytest
import torch

ct = pytest.importorskip("cuda.tile")

from multiattn.cutile.cpu import DataRaceError, OutOfBoundsError, launch  # noqa: E402 - needs cuda.tile

ConstInt = ct.Constant[int]


@ct.kernel
def copy(x, y, tile: ConstInt):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (tile,)))


@ct.kernel
def all_to_tile(x, y, target: ConstInt):
    ct.store(y, (target,), ct.load(x, (ct.bid(0),), (8,)))


@ct.kernel
def add_to_tile(x, y, target: ConstInt):
    tile = ct.load(x, (ct.bid(0),), (8,), padding_mode=ct.PaddingMode.ZERO)
    y.tiled_view((8,)).atomic_store_add((target,), tile)


@ct.kernel
def from_element(x, y, first: ConstInt):
    view = x.tiled_view((8,), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1,))
    ct.store(y, (0,), view.load((first,)))
    view.atomic_store_add((first,), ct.ones((8,), dtype=ct.float32))


@ct.kernel
def neighbour(x):
    ct.store(x, (ct.bid(0),), ct.load(x, ((ct.bid(0) + 1) % 2,), (8,)))


@ct.kernel
def largest(x, y):
    tile = ct.load(x, (0,), (8,))
    if ct.max(tile) > 3.0:
        ct.store(y, (ct.bid(0),), 1.0)
    else:
        ct.store(y, (0,), 2.0)


@ct.kernel
def store_or_add(y):
    if ct.bid(0) == 0:
        ct.store(y, (0,), ct.ones((8,), dtype=ct.float32))
    else:
        y.tiled_view((8,)).atomic_store_add((0,), ct.ones((8,), dtype=ct.float32))


@ct.kernel
def add_and_load(x, y):
    y.tiled_view((8,)).atomic_store_add((0,), ct.load(x, (0,), (8,)))
    ct.store(x, (0,), ct.load(y, (0,), (8,)))


def run(kernel, grid, *args, **options):
    launch((grid,), kernel, args, **options)
    return args


# ---------------------------------------------------------------- memory


def test_every_block_runs_once_stores_are_clipped_and_padding_is_nan():
    x, memory = torch.randn(13), torch.zeros(20)
    run(copy, 2, x, memory[:13], 8)
    assert torch.equal(memory[:13], x)
    assert (memory[13:] == 0).all()
    run(copy, 2, x, memory[:16], 8)
    assert torch.equal(memory[:13], x)
    assert memory[13:16].isnan().all(), "padding is not determined"


def test_tiles_wholly_outside_raise():
    for sizes in ((16, 24), (24, 16)):
        with pytest.raises(OutOfBoundsError, match="wholly outside"):
            run(copy, 3, *map(torch.ones, sizes), 8)


def test_atomic_additions_of_tiles_are_clipped_and_no_race():
    x = torch.arange(24, dtype=torch.float32)
    memory = torch.zeros(20)
    run(add_to_tile, 3, x, memory[:13], 1)
    assert torch.equal(memory[8:13], x.reshape(3, 8).sum(0)[:5])
    assert (memory[:8] == 0).all()
    assert (memory[13:] == 0).all()
    with pytest.raises(OutOfBoundsError, match="wholly outside"):
        run(add_to_tile, 3, x, memory[:13], 2)


def test_tiles_of_a_view_begin_where_its_steps_say():
    x, y = torch.arange(13, dtype=torch.float32), torch.zeros(8)
    run(from_element, 1, x, y, 7)
    assert y.tolist() == [7, 8, 9, 10, 11, 12, 0, 0]
    assert x.tolist() == [*range(7), *range(8, 14)]
    with pytest.raises(OutOfBoundsError, match="wholly outside"):
        run(from_element, 1, x, y, 13)


RACES = {
    "two blocks store one element": (all_to_tile, 2, (torch.ones(16), torch.ones(16), 1), "overwrites"),
    "one loads what another stored": (neighbour, 2, (torch.ones(16),), "loads"),
    "stores in a conditional": (largest, 4, (torch.zeros(8), torch.zeros(4)), "overwrites"),
    "one loads what atomics update": (add_and_load, 1, (torch.ones(8), torch.zeros(8)), "atomics of any block"),
    "one stores, another updates": (store_or_add, 2, (torch.zeros(8),), "block"),
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_raises(name):
    kernel, blocks, args, message = RACES[name]
    with pytest.raises(DataRaceError, match=message):
        run(kernel, blocks, *args)
    run(all_to_tile, 1, torch.ones(16), torch.ones(16), 1)
    run(largest, 4, torch.full((8,), 4.0), torch.zeros(4))


def test_a_view_is_watched_at_the_cost_of_its_own_extent(monkeypatch):
    """Two views of one memory are one memory."""
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *of, **options: made.append(empty(*of, **options)) or made[-1])
    memory = torch.arange(1e6)
    near, far, apart = memory[-32:-16], memory[-16:], memory.view(1000, 1000)[500:502, 10:18]

    @ct.kernel
    def store_rows(x, y):
        ct.store(x, (0, 0), ct.zeros((2, 8), dtype=ct.float32))
        ct.store(y, (0,), ct.load(y, (0,), (16,)) + ct.max(ct.load(x, (0, 0), (2, 8))))

    run(copy, 2, near, far, 8)
    assert torch.equal(near, far)
    run(store_rows, 1, apart, torch.ones(16))
    assert (apart == 0).all()
    assert max(tensor.numel() for tensor in made) <= 1008
    with pytest.raises(DataRaceError, match="overwrites"):
        run(all_to_tile, 2, near, far, 1)
    with pytest.raises(DataRaceError, match="loads"):
        run(copy, 2, memory[-24:-8], far, 8, seed=0)  # block 0 first: block 1 loads half of what it stored


def test_offsets_of_32_bits_end_at_2_to_31():
    far = torch.empty(8, dtype=torch.int8).as_strided((1, 8), (2**31, 1))

    @ct.kernel
    def copy_row(x: ct.IndexedWithInt64[ct.Array], y):
        ct.store(y, (0, 0), ct.load(x, (0, 0), (1, 1)))

    run(copy_row, 1, far[:, :1], torch.ones(1, 1, dtype=torch.int8))
    with pytest.raises(OutOfBoundsError, match="indexed with 32 bits"):
        run(copy_row, 1, torch.ones(1, 1, dtype=torch.int8), far[:, :1])


def test_the_order_of_blocks_is_random_and_seeded():
    def order(seed):
        seen = []

        @ct.kernel
        def note():
            seen.append(ct.bid(0))

        launch((50,), note, (), seed=seed)
        return seen

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(0)) == list(range(50)) != order(0)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: ct.store(x, (0,), ct.arange(4, dtype=ct.int32) + 2**40), RuntimeError, "overflow"),
        (lambda x: ct.ones((4,), dtype=ct.float16) + ct.ones((4,), dtype=ct.bfloat16), ct.TileTypeError, "float16"),
        (lambda x: ct.store(x, (0,), ct.zeros((4,), dtype=ct.float64)), ct.TileTypeError, "astype"),
        (lambda x: ct.load(x, (0,), (3,)), ct.TileTypeError, "power of two"),
        (lambda x: 1 if ct.load(x, (0,), (4,)) > 0.0 else 0, ct.TileTypeError, "truth value"),
        (lambda x: ct.mma_scaled(x, x, x, x, x), NotImplementedError, "mma_scaled"),
        (lambda x: x.get_raw_memory(), NotImplementedError, r"Array\.get_raw_memory"),
        (lambda x: x.slice(0, 2, 5), OutOfBoundsError, r"slice \[2, 5\) of an axis of 4"),
    ],
)
def test_what_the_compiler_would_refuse_or_has_no_rule_raises(function, error, message):
    with pytest.raises(error, match=message):
        run(ct.kernel(function), 1, torch.zeros(4))


def test_tensors_must_be_on_the_cpu():
    with pytest.raises(TypeError, match="meta"):
        run(copy, 1, torch.zeros(4, device="meta"), torch.zeros(4), 4)


# ---------------------------------------------------------------- numbers


def test_dtypes_promote_by_cutiles_table():
    @ct.kernel
    def check(x):
        half, whole = ct.ones((4,), dtype=ct.float16), ct.arange(4, dtype=ct.int32)
        assert (half + 1.5).dtype == ct.float16
        assert (half * 2).dtype == ct.float16
        assert (half + ct.ones((4,), dtype=ct.float32)).dtype == ct.float32
        assert (whole + 0.5).dtype == ct.float32
        assert (whole + 1).dtype == ct.int32
        assert (whole < 2).dtype == ct.bool_
        assert (whole / 2).dtype == ct.float32
        ct.store(x, (0,), half)

    run(check, 1, torch.zeros(4))


def test_nan_in_maxima():
    @ct.kernel
    def maxima(x, y):
        tile = ct.load(x, (0,), (4,))
        ct.store(y, (0,), ct.max(tile))
        ct.store(y, (1,), ct.max(tile, propagate_nan=True))
        ct.store(y, (2,), ct.max(ct.maximum(tile, 2.0)))
        ct.store(y, (3,), ct.max(ct.maximum(tile, 2.0, propagate_nan=True), propagate_nan=True))

    y = torch.zeros(4)
    run(maxima, 1, torch.tensor([1.0, math.nan, 3.0, 0.0]), y)
    torch.testing.assert_close(y, torch.tensor([3.0, math.nan, 3.0, math.nan]), equal_nan=True)


def test_matrix_products_accumulate_in_fp32():
    @ct.kernel
    def product(a, b, c):
        x, y = ct.load(a, (0, 0), (16, 64)), ct.load(b, (0, 0), (64, 16), order=(1, 0))
        ct.store(c, (0, 0), ct.mma(x, y, ct.zeros((16, 16), dtype=ct.float32)))

    a, b, c = torch.randn(16, 64).half(), torch.randn(16, 64).half(), torch.zeros(16, 16)
    run(product, 1, a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T)


def test_arithmetic_rounds_once_and_flushes_where_asked():
    @ct.kernel
    def arithmetic(x, y):
        tile = ct.load(x, (0,), (4,))
        ct.store(y, (0,), ct.exp2(tile) * tile)

    @ct.kernel
    def flush(x, y):
        tile = ct.load(x, (0,), (2,))
        ct.store(y, (0,), ct.exp2(tile, flush_to_zero=True))
        ct.store(y, (1,), ct.exp2(tile))

    x, y = torch.randn(4).bfloat16(), torch.zeros(4).bfloat16()
    run(arithmetic, 1, x, y)
    assert torch.equal(y, (torch.exp2(x.float()).bfloat16().float() * x.float()).bfloat16())
    y = torch.ones(4)
    run(flush, 1, torch.tensor([-140.0, -1.0]), y)
    assert y.tolist() == [0.0, 0.5, 2.0**-140, 0.5]
