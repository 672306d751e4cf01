"""Masks that are told in few numbers: beside those of eager attention, and in the hands of models that touch them."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

import multiattn  # noqa: E402
from multiattn.integrations.transformers import LazyMask, attend, make_mask  # noqa: E402

BATCH = 2
POSITIONS = torch.cat((torch.arange(4), torch.arange(3)))[None].expand(BATCH, -1)
NO_PADDING = torch.zeros(BATCH, dtype=torch.int64)


def packed(function):
    return and_masks(function, packed_sequence_mask_function(find_packed_sequence_indices(POSITIONS)))


FUNCTIONS = {
    "causal": (causal_mask_function, None),
    "window": (sliding_window_causal_mask_function(3), 3),
    "own key": (sliding_window_causal_mask_function(1), 1),
    "nothing": (sliding_window_causal_mask_function(0), 0),
    "both ways": (bidirectional_mask_function, None),
    "window both ways": (sliding_window_bidirectional_mask_function(2), 2),
    "chunks": (chunked_causal_mask_function(4, NO_PADDING), 4),
    "one chunk": (chunked_causal_mask_function(40, NO_PADDING), 40),
    "prefix": (or_masks(causal_mask_function, lambda b, h, i, j: (i < 3) & (j < 3)), None),
    "window or before": (or_masks(sliding_window_overlay(3), causal_mask_function), None),
    "packed": (packed(causal_mask_function), None),
    "packed or before": (or_masks(causal_mask_function, packed_sequence_mask_function(POSITIONS // 3)), None),
    "packed and on": (and_masks(causal_mask_function, packed_sequence_mask_function(POSITIONS % 2)), None),
    "packed window": (packed(sliding_window_causal_mask_function(2)), 2),
}
PLACES = [
    {"q_length": 7, "kv_length": 7},
    {"q_length": 1, "kv_length": 7, "q_offset": 6},
    {"q_length": 3, "kv_length": 9, "q_offset": 2},
    {"q_length": 7, "kv_length": 12},
    {"q_length": 1, "kv_length": 5, "q_offset": 9, "kv_offset": 5},
    {"q_length": 1, "kv_length": 5, "q_offset": torch.tensor(3)},
    {"q_length": 4, "kv_length": 9, "q_offset": torch.tensor(2)},
]
COMPACT = {"causal": 7, "window": 7, "own key": 7, "nothing": 7, "one chunk": 7, "packed": 1, "packed window": 1}
"""Places at which a mask without padding takes no memory."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_is_the_mask_of_eager_attention(name):
    function, size = FUNCTIONS[name]
    compact = 0
    for place in PLACES[:1] if name.startswith("packed") else PLACES:
        for left, right in ((0, 0), (2, 0), (0, 2)):
            padding = torch.ones(BATCH, int(place.get("q_offset", 0)) + place["q_length"], dtype=torch.bool)
            padding[0, :left], padding[1, padding.shape[1] - right :] = False, False
            given = {"attention_mask": padding} if left or right else {}
            given |= place | {"batch_size": BATCH, "mask_function": function, "local_size": size}
            wanted = eager_mask(**given, dtype=torch.bfloat16)
            for skip in (False, True):
                mask = make_mask(**given, dtype=torch.bfloat16, allow_is_causal_skip=skip)
                assert mask.shape == wanted.shape
                assert torch.equal(mask.whole(), wanted)
                compact += skip and not (left or right) and mask.kind != "visible"
            if left or right or name.startswith("packed"):
                continue
            skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
            mask = make_mask(**given, dtype=torch.bfloat16, **skips)
            assert mask is None or torch.equal(mask.whole(), wanted)
    assert compact >= COMPACT.get(name, 0)


def one(dtype=torch.float32):
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    return make_mask(BATCH, 5, 5, attention_mask=padding, dtype=dtype)


