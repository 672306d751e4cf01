"""`quantize_cache`: the kernel and eager PyTorch have the same bits, and what it makes is what `fmha_kvcache` takes."""

import itertools

import pytest
import torch

import multiattn
from multiattn.triton import quantize

DTYPES = (torch.float8_e4m3fn, torch.int8)


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (numbers * torch.rand(shape[:-1], generator=torch.Generator().manual_seed(seed + 9))[..., None]).to(dtype)


def bits(results):
    return [it.view(torch.uint8) if it.element_size() == 1 else it.contiguous().view(torch.int32) for it in results]


def by_kernel(monkeypatch):
    """Have CPU tensors take the kernel, interpreted."""
    monkeypatch.setattr(
        "multiattn.quantizing._eager",
        lambda tensors, scales, slots, *, per_token: quantize.run(tensors, scales, slots, per_token),
    )


def caches(dtype, per, page=4, heads=2, widths=(24, 16), nhd=False):
    shape = (5, page, heads) if nhd else (5, heads, page)
    found = [torch.zeros(*shape, width, dtype=torch.int8).view(dtype) for width in widths]
    found = [it.transpose(1, 2) for it in found] if nhd else found
    scales = (
        [torch.zeros(shape) for _ in range(2)] if per == "token" else [torch.tensor([0.003, 0.0]) for _ in range(2)]
    )
    scales = [it.transpose(1, 2) for it in scales] if nhd and per == "token" else scales
    return dict(zip(("k_cache", "v_cache", "k_scale", "v_scale"), (*found, *scales), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", ["token", "head"])
def test_the_kernel_has_the_bits_of_eager(dtype, per, monkeypatch):
    for kind, packed, nhd in itertools.product((torch.bfloat16, torch.float16, torch.float32), (True, False), (0, 1)):
        k, v = ((drawn(6, 2, 24, dtype=kind), drawn(6, 2, 16, seed=1, dtype=kind)) if packed
                else (drawn(2, 2, 3, 24, dtype=kind), drawn(2, 2, 3, 16, seed=1, dtype=kind)))  # fmt: skip
        k.view(-1, 24)[0], k.view(-1, 24)[1, 3], v.view(-1, 16)[2, 5] = 0.0, torch.nan, torch.inf
        slots = torch.tensor([7, -1, 3, 19, 0, 12])
        want = multiattn.quantize_cache(k, v, per=per, slots=slots, **caches(dtype, per, nhd=nhd))
        whole = multiattn.quantize_cache(k, v, dtype, per=per) if not packed else ()
        with monkeypatch.context() as patched:
            by_kernel(patched)
            got = multiattn.quantize_cache(k, v, per=per, slots=slots.int(), **caches(dtype, per, nhd=nhd))
            again = multiattn.quantize_cache(k, v, dtype, per=per) if not packed else ()
        for one, other in zip(bits((*got, *again)), bits((*want, *whole)), strict=True):
            assert torch.equal(one.where(one != 0x7FC00000, 0), other.where(other != 0x7FC00000, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", ["token", "head"])
def test_a_number_is_off_by_half_a_step_at_most(dtype, per):
    k, v = drawn(2, 2, 5, 32), drawn(2, 2, 5, 16, seed=1)
    k8, v8, k_scale, v_scale = multiattn.quantize_cache(k, v, dtype, per=per)
    for x, number, scale in ((k, k8, k_scale), (v, v8, v_scale)):
        scale = (scale if per == "token" else scale[..., None])[..., None].double()
        step = scale / 2 if dtype == torch.int8 else torch.maximum(x.double().abs() / 16, scale * 2**-10)
        assert ((number.double() * scale - x.double()).abs() <= step + x.double().abs() * 2**-22).all()  # and fp32
        assert (number.double().abs().amax((-1, -2, -3) if per == "head" else -1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tokens_land_where_attention_reads_them(dtype):
    """Two sequences in pages, token by token, against the values themselves."""
    page, k, v = 4, drawn(2, 2, 7, 32), drawn(2, 2, 7, 32, seed=1)
    made = caches(dtype, "token", page, widths=(32, 32))
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    for token in range(7):
        slots = table[:, token // page].long() * page + token % page
        multiattn.quantize_cache(k[:, :, token], v[:, :, token], slots=slots, **made)
    q = drawn(2, 4, 1, 32, seed=2)
    out = multiattn.fmha_kvcache(
        q, seqlens_kv=torch.tensor([7, 7], dtype=torch.int32), page_table=table, backend="reference", **made
    )
    torch.testing.assert_close(out, multiattn.fmha(q, k, v, backend="reference"), atol=0.05, rtol=0.05)


def test_what_is_wrong_is_named():
    k, good = drawn(6, 2, 24), caches(torch.int8, "token", widths=(24, 24))
    slots = torch.arange(6)
    for error, message, changes in (
        (TypeError, "dtype: got torch.float16", {"k_cache": good["k_cache"].half()}),
        (ValueError, "per: got 'page'", {"per": "page"}),
        (ValueError, "got some of them", {"slots": None}),
        (TypeError, "slots.dtype: got torch.float32", {"slots": slots.float()}),
        (ValueError, "slots: got", {"slots": slots[:5]}),
        (ValueError, "k_scale: got None", {"k_scale": None}),
        (ValueError, "v_scale: got torch.float32", {"v_scale": torch.zeros(3)}),
        (ValueError, "k_cache: got shape", {"k_cache": good["k_cache"][..., :8]}),
    ):
        with pytest.raises(error, match=message):
            multiattn.quantize_cache(k, k, **{"slots": slots, **good, **changes})
