"""The cases: one table for CPU and GPU, each with a name and the reason it is there.

A case too big to interpret on a CPU carries a `size`, and the CPU's suite simply does not include it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch

from parity.block_cases import block_masks
from parity.cache_cases import caches
from parity.cache_score_cases import caches_with_scores, stored_caches
from parity.case import Broadcast, Case, DType, Memory, Size, Values
from parity.mask_cases import sinks, windows
from parity.score_cases import scores
from parity.varlen_cases import packed_batches
from parity.width_cases import widths

HUGE_GIB = 112
"""GPU memory below which the huge cases are not part of the suite: by a count, the backward of huge_q holds q, dout, a
copy of each, out of three forwards with theirs, dq of three backwards, a workspace in fp32 and the truth in fp64."""

CROSS_FED = (
    "d64_fp16_full",  # nothing special
    "d128_bf16_causal",
    "d40_bf16_causal",  # a padded head_dim
    "len_203x113_causal",  # rows that see nothing: lse = -inf
    "gqa4_b1",
    "bshd",
    "large_fp16",  # the lse is huge
    "scale_negative",
)
"""Cases whose backwards take the out and lse of every backend's forward on a CPU, too; on a GPU all do."""


def _head_dims() -> Iterator[Case]:
    why = "every kind of head_dim: power of two, multiple of 8 only, the most; lengths that no tile divides"
    for index, head_dim in enumerate((8, 40, 64, 72, 80, 96, 128, 160, 192, 256, 104)):
        common = head_dim in (64, 128)
        for dtype in ("fp16", "bf16"):
            for causal in (False, True):
                # Uncommon ones take each dtype and each mask once, and all four combinations between them.
                if common or causal == ((dtype == "fp16") == (index % 2 == 0)):
                    mask = "causal" if causal else "full"
                    yield Case(
                        name=f"d{head_dim}_{dtype}_{mask}", why=why, head_dim=head_dim, dtype=dtype, causal=causal
                    )