KEPT = {
    "as it is": lambda it: it,
    "all of it": lambda it: it[:, :, :, :5],
    "more than it": lambda it: it[:, :, :, :9],
    "contiguous": lambda it: it.contiguous(),
    "detached": lambda it: it.detach(),
    "cloned": lambda it: it.clone(),
    "copied": copy.deepcopy,
    "moved": lambda it: it.to("cpu"),
    "its own dtype": lambda it: it.to(torch.float32),
}
TOUCHED = {
    "flattened": lambda it: it.view(2, -1),
    "last rows": lambda it: it[:, :, -1:],
    "joined": lambda it: torch.cat((it, it), -1),
    "joined with another": lambda it: torch.cat((torch.zeros(2, 1, 5, 3), it), -1),
    "as bools": lambda it: it.to(torch.bool),
    "padded": lambda it: torch.nn.functional.pad(it, (0, 3)),
    "filled": lambda it: it.masked_fill(torch.eye(5, dtype=torch.bool), -1),
    "added": lambda it: torch.zeros(2, 4, 5, 5) + it,
    "of another": lambda it: torch.zeros(2, 1, 5, 5).copy_(it),
    "summed": lambda it: it.sum(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", KEPT | TOUCHED)
def test_a_model_may_do_anything_with_one(name, inference):
    with torch.inference_mode(inference):
        mask = one()
        plain = torch.where(mask.visible(), 0.0, torch.finfo(torch.float32).min)
        found = (KEPT | TOUCHED)[name](mask)
        assert (type(found) is LazyMask) == (name in KEPT)
        wanted = (KEPT | TOUCHED)[name](plain)
        assert torch.equal(found.whole() if name in KEPT else found, wanted)
        assert mask.written is None


LEAST = torch.finfo(torch.float32).min
HIDING_A_KEY = {
    "by its index": lambda mask: mask.__setitem__((..., 1), LEAST),
    "by a view": lambda mask: mask[:, 0].select(-1, 1).fill_(LEAST),
    "by a slice of all": lambda mask: mask[:, :, :, :9].__setitem__((..., 1), LEAST),
    "by a detached one": lambda mask: mask.detach().__setitem__((..., 1), LEAST),
    "in place": lambda mask: mask.__iadd__(torch.tensor([0.0, -1e30, 0.0, 0.0, 0.0])),
}


@pytest.mark.parametrize("way", HIDING_A_KEY)
@pytest.mark.parametrize("inference", [False, True])
def test_attention_sees_what_a_model_wrote(way, inference):
    with torch.inference_mode(inference):
        q, k, v = torch.randn(3, BATCH, 2, 5, 8, generator=torch.Generator().manual_seed(1))
        mask = make_mask(BATCH, 5, 5)
        HIDING_A_KEY[way](mask)
        out, _ = attend(torch.nn.Module(), q, k, v, mask)
        visible = make_mask(BATCH, 5, 5).visible() & (torch.arange(5) != 1)
        bias = torch.where(visible, 0.0, LEAST)
        torch.testing.assert_close(out.transpose(1, 2), multiattn.reference(q, k, v, bias=bias)[0])
        assert torch.equal(mask.clone()[..., 1] < -1e29, torch.ones(BATCH, 1, 5, dtype=torch.bool))


HOLES = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1, 1]])


@pytest.mark.parametrize(
    ("place", "function", "padding"),
    [
        ((9, 9), causal_mask_function, HOLES),
        ((9, 9), sliding_window_causal_mask_function(3), HOLES),
        ((9, 9), sliding_window_bidirectional_mask_function(2), HOLES),
        ((4, 9, 5), sliding_window_causal_mask_function(3), HOLES),
        ((4, 12, 5), sliding_window_causal_mask_function(3), HOLES),
        ((4, 9, 5), causal_mask_function, HOLES[:, -4:]),  # of the new tokens alone, as for the first keys
        ((9, 9), causal_mask_function, HOLES[:1]),
        ((1, 9), bidirectional_mask_function, HOLES),  # one row for all queries, as BridgeTower's
    ],
)
def test_attention_is_that_of_the_mask(place, function, padding):
    """In the rows of tokens: padding between them counts for windows, and queries may be behind all that is told."""
    mask = make_mask(padding.shape[0], *place, mask_function=function, attention_mask=padding.bool())
    of = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(BATCH, 2, length, 8, generator=of) for length in (max(place[0], 4), place[1], place[1]))
    out = attend(torch.nn.Module(), q, k, v, mask)[0].transpose(1, 2)
    wanted = multiattn.reference(q, k, v, bias=mask.whole())[0]
    rows = padding[:, None, -place[0] :, None] if padding.shape[1] == 9 else 1
    torch.testing.assert_close(out * rows, wanted * rows)


