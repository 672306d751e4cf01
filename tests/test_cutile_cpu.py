"""The interpreter of cuTile kernels: what it computes, and that it refuses what cuTile leaves undefined."""

import math

import pytest
import torch

ct = pytest.importorskip("cuda.tile")

from multiattn.cutile.cpu import DataRaceError, OutOfBoundsError, launch  # noqa: E402 - needs cuda.tile

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@ct.kernel
def copy(x, y, tile: ConstInt):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (tile,)))


@ct.kernel
def all_to_tile(x, y, target: ConstInt):
    ct.store(y, (target,), ct.load(x, (ct.bid(0),), (8,)))


@ct.kernel
def largest(x, y):
    tile = ct.load(x, (0,), (8,))
    if ct.max(tile) > 3.0:
        ct.store(y, (ct.bid(0),), 1.0)
    else:
        ct.store(y, (0,), 2.0)


@ct.kernel
def neighbour(x):
    ct.store(x, (ct.bid(0),), ct.load(x, ((ct.bid(0) + 1) % 2,), (8,)))


def run(kernel, grid, *args, **options):
    launch((grid,), kernel, args, **options)
    return args


def test_every_block_runs_once():
    x, y = torch.randn(64), torch.full((64,), math.nan)
    run(copy, 8, x, y, 8)
    assert torch.equal(x, y)


def test_stores_are_clipped():
    x = torch.randn(13)
    memory = torch.zeros(20)
    run(copy, 2, x, memory[:13], 8)
    assert torch.equal(memory[:13], x)
    assert (memory[13:] == 0).all()


def test_undetermined_padding_is_nan():
    x, y = torch.ones(13), torch.zeros(16)
    run(copy, 2, x, y, 8)
    assert y[:13].eq(1).all()
    assert y[13:].isnan().all()


def test_tiles_wholly_outside_raise():
    with pytest.raises(OutOfBoundsError, match="wholly outside"):
        run(copy, 3, torch.ones(16), torch.ones(24), 8)
    with pytest.raises(OutOfBoundsError, match="wholly outside"):
        run(copy, 3, torch.ones(24), torch.ones(16), 8)


def test_two_blocks_that_store_one_element_raise():
    run(all_to_tile, 1, torch.ones(16), torch.ones(16), 1)
    with pytest.raises(DataRaceError, match="overwrites"):
        run(all_to_tile, 2, torch.ones(16), torch.ones(16), 1)


def test_two_views_of_one_memory_are_one_memory():
    @ct.kernel
    def store_each(x, y):
        if ct.bid(0) == 0:
            ct.store(x, (0,), ct.ones((8,), dtype=ct.float32))
        else:
            ct.store(y, (0,), ct.ones((8,), dtype=ct.float32))

    memory = torch.zeros(12)
    run(store_each, 2, memory[:8], torch.zeros(8))
    with pytest.raises(DataRaceError, match="overwrites"):
        run(store_each, 2, memory[:8], memory[4:])


def test_a_view_is_watched_at_the_cost_of_its_own_extent(monkeypatch):
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
        run(neighbour, 2, far)
    with pytest.raises(DataRaceError, match="loads"):
        run(copy, 2, memory[-24:-8], far, 8, seed=0)  # block 0 first: block 1 loads half of what it stored


def test_a_load_of_what_another_block_stored_raises():
    with pytest.raises(DataRaceError, match="loads"):
        run(neighbour, 2, torch.ones(16))


def test_a_store_in_a_conditional_is_seen():
    y = torch.zeros(4)
    run(largest, 4, torch.full((8,), 4.0), y)
    assert (y == 1).all()
    with pytest.raises(DataRaceError):
        run(largest, 4, torch.zeros(8), torch.zeros(4))


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


def test_shapes_are_powers_of_two():
    with pytest.raises(ct.TileTypeError, match="power of two"):
        run(copy, 1, torch.ones(12), torch.ones(12), 12)


def test_dtypes_promote_by_cutiles_table():
    @ct.kernel
    def check(x):
        half = ct.ones((4,), dtype=ct.float16)
        assert (half + 1.5).dtype == ct.float16
        assert (half * 2).dtype == ct.float16
        assert (half + ct.ones((4,), dtype=ct.float32)).dtype == ct.float32
        assert (ct.arange(4, dtype=ct.int32) + 0.5).dtype == ct.float32
        assert (ct.arange(4, dtype=ct.int32) + 1).dtype == ct.int32
        assert (ct.arange(4, dtype=ct.int32) < 2).dtype == ct.bool_
        assert (ct.arange(4, dtype=ct.int32) / 2).dtype == ct.float32
        ct.store(x, (0,), half)

    run(check, 1, torch.zeros(4))

    @ct.kernel
    def mix(x):
        ct.store(x, (0,), ct.ones((4,), dtype=ct.float16) + ct.ones((4,), dtype=ct.bfloat16))

    with pytest.raises(ct.TileTypeError):
        run(mix, 1, torch.zeros(4))


def test_a_store_does_not_narrow():
    with pytest.raises(ct.TileTypeError, match="astype"):
        run(copy, 1, torch.zeros(4), torch.zeros(4, dtype=torch.float16), 4)


def test_an_integer_that_does_not_fit_raises():
    @ct.kernel
    def overflow(x):
        ct.store(x, (0,), ct.arange(4, dtype=ct.int32) + 2**40)

    with pytest.raises(RuntimeError, match="overflow"):
        run(overflow, 1, torch.zeros(4, dtype=torch.int32))


