"""The axes of the forward ladder, and the points on them that teach something: each is a variant.

`kernels/forward_traits.cuh` has a static_assert for each rule of which steps go together; `tests/test_cuda_axes.py`
enumerates both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from multiattn.plan.support import Reason

# The steps of an axis from the bottom up, each in words.
WARPS = {"split_kv": "warps share keys and head_dim", "split_q": "warps own rows"}
SHARE = {"none": "", "kv": "K and V in one buffer", "qkv": "Q, K and V in one buffer"}
TILING = {"none": "", "qk": "K in slices of head_dim", "qkv": "K in slices of head_dim, V of keys"}
ALL = "qkv"
SWIZZLE = ("", "q", "k", "v", "qk", ALL)
ACCUMULATOR = ("fp32", "fp16")

HEAD_DIM_MAX = 1024
UNTILED_HEAD_DIM_MAX = 256
"""Beyond it the output of whole rows takes more registers than a thread has, and whole tiles more than an SM."""

HALVES_HEAD_DIM_MAX = 512
"""Beyond it scores in fp16 have rounded so often that parity's budget does not hold: H200, 2026-11-21, N=8192: an error
of 1.1e-3 in out at D=1024, 6.4e-4 being allowed; at D=512 it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """A point: how warps divide a block's work, what shares a buffer, what is loaded in slices, what is swizzled.

    `warps`: ``split_kv``: warps share the keys of a block for the scores, and head_dim for the output; weights pass
    through shared memory. ``split_q``: a warp owns whole rows, and weights never leave its registers.
    `share`: ``none``: Q, K and V have buffers of their own. ``kv``: K and V take turns in one. ``qkv``: Q was there
    before them, on its way to registers.
    `tiling`: ``none``: K and V arrive whole. ``qk``: K in slices of head_dim, and Q with it where it has no room.
    ``qkv``: V in slices of keys, too.
    `swizzle`: whose tiles are swizzled; a string of some of q, k, v.
    `accumulator`: what the tensor core adds up in. With fp16 a score, and what one tile or slice of V adds to the
    output: outside the contract, as 65504 is all that fits; sums over tiles are fp32.
    """

    warps: str
    share: str = "none"
    tiling: str = "none"
    swizzle: str = ""
    accumulator: str = "fp32"

    @property
    def flags(self) -> tuple[tuple[str, str], ...]:
        """The flags of its Variant."""
        return tuple(asdict(self).items())

    @property
    def name(self) -> str:
        """``split_q+share_kv+swizzle_qkv``: what is not at the bottom of its axis."""
        parts = [self.warps]
        parts += [f"share_{self.share}"] if self.share != "none" else []
        parts += [f"tiling_{self.tiling}"] if self.tiling != "none" else []
        parts += [f"swizzle_{self.swizzle}"] if self.swizzle else []
        parts += [f"acc_{self.accumulator}"] if self.accumulator != "fp32" else []
        return "+".join(parts)

    @property
    def parent(self) -> Axes | None:
        """The point below on the last axis that has one; None at the bottom of all."""
        if self.accumulator != "fp32":
            return replace(self, accumulator="fp32")
        if self.swizzle:
            below = replace(self, swizzle=self.swizzle[:-1])
            return below if below in POINTS else replace(self, swizzle="")
        for axis, words in (("tiling", TILING), ("share", SHARE), ("warps", WARPS)):
            steps = list(words)
            if step := steps.index(getattr(self, axis)):
                return replace(self, **{axis: steps[step - 1]})
        return None

    @property
    def summary(self) -> str:
        """The point in words."""
        parts = [WARPS[self.warps], SHARE[self.share], TILING[self.tiling]]
        parts.append(f"{', '.join(self.swizzle)} swizzled" if self.swizzle else "nothing swizzled")
        parts.append("" if self.accumulator == "fp32" else "sums in fp16, outside the contract")
        return "; ".join(part for part in parts if part)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of q, k and v: mma.m16n8k16 adds up in fp16 only what is fp16."""
        return ("fp16", "bf16") if self.accumulator == "fp32" else ("fp16",)

    @property
    def is_legal(self) -> bool:
        """True where there is a kernel for it; `why_illegal` says why not."""
        return self.share != "qkv" or self.tiling == "none"

    @property
    def head_dim_max(self) -> int:
        """The widest head that the point can take."""
        if self.warps == "split_q" or self.tiling == "none":
            return UNTILED_HEAD_DIM_MAX
        return HEAD_DIM_MAX if self.accumulator == "fp32" else HALVES_HEAD_DIM_MAX

    def __str__(self) -> str:
        return self.name


def why_illegal(axes: Axes) -> tuple[Reason, ...]:
    """Why no config of a combination can run anything; empty for a legal one."""
    if axes.is_legal:
        return ()
    hint = "Q is whole in the buffer that it shares, and slices of K go with slices of Q"
    got = f"share_qkv with tiling_{axes.tiling}"
    return (Reason(code="variant", got=got, allowed="share_qkv without tiling", hint=hint),)


SPLIT_Q = Axes(warps="split_q", swizzle=ALL)
"""The best up to D=256."""

TILED = Axes(warps="split_kv", share="kv", tiling="qkv", swizzle=ALL)
"""The best of those that take more: the ring of slices leaves room for Q whole and for a tile of keys."""


def _points() -> Iterator[Axes]:
    """Yield the points from the bottom up.

    Each legal way to divide the work and the memory, with nothing swizzled and with all, so that each step up an axis
    is one from point to point; the steps between, of the two ways that are offered; and sums in fp16 where
    flash-attn-mma (LeetCUDA) has them, and for the widest heads.
    """
    ways = [Axes(warps=warps, share=share, tiling=tiling) for warps in WARPS for share in SHARE for tiling in TILING]
    for way in (it for it in ways if it.is_legal):
        is_offered = replace(way, swizzle=ALL) in (SPLIT_Q, TILED)
        yield from (replace(way, swizzle=it) for it in (SWIZZLE if is_offered else ("", ALL)))
    halves = [it for it in ways if it.warps == "split_q" and "none" in (it.share, it.tiling)]
    for way in (Axes(warps="split_kv"), *halves, TILED):
        yield replace(way, swizzle=ALL, accumulator="fp16")


POINTS = tuple(_points())
