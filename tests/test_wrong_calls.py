"""Calls in the words of other libraries, and values of another kind: each is told what came and what to write."""

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import multiattn
from bench import cli
from multiattn import __main__, flex_attention, fmha, fmha_kvcache, fmha_varlen, merge, nn, reference
from multiattn.inspect.options import window
from multiattn.integrations import flash_attn, flashinfer
from multiattn.integrations.padding import fmha_padded
from multiattn.score.trace import UntraceableError


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def flash(**options):
    """A call of FlashAttention's function, [B, S, H, D]."""
    return flash_attn.flash_attn_func(bf16(2, 8, 4, 16), bf16(2, 8, 2, 16), bf16(2, 8, 2, 16), **options)


def over_cache(**options):
    """A call of its function over a cache, [B, S, H, D]."""
    return flash_attn.flash_attn_with_kvcache(bf16(2, 1, 4, 16), *[bf16(2, 32, 2, 16)] * 2, **options)


Q, K, X = bf16(2, 4, 8, 16), bf16(2, 2, 8, 16), bf16(2, 8, 64)
ROWS, STARTS, LSE = bf16(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32), torch.zeros(2, 4, 8)
CACHE, ONE, LENGTHS = bf16(2, 2, 32, 16), bf16(2, 4, 1, 16), torch.tensor([3, 4], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 5, "max_seqlen_kv": 5}
PADDED = {"kv_mask": torch.ones(2, 8, dtype=torch.bool)}
STATE = bf16(7, 4, 16), torch.zeros(7, 4)


def scored(score_mod):
    return fmha(Q, K, K, score_mod=score_mod)


def layer(*inputs, **options):
    return nn.Attention(64, 4, dtype=torch.bfloat16)(*inputs, **options)


# The call, and pieces of its error: what came | what is allowed, or what to do
NAMES = {
    "fmha p": (lambda: fmha(Q, K, K, p=0.1), "'p' | dropout_p, which may be 0.0"),
    "fmha need_weights": (lambda: fmha(Q, K, K, need_weights=True), "'need_weights' | never in memory; return_lse"),
    "fmha out": (lambda: fmha(Q, K, K, out=Q), "'out' | only fmha_kvcache writes"),
    "fmha cu_seqlens_q": (lambda: fmha(Q, K, K, cu_seqlens_q=STARTS), "'cu_seqlens_q'; fmha_varlen takes packed"),
    "fmha page_table": (lambda: fmha(Q, K, K, page_table=STARTS), "'page_table'; fmha_kvcache takes keys in a cache"),
    "fmha training": (lambda: fmha(Q, K, K, training=True), "'training' | no call drops anything"),
    "varlen cu_seqlens": (
        lambda: fmha_varlen(ROWS, ROWS, ROWS, cu_seqlens=STARTS, max_seqlen=5),
        "'cu_seqlens' | cu_seqlens_q and cu_seqlens_kv",
    ),
    "kvcache k": (lambda: fmha_kvcache(ONE, CACHE, CACHE, k=ONE, seqlens_kv=LENGTHS), "'k' | write new keys | first"),
    "kvcache bias": (
        lambda: fmha_kvcache(ONE, CACHE, CACHE, bias=ONE, seqlens_kv=LENGTHS),
        "'bias' | a call with a cache has none; fmha and fmha_varlen have",
    ),
    "kvcache attn_mask": (
        lambda: fmha_kvcache(ONE, CACHE, CACHE, attn_mask=ONE, seqlens_kv=LENGTHS),
        "'attn_mask' | a call with a cache has none",
    ),
    "flex is_causal": (
        lambda: flex_attention(Q, Q, Q, is_causal=True),
        "'is_causal' | create_block_mask | causal=True",
    ),
    "flex mask_mod": (lambda: flex_attention(Q, Q, Q, mask_mod=max), "'mask_mod' | block_mask=create_block_mask"),
    "flex dropout_p": (lambda: flex_attention(Q, Q, Q, dropout_p=0.1), "'dropout_p' | no call drops anything"),
    "flex q": (lambda: flex_attention(q=Q, k=Q, v=Q), "'q' | here it is query"),
    "flex without value": (lambda: flex_attention(Q, Q), "needs query, key, value | nothing for value"),
    "flex too many": (lambda: flex_attention(Q, Q, Q, *[None] * 7), "takes 9 by position; got 10 | as return_aux="),
    "reference is_causal": (lambda: reference(Q, K, K, is_causal=True), "'is_causal' | here it is causal"),
    "reference backend": (lambda: reference(Q, K, K, backend="cuda"), "'backend' | fmha(..., backend=...)"),
    "reference positional": (lambda: reference(Q, K, K, True), "takes 3 by position; got 4 | as causal="),
    "reference_backward": (
        lambda: multiattn.reference_backward(Q, K, K, Q),
        "needs q, k, v, out, lse, dout | lse, dout",
    ),
    "padded attention_mask": (
        lambda: fmha_padded(Q, K, K, attention_mask=LSE),
        "'attention_mask' | here it is kv_mask",
    ),
    "padded key_padding_mask": (lambda: fmha_padded(Q, K, K, key_padding_mask=LSE), "kv_mask=~key_padding_mask"),
    "padded without mask": (lambda: fmha_padded(Q, K, K), "needs q, k, v, kv_mask; got None or nothing for kv_mask"),
    "padded bias": (lambda: fmha_padded(Q, K, K, bias=Q, **PADDED), "'bias' | multiattn.fmha has more options"),
    "merge pairs": (lambda: merge((Q, LSE), (Q, LSE)), "needs out_a, lse_a, out_b, lse_b | nothing for out_b, lse_b"),
    "layer dropout": (lambda: nn.Attention(64, 4, dropout=0.1), "Attention() got | 'dropout' | no call drops anything"),
    "layer batch_first": (
        lambda: nn.Attention(64, 4, batch_first=True),
        "'batch_first' | x is always [B, S, embed_dim]",
    ),
    "layer q, k, v": (lambda: layer(X, X, X), "Attention.forward() takes 2 by position; got 3"),
    "layer padding": (lambda: layer(X, key_padding_mask=X), "'key_padding_mask' | bias=~mask[:, None, None, :]"),
    "layer attn_mask": (lambda: layer(X, attn_mask=X), "'attn_mask' | bias, bool | [B|1, num_heads|1, Sq|1, Skv|1]"),
    "flash cache seqlens_kv": (lambda: over_cache(seqlens_kv=LENGTHS), "'seqlens_kv'; here it is cache_seqlens"),
    "flash is_causal": (lambda: flash(is_causal=True), "'is_causal'; here it is causal"),
}