def _wide_heads() -> Iterator[Case]:
    shapes: tuple[tuple[int, DType, bool, str], ...] = (
        (264, "bf16", True, "one chunk past what whole tiles take"),
        (512, "fp16", False, "whole slices of head_dim"),
        (520, "bf16", False, "a last slice of head_dim that holds one chunk"),
        (1000, "fp16", True, "a last slice that lacks three chunks"),
        (1024, "bf16", True, "the most"),
    )
    for head_dim, dtype, causal, why in shapes:
        yield Case(
            name=f"d{head_dim}_{dtype}_{'causal' if causal else 'full'}",
            why=why,
            heads_q=2,
            heads_kv=1,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
    wide_v = "the repair of what is not finite in V, where warps share columns of the output"
    yield Case(name="d512_inf_v", why=wide_v, head_dim=512, causal=True, values="inf_v")
    yield Case(name="d328_negative_scale", why="the sign goes into each slice of Q", head_dim=328, scale=-0.05)
    for head_dim, causal in ((512, True), (1024, False)):
        yield Case(
            name=f"long_d{head_dim}",
            why="the ring of slices goes round many times",
            heads_q=4,
            seq_q=2100,
            seq_kv=3333,
            head_dim=head_dim,
            causal=causal,
            size="gpu",
        )


def _lengths() -> Iterator[Case]:
    full = (
        (1, 1, "one query, one key"),
        (1, 300, "decode"),
        (300, 1, "one key: softmax is 1 everywhere"),
        (128, 128, "whole tiles: no ragged block anywhere"),
        (129, 257, "one row and one key past whole tiles"),
    )
    causal = (
        (1, 1, "one query, one key"),
        (1, 300, "decode: the only query sees every key"),
        (3, 300, "a few queries at the end of a long context"),
        (128, 128, "whole tiles: only the diagonal is masked"),
        (129, 129, "one row past whole tiles"),
        (256, 256, "several diagonal tiles, the lower with whole tiles before them"),
        (127, 128, "the last row of a tile sees the first key of the next block, and only that"),
        (200, 329, "the same in the middle of a sequence"),
        (128, 127, "the first row sees nothing"),
        (203, 113, "Sq > Skv: a tile of rows that see nothing, and a tile with both kinds"),
        (200, 1, "only the last row sees its one key"),
        (300, 3, "whole tiles of rows that see nothing"),
    )
    for seq_q, seq_kv, why in full:
        yield Case(name=f"len_{seq_q}x{seq_kv}_full", why=why, seq_q=seq_q, seq_kv=seq_kv)
    for seq_q, seq_kv, why in causal:
        yield Case(name=f"len_{seq_q}x{seq_kv}_causal", why=why, seq_q=seq_q, seq_kv=seq_kv, causal=True)


def _heads() -> Iterator[Case]:
    for heads_q, heads_kv, batch, what in (
        (4, 4, 2, "mha"),
        (8, 2, 1, "gqa4"),
        (16, 2, 1, "gqa8"),
        (6, 2, 2, "gqa3"),
        (5, 1, 2, "mqa5"),
        (8, 1, 1, "mqa8"),
    ):
        yield Case(
            name=f"{what}_b{batch}",
            why="query head h reads key/value head h // group, in every batch entry",
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seq_q=17,
            seq_kv=45,
            causal=heads_q % 2 == 0,
        )


def _layouts() -> Iterator[Case]:
    transposed = Memory(order="bshd")
    square = 77
    yield Case(name="bshd", why="a layer's transposed view; out comes back in that layout", layout=transposed, batch=2)
    yield Case(
        name="bshd_gqa_causal",
        why="transposed views whose q and k differ in every stride",
        layout=transposed,
        batch=2,
        heads_q=4,
        seq_q=150,
        seq_kv=65,
        causal=True,
        dtype="fp16",
        head_dim=80,
    )
    for causal in (False, True):
        yield Case(
            name=f"packed_{'causal' if causal else 'full'}",
            why="slices of one fused projection: a key row's neighbours are other tensors",
            layout=Memory(order="packed"),
            batch=2,
            heads_q=4,
            seq_q=square,
            seq_kv=square,
            causal=causal,
        )
    for name, offset, row_pad, why in (
        ("padded_rows", 0, 8, "row stride is not D, all still 16-byte aligned"),
        ("offset_base", 1, 0, "only the bases are odd: 2-byte alignment"),
        ("odd_rows", 0, 1, "bases aligned, but every second row is not even 4-byte aligned"),
        ("odd_all", 3, 5, "nothing is aligned beyond 2 bytes"),
        ("aligned_8_bytes", 4, 4, "aligned to 8 bytes but not to 16"),
    ):
        yield Case(name=name, why=why, layout=Memory(offset=offset, row_pad=row_pad), causal=offset != 0, seq_q=65)
    yield Case(name="odd_rows_d40", why="unaligned, and D is no multiple of 16", layout=Memory(row_pad=1), head_dim=40)
    apart: tuple[tuple[str, Memory, int, DType, bool], ...] = (
        ("k_transposed", Memory(order="bshd", v_pad=16), 64, "bf16", True),
        ("v_transposed", Memory(v_pad=0), 128, "fp16", False),
        ("k_transposed_odd_v", Memory(order="bshd", v_pad=1), 40, "bf16", True),
    )
    for name, layout, head_dim, dtype, causal in apart:
        yield Case(
            name=name,
            why="k and v differ in every stride: neither's, nor those of its gradient, pass for the other's",
            layout=layout,
            batch=2,
            heads_q=6,
            heads_kv=3,
            seq_q=70,
            seq_kv=90,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
    dimensions: tuple[Broadcast, ...] = ("heads", "batch")
    for dimension in dimensions:
        yield Case(
            name=f"broadcast_{dimension}",
            why="k and v expanded with stride 0",
            layout=Memory(broadcast=dimension),
            batch=2,
            seq_q=33,
            seq_kv=65,
            causal=dimension == "batch",
        )
    yield Case(
        name="stray_strides",
        why="strides of one-element dimensions mean nothing and must not be taken for misalignment",
        layout=Memory(stray_strides=True),
        heads_q=1,
        heads_kv=1,
        seq_q=65,
    )
    yield Case(
        name="stray_strides_decode",
        why="the same where Sq, too, is one",
        layout=Memory(stray_strides=True),
        heads_q=1,
        heads_kv=1,
        seq_q=1,
    )


def _values() -> Iterator[Case]:
    dtypes: tuple[DType, ...] = ("fp16", "bf16")
    for dtype in dtypes:
        yield Case(
            name=f"large_{dtype}",
            why="scores of +-10^4 and many ties: nothing overflows, and exp sees differences only",
            values="large",
            dtype=dtype,
        )
    yield Case(name="large_d128_causal", why="the same with the mask", values="large", head_dim=128, causal=True)
    for causal in (False, True):
        mask = "causal" if causal else "full"
        yield Case(
            name=f"ascending_{mask}",
            why="each key beats all before it by e^8: the running maximum moves in every block",
            values="ascending",
            causal=causal,
        )
        yield Case(
            name=f"descending_{mask}",
            why="the first key beats all others: later blocks underflow to nothing",
            values="descending",
            causal=causal,
        )
        yield Case(
            name=f"twin_peaks_{mask}",
            why="two keys weigh 2^127.8 times what others do: relative to these each fits fp32, and their sum does not",
            values="twin_peaks",
            causal=causal,
        )
    planted: tuple[tuple[Values, str], ...] = (
        ("nan_q", "a NaN query makes NaN of its own row only"),
        ("nan_k", "a NaN key makes NaN of the rows that see it, and of no others"),
        ("inf_k", "an infinite score makes NaN of the rows that see it, and -inf counts for nothing"),
        ("inf_k_blocks", "whole blocks whose scores are -inf, before those that count: inf - inf must not happen"),
        ("nan_v", "NaN in one value row reaches the rows that see it, and no other column, head or batch entry"),
        ("inf_v", "inf and -inf in v are never lost: a row that sees them has no finite number there"),
    )
    for values, why in planted:
        yield Case(name=f"{values}_causal", why=why, values=values, seq_q=150, seq_kv=150, causal=True)
        yield Case(name=f"{values}_full", why=why, values=values, seq_q=33, dtype="fp16")
    yield Case(name="nan_v_prefix", why="Sq < Skv: the mask starts amid the keys", values="nan_v", causal=True)
    yield Case(
        name="inf_v_d72_causal",
        why="rows with nothing to see, inf, and a padded head_dim at once",
        values="inf_v",
        seq_q=203,
        seq_kv=113,
        causal=True,
        head_dim=72,
    )


def _scales() -> Iterator[Case]:
    planted: tuple[Values, ...] = ("nan_q", "nan_k", "inf_k")
    for name, scale, causal in (
        ("zero", 0.0, False),
        ("zero_causal", 0.0, True),
        ("negative", -0.125, False),
        ("negative_causal", -0.2, True),
        ("one", 1.0, True),
        ("tiny", 1e-6, False),
    ):
        yield Case(name=f"scale_{name}", why="any finite scale; its sign swaps max and min", scale=scale, causal=causal)
    for values in planted:
        yield Case(
            name=f"scale_zero_{values}",
            why="0 * NaN and 0 * inf are NaN: a scale of zero hides neither",
            scale=0.0,
            values=values,
            seq_q=33,
        )
    yield Case(
        name="scale_negative_nan_k",
        why="NaN and a scale below zero: the sign is in Q",
        scale=-0.1,
        values="nan_k",
        causal=True,
    )


def _empties() -> Iterator[Case]:
    why = "no work is no error"
    yield Case(name="empty_batch", why=why, batch=0)
    yield Case(name="empty_queries", why=why, seq_q=0, causal=True)
    yield Case(name="empty_keys", why="out = 0, lse = -inf", seq_kv=0)
    yield Case(name="empty_keys_causal", why="out = 0, lse = -inf, in the layout of q", seq_kv=0, causal=True)


def _long() -> Iterator[Case]:
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            yield Case(
                name=f"long_d{head_dim}_{'causal' if causal else 'full'}",
                why="tuned configs may start at a length: many tiles in both directions",
                seq_q=4096,
                seq_kv=4096,
                head_dim=head_dim,
                causal=causal,
                size="gpu",
            )
    for index, head_dim in enumerate((8, 40, 72, 80, 96, 160, 192)):
        yield Case(
            name=f"long_d{head_dim}",
            why="the configs of uncommon head dims at length",
            seq_q=2100,
            seq_kv=3333,
            head_dim=head_dim,
            causal=index % 2 == 0,
            dtype="fp16" if index % 3 == 0 else "bf16",
            size="gpu",
        )
    yield Case(
        name="long_fp16_bshd_gqa_causal",
        why="what a decoder layer asks for",
        layout=Memory(order="bshd"),
        batch=2,
        heads_q=8,
        seq_q=2048,
        seq_kv=2048,
        head_dim=128,
        dtype="fp16",
        causal=True,
        size="gpu",
    )
    yield Case(name="long_decode", why="one query, many keys", seq_q=1, seq_kv=8192, head_dim=128, size="gpu")
    yield Case(
        name="long_chunk_causal",
        why="a chunk of a prefill: the mask starts deep in the keys",
        seq_q=777,
        seq_kv=5001,
        head_dim=128,
        causal=True,
        size="gpu",
    )
    yield Case(
        name="long_one_key_more_causal",
        why="the last row of every tile sees the first key of the next block, and only that",
        seq_q=1023,
        seq_kv=1024,
        head_dim=128,
        causal=True,
        size="gpu",
    )
    yield Case(
        name="long_empty_rows",
        why="Sq > Skv at length: hundreds of tiles of rows that see nothing",
        seq_q=5001,
        seq_kv=777,
        head_dim=128,
        causal=True,
        size="gpu",
    )
    yield Case(
        name="long_inf_v_causal",
        why="the rare path at length",
        values="inf_v",
        seq_q=2048,
        seq_kv=2048,
        head_dim=128,
        causal=True,
        size="gpu",
    )
    for causal in (False, True):
        yield Case(
            name=f"many_heads_{'causal' if causal else 'full'}",
            why="B * Hq past 65535, the limit of a grid's y and z",
            batch=3,
            heads_q=22000,
            heads_kv=22000,
            seq_q=16,
            seq_kv=24,
            causal=causal,
            size="gpu",
        )


def _huge() -> Iterator[Case]:
    for causal in (False, True):
        yield Case(
            name=f"huge_kv_{'causal' if causal else 'full'}",
            why="offsets within one sequence of k and v pass 2^31 elements",
            layout=Memory(row_pad=(1 << 20) - 128),
            heads_q=1,
            heads_kv=1,
            seq_q=5,
            seq_kv=2100,
            head_dim=128,
            causal=causal,
            size="huge",
        )
    yield Case(
        name="huge_q",
        why="q and out pass 2^31 elements, and the tiles of one sequence 65535",
        seq_q=(1 << 23) + 77,
        seq_kv=8,
        head_dim=128,
        size="huge",
    )


CASES: tuple[Case, ...] = (
    *_head_dims(),
    *_wide_heads(),
    *widths(),
    *_lengths(),
    *_heads(),
    *_layouts(),
    *_values(),
    *_scales(),
    *_empties(),
    *windows(),
    *sinks(),
    *scores(),
    *block_masks(),
    *packed_batches(),
    *caches(),
    *caches_with_scores(),
    *stored_caches(),
    *_long(),
    *_huge(),
)
"""Every case; names and problems are unique, which tests/test_parity_tester.py holds."""


def suite(device: torch.device) -> tuple[Case, ...]:
    """The cases of a device: those whose size it takes."""
    sizes: set[Size] = {"any"}
    if device.type == "cuda":
        sizes.add("gpu")
        if torch.cuda.get_device_properties(device).total_memory >= HUGE_GIB << 30:
            sizes.add("huge")
    return tuple(case for case in CASES if case.size in sizes)


def is_cross_fed(case: Case, device: torch.device) -> bool:
    """True if each backward takes this case's out and lse from every forward, not only from its own backend's."""
    return device.type == "cuda" or case.name in CROSS_FED


def matching(cases: tuple[Case, ...], patterns: list[str]) -> tuple[Case, ...]:
    """The cases whose name matches one of the glob patterns; ValueError for a pattern that nothing matches."""
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise ValueError(f"case: got {pattern!r}, which matches none of {len(cases)} cases of this device")
    return tuple(case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in patterns))
