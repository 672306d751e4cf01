"""Scores of a case: the options that a caller gives for them, and the program that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from multiattn.block_mask import (
    KEYS_OF_QUERIES,
    QUERIES_OF_KEYS,
    BlockLists,
    in_sequences,
    kinds_of,
    of_sequences,
    read_block_mask,
    seen_in_lists,
)
from multiattn.score import BoundScore, bind_score
from parity.callables import CALLABLES, Sizes
from parity.case import Case
from parity.memory import GUARD, poisoned
from parity.tolerance import Packed


class Asked(NamedTuple):
    """The scores that a case asks for, as `multiattn.fmha` and `multiattn.fmha_kvcache` take them."""

    options: dict[str, Any]
    """softcap, alibi_slopes, bias, score_mod and block_mask."""
    memory: tuple[torch.Tensor, ...]
    """The memory of its tensors, poisoned around them."""


def asked_of(case: Case, device: torch.device) -> Asked:
    """The scores of a case; its tensors are the same for every call."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    memory: list[torch.Tensor] = []

    def room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        padded = [*shape[:-1], shape[-1] + 3]  # strides are not those of a dense tensor
        count = torch.Size(padded).numel()
        memory.append(poisoned(count, dtype, device))
        return memory[-1][GUARD : GUARD + count].view(padded)[..., : shape[-1]]

    def draw(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return room(shape, dtype).copy_(torch.randn(tuple(shape), generator=generator))

    (batch, seq_q, seq_kv), slopes, bias = case.lengths, None, None
    if case.alibi != "none":
        slopes = draw((batch, case.heads_q)[0 if case.alibi == "batch" else 1 :], torch.float32).abs_().mul_(0.1)
    if case.bias is not None:
        all_sizes = zip("bhqk", (batch, case.heads_q, seq_q, seq_kv), strict=True)
        shape = [size if name in case.bias else 1 for name, size in all_sizes]
        bias = draw(shape, torch.float32 if case.wide_bias else case.torch_dtype)
        if case.bias_hides:
            bias.masked_fill_(bias < -1.0, -torch.inf)  # a sixth of all
    if case.cache is not None and case.cache.tree != "none":
        seen = torch.stack([_tree(it, seq_q, generator) for it, _ in case.pairs])[:, None]
        if case.cache.tree == "bool":
            bias = room(seen.shape, torch.bool).copy_(seen)
        else:
            bias = draw(seen.shape, torch.float32 if case.wide_bias else case.torch_dtype)
            bias.masked_fill_(~seen.to(device), -torch.inf)
    score_mod = None
    if case.score_mod is not None:
        lengths = case.lengths if case.cache is None else (batch, seq_kv, seq_kv)  # of positions in a sequence
        score_mod = _callable(case, case.score_mod, device, lengths)["score_mod"]
    for tensor in (slopes, bias):
        if tensor is not None and tensor.is_floating_point() and case.cache is None:
            tensor.requires_grad_()
    named = {"softcap": case.softcap, "alibi_slopes": slopes, "bias": bias, "score_mod": score_mod}
    return Asked({**named, "block_mask": _block_mask(case, device)}, tuple(memory))


def modified(
    case: Case, asked: Asked, q: torch.Tensor, k: torch.Tensor, packed: Packed | None
) -> tuple[BoundScore | None, BlockLists | None]:
    """The program of scores and the lists of a block mask that a call of a case has."""
    options = dict(asked.options)
    block_mask = options.pop("block_mask")
    device = torch.empty(0, device=q.device).device  # with its index
    if case.cache is not None:
        return bound_of_cache(case, asked, q, k), None
    blocks, mask_mod = (None, None) if block_mask is None else read_block_mask(block_mask, q, k)
    if packed is not None and blocks is not None:
        blocks, mask_mod = of_sequences(blocks, packed.cu_seqlens), in_sequences(mask_mod, packed.cu_seqlens)
    return bind_score(device=device, mask_mod=mask_mod, **options), blocks


def bound_of_cache(case: Case, asked: Asked, q: torch.Tensor, k: torch.Tensor, **changes: Any) -> BoundScore | None:
    """The program of a case with a cache; `changes` are to its `multiattn.score.Modification`."""
    options = dict(asked.options)
    block_mask, bias = options.pop("block_mask"), options.pop("bias")
    kinds = mask_mod = sizes = None
    if block_mask is not None:
        room = len(case.pairs), case.seq_kv
        lists, mask_mod = read_block_mask(block_mask, q, k, has_gradient=False, room=room)
        kinds, sizes = kinds_of(lists), lists.spec[:2]
    is_bool = bias is not None and bias.dtype == torch.bool
    is_of_last = bias is not None and 1 < bias.shape[3] < case.seq_kv
    named = {
        **options,
        "bias": None if is_bool else bias,
        "visible": bias if is_bool else None,
        "mask_mod": mask_mod,
        "of_cache": True,
        "last": bias.shape[3] if is_of_last else None,
        "block_kinds": kinds,
        "block_sizes": sizes,
        **changes,
    }
    bound = bind_score(device=torch.empty(0, device=q.device).device, **named)
    return bound and bound._replace(tensors=tuple(it.detach() for it in bound.tensors))


def _tree(nodes: int, room: int, generator: torch.Generator) -> torch.Tensor:
    """Ancestors of each of so many nodes, itself among them, in bools ``[room, room]``: rows and the last columns.

    A node's parent is one of the four before it, so that some are siblings. Columns before them are seen, as they are
    of the sequence itself; rows behind them are of none.
    """
    seen = torch.ones(room, room, dtype=torch.bool)
    first = room - nodes
    seen[:, first:] = False
    for node in range(nodes):
        if node:
            parent = node - 1 - int(torch.randint(min(node, 4), (), generator=generator))
            seen[node, first:] = seen[parent, first:]
        seen[node, first + node] = True
    return seen


def _block_mask(case: Case, device: torch.device) -> BlockMask | None:
    """A case's block mask, as PyTorch makes it."""
    if case.mask_mod is None:
        return None
    sizes = case.lengths if case.packed is None else (1, case.seq_q, case.seq_kv)  # over the packed axis
    if case.cache is not None:
        sizes = (sizes[0], case.seq_kv, case.seq_kv)  # of positions in a sequence
    mask_mod = _callable(case, case.mask_mod, device, sizes)["mask_mod"]
    all_of = (("b", sizes[0]), ("h", case.heads_q))
    batch, heads = (size if name in case.lists else None for name, size in all_of)
    made = create_block_mask(mask_mod, batch, heads, *sizes[1:], device=device, BLOCK_SIZE=case.blocks)
    return _loosened(made) if case.loose_lists else made


def _loosened(made: BlockMask) -> BlockMask:
    """A block mask's lists from the last block to the first, and -1 behind them, in room for one block more.

    With `noop_mask` all blocks are full, those that an end cuts too.
    """
    names = KEYS_OF_QUERIES[:2], KEYS_OF_QUERIES[2:]
    partial, full = (seen_in_lists(getattr(made, counts), getattr(made, indices)) for counts, indices in names)
    if made.mask_mod is noop_mask:
        partial, full = torch.zeros_like(full), partial | full
    named = {}
    for names_of, seen in ((KEYS_OF_QUERIES, (partial, full)), (QUERIES_OF_KEYS, (partial.mT, full.mT))):
        for counts, indices, its in zip(names_of[::2], names_of[1::2], seen, strict=True):
            numbers = torch.where(its, torch.arange(its.shape[-1], dtype=torch.int32, device=its.device), -1)
            named[counts] = its.sum(-1, dtype=torch.int32)
            named[indices] = torch.nn.functional.pad(numbers, (0, 1), value=-1).sort(dim=-1, descending=True).values
    return BlockMask(made.seq_lengths, BLOCK_SIZE=made.BLOCK_SIZE, mask_mod=made.mask_mod, **named)


def _callable(case: Case, name: str, device: torch.device, lengths: tuple[int, int, int]) -> dict[str, Any]:
    batch, seq_q, seq_kv = lengths
    sizes = Sizes(batch=batch, heads=case.heads_q, seq_q=seq_q, seq_kv=seq_kv, device=device)
    (found,) = (it for it in CALLABLES if it.name == name)
    return found.make(sizes)
