"""The mask outside the kernels: its bounds, its pairs, its name."""

import itertools

import pytest
import torch

from multiattn.mask import Band, band_of, parse_band

BOUNDS = (None, 0, 1, 3, 7, 20, 2**40)
LENGTHS = list(itertools.product((0, 1, 2, 5, 9), (0, 1, 3, 8, 12)))


@pytest.mark.parametrize("left", BOUNDS)
@pytest.mark.parametrize("right", BOUNDS)
def test_a_band_is_what_the_contract_says(left, right):
    band = Band(left, right)
    for seq_q, seq_kv in LENGTHS:
        level = torch.arange(seq_q)[:, None] + seq_kv - seq_q
        key = torch.arange(seq_kv)[None, :]
        expected = torch.ones(seq_q, seq_kv, dtype=torch.bool)
        if left is not None:
            expected &= key >= level - left
        if right is not None:
            expected &= key <= level + right
        for same in (band, band.within(seq_q, seq_kv), Band(*band.reach(seq_q, seq_kv))):
            assert torch.equal(same.visible(seq_q, seq_kv, torch.device("cpu")), expected)
            assert same.count_pairs(seq_q, seq_kv) == int(expected.sum())
        assert max(band.reach(seq_q, seq_kv)) < 2**31


@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(3, 0), Band(1, 2), Band(None, 3), Band(7, None)])
def test_some_queries_have_a_mask_of_their_own(band):
    for seq_q, seq_kv in itertools.product((1, 5, 9), (1, 3, 8, 12)):
        whole = band.visible(seq_q, seq_kv, torch.device("cpu"))
        for first, last in itertools.combinations(range(seq_q + 1), 2):
            part, keys = band.of_rows(first, last, seq_q, seq_kv)
            found = torch.zeros_like(whole[first:last])
            found[:, keys] = part.visible(last - first, keys.stop - keys.start, torch.device("cpu"))
            assert torch.equal(found, whole[first:last])


def test_only_the_causal_mask_needs_no_numbers():
    kinds = {band: band.kind for band in (Band(), Band(right=0), Band(right=1), Band(left=3), Band(3, 0))}
    assert list(kinds.values()) == ["full", "causal", "two_sided", "two_sided", "two_sided"]
    assert Band(100, 100).within(5, 7) == Band()
    assert Band(100, 0).within(5, 7) == Band(right=0)
    assert Band(right=0).within(1, 7) == Band(right=0)  # a caller's causal stays what it is


def test_causal_bounds_a_window():
    assert band_of(True, (3, None)) == band_of(True, (3, 5)) == Band(3, 0)
    assert band_of(False, [None, 5]) == Band(None, 5)


@pytest.mark.parametrize("text", ["full", "causal", "window:1023:0", "window:-:3", "window:3:-"])
def test_a_mask_has_a_name(text):
    assert str(parse_band(text)) == text


@pytest.mark.parametrize("text", ["", "banded", "window", "window:1", "window:1:-2", "window:a:1"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=f"mask: got '{text}'; allowed full, causal, or window:LEFT:RIGHT"):
        parse_band(text)