@pytest.mark.parametrize("sizes", [(5, 5), (5, 9), (1, 7), (3, 7)])
@pytest.mark.parametrize("told", ["padding", "lengths", "whole"])
def test_a_mask_of_another_call_is_refused(told, sizes):
    """Eager attention cannot add it; a band would silently be taken for another one."""
    q, k, v = (torch.zeros(BATCH, 2, length, 8) for length in (sizes[0], sizes[1], sizes[1]))
    if told == "lengths":
        mask = make_mask(BATCH, 1, 8, q_offset=torch.tensor(4), allow_is_causal_skip=False)
    else:
        given = {"attention_mask": HOLES[:, :7].bool()} if told == "padding" else {}
        mask = make_mask(BATCH, 5, 7, q_offset=2, **given)
    with pytest.raises(ValueError, match="attention_mask: got one made for"):
        attend(torch.nn.Module(), q, k, v, mask)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_functions_take_them_and_make_them(inside):
    """One graph for every length, whether the mask is made ahead or in it, and for a mask that is touched."""
    torch.compiler.reset()
    q, k, v = (torch.randn(BATCH, 2, length, 8, generator=torch.Generator().manual_seed(1)) for length in (1, 9, 9))
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def mask_of(length):
        return make_mask(BATCH, 1, 9, q_offset=length, allow_is_causal_skip=False)

    def step(mask_or_length):
        mask = mask_of(mask_or_length) if inside else mask_or_length
        return attend(torch.nn.Module(), q, k, v, mask)[0] + mask[:, :, :, :1].exp()

    compiled = torch.compile(step, fullgraph=True, backend=count)
    for at in (3, 4, 7):
        given = torch.tensor(at) if inside else mask_of(torch.tensor(at))
        wanted = multiattn.reference(q, k[:, :, : at + 1], v[:, :, : at + 1])[0].transpose(1, 2) + 1
        with torch.no_grad():
            torch.testing.assert_close(compiled(given), wanted)
    assert len(graphs) == 1


def test_causal_masks_of_many_tokens_cost_nothing():
    """64 Gi scores, of which a mask would be 64 GiB of bools; its bytes are those that tell it."""
    length = 1 << 18
    mask = make_mask(1, length, length)
    assert mask.shape == (1, 1, length, length)
    assert mask.told.numel() == 0
    window = {"mask_function": sliding_window_causal_mask_function(512), "local_size": 512}
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[0, :9] = False
    mask = make_mask(1, length, length, attention_mask=padding, **window)
    assert (mask.told.numel(), mask.window) == (length, 512)


def test_masks_that_hide_nothing_cost_nothing():
    every = torch.ones(BATCH, 5, dtype=torch.bool)
    assert make_mask(BATCH, 5, 5, attention_mask=every).told.shape == (0, 5)
    assert make_mask(BATCH, 5, 9, attention_mask=every).told.shape == (0, 5)  # a static cache
    window = {"mask_function": sliding_window_causal_mask_function(4)}
    assert make_mask(BATCH, 4, 4, local_size=4, **window).window is None
    assert make_mask(BATCH, 5, 5, local_size=4, **window).window == 4
    with pytest.raises(ValueError, match="attention_mask"):
        make_mask(BATCH, 5, 5, attention_mask=torch.eye(5, dtype=torch.bool).expand(BATCH, 5, 5))
    both = {"mask_function": bidirectional_mask_function, "allow_is_causal_skip": False}
    assert make_mask(BATCH, 5, 7, **both, allow_is_bidirectional_skip=True) is None
    assert make_mask(BATCH, 5, 7, **both).whole().count_nonzero() == 0  # a model that joins it with another