VALUES = {
    "heads of v": (lambda: fmha(Q, K, Q), "k=(2, 2, 8, 16), v=(2, 4, 8, 16) | must have one shape | repeat the heads"),
    "scale a word": (lambda: fmha(Q, K, K, scale="auto"), "got str | a float or None | leave it out"),
    "scale of heads": (lambda: fmha(Q, K, K, scale=torch.ones(4)), "Tensor of shape (4,) | multiply q by a tensor"),
    "sinks a number": (lambda: fmha(Q, K, K, sinks=0.0), "got float | a torch.Tensor or None | torch.full("),
    "backend None": (lambda: fmha(Q, K, K, backend=None), 'got NoneType | must be a string | leave it out for "auto"'),
    "bias too short": (
        lambda: fmha(Q, K, K, bias=bf16(2, 4, 8, 4)),
        "got shape (2, 4, 8, 4) | with (2, 4, 8, 8) | dimension 3 is 4: make it 8",
    ),
    "bias of kv heads": (lambda: fmha(Q, K, K, bias=bf16(2, 2, 8, 8)), "(2, 2, 8, 8) | repeat_interleave(2, dim=1)"),
    "lengths a number": (
        lambda: fmha_kvcache(ONE, CACHE, CACHE, seqlens_kv=3),
        "got int | a torch.Tensor | torch.full((B,), seqlens_kv, dtype=torch.int32, device=q.device)",
    ),
    "lengths of one": (lambda: fmha_kvcache(ONE, CACHE, CACHE, seqlens_kv=LENGTHS[:1]), "(1,) | a number for each"),
    "max_seqlen a float": (
        lambda: fmha_varlen(ROWS, ROWS, ROWS, **{**PACKED, "max_seqlen_q": 5.0}),
        "got float | must be an int | the length of the longest sequence",
    ),
    "heads before rows": (lambda: fmha_varlen(*[ROWS.mT.contiguous().mT.transpose(0, 1)] * 3, **PACKED), "[T, H, D]"),
    "out, out, lse, lse": (lambda: merge(Q.float(), LSE, LSE, Q.float()), "out_b | [2, 4, 8, 16] | behind its out"),
    "max_scores": (lambda: flex_attention(Q, Q, Q, return_aux=64), "return_aux: got 64 | allowed AuxRequest"),
    "lse twice": (
        lambda: flex_attention(Q, Q, Q, return_lse=True, return_aux=AuxRequest(lse=True)),
        "got return_lse beside it | allowed AuxRequest",
    ),
    "compute_dtype a word": (lambda: reference(Q, K, K, compute_dtype="float64"), "got 'float64' | torch.float64"),
    "arch a number": (lambda: multiattn.explain(Q, K, K, arch=90), 'got int | must be a string | "sm90"'),
    "explain a shape": (lambda: multiattn.explain("2,16,64,64"), "got str | a torch.Tensor or a multiattn.Problem"),
    "layer of words": (lambda: nn.Attention("64", 4), "embed_dim | got str | must be an int"),
    "layer without heads": (lambda: nn.Attention(64, 0), "num_heads: got 0 | allowed 1 and more"),
    "layer with softcap 0": (lambda: nn.Attention(64, 4, softcap=0.0), "softcap: got 0.0 | positive | None"),
    "layer of a backend": (lambda: nn.Attention(64, 4, backend="fa3"), "got 'fa3' | allowed auto, reference, triton"),
    "layer of another width": (lambda: layer(bf16(2, 8, 32)), "got shape (2, 8, 32) | [B, S, 64] | a linear layer"),
    "layer of an array": (lambda: layer(numpy.zeros((2, 8, 64))), "x | got numpy.ndarray | torch.from_numpy"),
    "flash window": (lambda: flash(window_size=128), "got 128 | a pair (left, right) | are (n - 1, 0)"),
    "flash window of three": (lambda: flash(window_size=(4, 0, 1)), "got (4, 0, 1) | a pair (left, right)"),
    "flash cache pages": (lambda: over_cache(page_table=LENGTHS), "page_table: got shape [2] | [B, pages]"),
    "flash cache softcap": (lambda: over_cache(softcap=torch.ones(4)), "softcap | of shape (4,) | one number for all"),
    "dropout None": (lambda: fmha(Q, K, K, dropout_p=None), "dropout_p | got NoneType | give 0.0"),
    "flash heads": (
        lambda: flash_attn.flash_attn_func(bf16(2, 8, 4, 16), *[bf16(2, 8, 3, 16)] * 2),
        "q=(2, 8, 4, 16), k=(2, 8, 3, 16) | allowed [B, S, H, D] | x.transpose(-3, -2)",
    ),
    "flash lengths first": (
        lambda: flash_attn.flash_attn_varlen_func(ROWS, ROWS, ROWS, 5, 5, STARTS, STARTS),
        "max_seqlen_q: got a tensor of shape [3] | allowed an int | the order is cu_seqlens_q",
    ),
    "states of other heads": (
        lambda: flashinfer.merge_state(*STATE, STATE[0][:, :2], STATE[1][:, :2]),
        "v_b: got shape [7, 2, 16] | allowed [7, 4, 16] | other keys",
    ),
    "padded floats": (
        lambda: fmha_padded(Q, K, K, kv_mask=torch.zeros(2, 8)),
        "torch.float32 | torch.bool and integers",
    ),
    "padded list": (lambda: fmha_padded(Q, K, K, kv_mask=[[True] * 8] * 2), "got list | a torch.Tensor or None"),
    "padded rows": (lambda: fmha_padded(ROWS, ROWS, ROWS, **PADDED), "(9, 4, 16) | [B, H, S, D] | fmha_varlen"),
}