def test_an_op_without_a_rule_is_named():
    @ct.kernel
    def unknown(x):
        ct.mma_scaled(x, x, x, x, x)

    with pytest.raises(NotImplementedError, match="mma_scaled"):
        run(unknown, 1, torch.zeros(4))

    @ct.kernel
    def part(x):
        x.slice(0, 0, 4)

    with pytest.raises(NotImplementedError, match=r"Array\.slice"):
        run(part, 1, torch.zeros(8))


def test_truth_is_only_for_scalars():
    @ct.kernel
    def branch(x):
        if ct.load(x, (0,), (4,)) > 0.0:
            ct.store(x, (0,), 0.0)

    with pytest.raises(ct.TileTypeError, match="truth value"):
        run(branch, 1, torch.zeros(4))


def test_builtins_of_tiles():
    @ct.function
    def clamp(x, low, high):
        return max(low, min(x, high))

    @ct.kernel
    def builtins_(x, y):
        tile = clamp(ct.load(x, (0,), (8,)), -1.0, 1.0)
        count = ct.load(x, (7,), ()).astype(ct.int32)
        for _ in range(0, count):
            tile = tile + 1.0
        ct.store(y, (0,), tile)

    x, y = torch.tensor([-3.0, -0.5, 0.5, 3.0, 0.0, 0.0, 0.0, 2.0]), torch.zeros(8)
    run(builtins_, 1, x, y)
    torch.testing.assert_close(y, x.clamp(-1, 1) + 2)


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
    with pytest.raises(OutOfBoundsError):
        launch((1,), product, (a[:, :0], b, c))


def test_16_bit_arithmetic_rounds_once():
    @ct.kernel
    def arithmetic(x, y):
        tile = ct.load(x, (0,), (4,))
        ct.store(y, (0,), ct.exp2(tile) * tile)

    x, y = torch.randn(4).bfloat16(), torch.zeros(4).bfloat16()
    run(arithmetic, 1, x, y)
    assert torch.equal(y, (torch.exp2(x.float()).bfloat16().float() * x.float()).bfloat16())


def test_flush_to_zero():
    @ct.kernel
    def flush(x, y):
        tile = ct.load(x, (0,), (2,))
        ct.store(y, (0,), ct.exp2(tile, flush_to_zero=True))
        ct.store(y, (1,), ct.exp2(tile))

    y = torch.ones(4)
    run(flush, 1, torch.tensor([-140.0, -1.0]), y)
    assert y.tolist() == [0.0, 0.5, 2.0**-140, 0.5]


def test_offsets_of_32_bits_end_at_2_to_31():
    far = torch.empty(8, dtype=torch.int8).as_strided((1, 8), (2**31, 1))

    @ct.kernel
    def copy_row(x: ct.IndexedWithInt64[ct.Array], y):
        ct.store(y, (0, 0), ct.load(x, (0, 0), (1, 1)))

    run(copy_row, 1, far[:, :1], torch.ones(1, 1, dtype=torch.int8))
    with pytest.raises(OutOfBoundsError, match="indexed with 32 bits"):
        run(copy_row, 1, torch.ones(1, 1, dtype=torch.int8), far[:, :1])


def test_tensors_must_be_on_the_cpu():
    with pytest.raises(TypeError, match="meta"):
        run(copy, 1, torch.zeros(4, device="meta"), torch.zeros(4), 4)


@ct.kernel
def add_to_tile(x, y, target: ConstInt, is_atomic: ConstBool):
    tile = ct.load(x, (ct.bid(0),), (8,), padding_mode=ct.PaddingMode.ZERO)
    view = y.tiled_view((8,))
    if is_atomic:
        view.atomic_store_add((target,), tile)
    else:
        ct.store(y, (target,), tile)


def test_atomic_additions_of_tiles_are_clipped_and_no_race():
    x = torch.arange(24, dtype=torch.float32)
    memory = torch.zeros(20)
    run(add_to_tile, 3, x, memory[:13], 1, True)
    assert torch.equal(memory[8:13], x.reshape(3, 8).sum(0)[:5])
    assert (memory[:8] == 0).all()
    assert (memory[13:] == 0).all()
    with pytest.raises(OutOfBoundsError, match="wholly outside"):
        run(add_to_tile, 3, x, memory[:13], 2, True)
    with pytest.raises(DataRaceError, match="overwrites"):
        run(add_to_tile, 3, x, memory[:13], 1, False)


def test_a_load_of_what_another_block_adds_to_raises():
    @ct.kernel
    def add_and_load(x, y):
        tile = ct.load(x, (0,), (8,))
        y.tiled_view((8,)).atomic_store_add((0,), tile)
        ct.store(x, (0,), ct.load(y, (0,), (8,)))

    with pytest.raises(DataRaceError, match="atomics of any block"):
        run(add_and_load, 1, torch.ones(8), torch.zeros(8))


def test_an_atomic_addition_to_what_another_block_stored_raises():
    @ct.kernel
    def store_or_add(y):
        if ct.bid(0) == 0:
            ct.store(y, (0,), ct.ones((8,), dtype=ct.float32))
        else:
            y.tiled_view((8,)).atomic_store_add((0,), ct.ones((8,), dtype=ct.float32))

    with pytest.raises(DataRaceError):
        run(store_or_add, 2, torch.zeros(8))