SCORES = {
    "three arguments": (lambda: scored(lambda s, i, j: s), "(s, i, j) | (score, b, h, q_idx, kv_idx) -> score"),
    "a mask_mod": (lambda: scored(lambda b, h, i, j: i >= j), "(b, h, i, j) | block_mask=create_block_mask"),
    "NumPy": (lambda: scored(lambda s, b, h, i, j: numpy.tanh(s)), "__array__ | PyTorch's functions, as torch.tanh"),
    "no return": (lambda: scored(lambda s, b, h, i, j: None), "NoneType | return the changed score"),
    "a tensor inside": (
        lambda: scored(lambda s, b, h, i, j: s + torch.zeros(8)[j]),
        "of shape (8,) | allowed numbers | make a tensor outside, and capture it",
    ),
}


@pytest.mark.parametrize("name", [*NAMES, *VALUES, *SCORES])
def test_an_error_says_what_came_and_what_to_write(name):
    call, told = (NAMES | VALUES | SCORES)[name]
    with pytest.raises(UntraceableError if name in SCORES else (TypeError, ValueError)) as caught:
        call()
    for piece in told.split(" | "):
        assert piece in str(caught.value)


@pytest.mark.parametrize(("text", "meant"), [("128", "127:0"), ("-1:0", "N-1:0"), ("a:b", "N-1:0")])
def test_a_window_on_the_command_line_is_a_pair(text, meant):
    with pytest.raises(Exception, match=f"got '{text}'; allowed LEFT:RIGHT.* are {meant}"):
        window(text)


@pytest.mark.parametrize(
    ("main", "given", "own"),
    [
        (__main__.main, ["explain", "--shape", "1,2,64,64", "--is-causal"], "[--causal]"),
        (cli.main, ["report", "--is-causal"], "[--markdown]"),
    ],
)
def test_a_command_shows_its_own_options_for_one_that_it_has_not(main, given, own, capsys):
    with pytest.raises(SystemExit):
        main(given)
    told = capsys.readouterr().err
    assert own in told
    assert f"{given[0]}: error: got --is-causal; allowed the options above" in told
