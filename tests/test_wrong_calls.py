"""Calls in the words of other libraries, and values of another kind: each is told what came and what to write."""

import numpy
import pytest
import torch
from refused import assert_refused, rows
from torch.nn.attention.flex_attention import AuxRequest

import multiattn
from bench import cli
from multiattn import __main__, explain, flex_attention, fmha, fmha_kvcache, fmha_varlen, merge, nn, reference
from multiattn.inspect.options import window
from multiattn.integrations import flash_attn, flashinfer
from multiattn.integrations.padding import fmha_padded
from multiattn.score.trace import UntraceableError


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def flash(**changes):
    """A call of FlashAttention's function, [B, S, H, D]."""
    return flash_attn.flash_attn_func(**{"q": bf16(2, 8, 4, 16), **dict.fromkeys("kv", bf16(2, 8, 2, 16)), **changes})


def flash_varlen(*lengths, **options):
    """A call of its function of packed rows, [T, H, D]."""
    return flash_attn.flash_attn_varlen_func(ROWS, ROWS, ROWS, *lengths, **options)


def over_cache(**changes):
    """A call of its function over a cache, [B, S, H, D]."""
    caches = dict.fromkeys(("k_cache", "v_cache"), bf16(2, 32, 2, 16))
    given = {"q": bf16(2, 1, 4, 16), **caches, "cache_seqlens": LENGTHS, **changes}
    return flash_attn.flash_attn_with_kvcache(**given)


Q, K, X = bf16(2, 4, 8, 16), bf16(2, 2, 8, 16), bf16(2, 8, 64)
ROWS, STARTS, LSE = bf16(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32), torch.zeros(2, 4, 8)
CACHE, ONE, LENGTHS = bf16(2, 2, 32, 16), bf16(2, 4, 1, 16), torch.tensor([3, 4], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 5, "max_seqlen_kv": 5}
TOKENS, NEW = torch.ones(2, 8, dtype=torch.bool), bf16(2, 1, 2, 16)
STATE, FEWER = ((bf16(7, heads, 16), torch.zeros(7, heads)) for heads in (4, 2))
AUX, FOR_TABLE = AuxRequest(lse=True), (STARTS, STARTS, 5, 5)
OF_20 = dict.fromkeys(("q", "k_cache", "v_cache"), bf16(2, 1, 2, 20))
BYTES = dict.fromkeys(("k_cache", "v_cache"), bf16(2, 32, 2, 16).to(torch.int8))
qkvpacked = flash_attn.flash_attn_qkvpacked_func


def varlen(**options):
    return fmha_varlen(ROWS, ROWS, ROWS, **PACKED, **options)


def kvcache(**options):
    return fmha_kvcache(ONE, CACHE, CACHE, seqlens_kv=LENGTHS, **options)


def padded(**options):
    return fmha_padded(Q, K, K, **options)


def scored(score_mod):
    return fmha(Q, K, K, score_mod=score_mod)


def with_own_tensor(s, b, h, i, j):
    return s + torch.zeros(8)[j]


def layer(*inputs, **options):
    return nn.Attention(64, 4, dtype=torch.bfloat16)(*inputs, **options)


NAMES = {
    TypeError: [
        (lambda: fmha(Q, K, K, casual=True), "'casual' | unexpected keyword | it takes causal"),
        (lambda: fmha(Q, K, K, frobnicate=True), "'frobnicate' | it takes causal, window, scale"),
        (lambda: fmha(query=Q, key=K, value=K), "'query' | unexpected keyword | here it is q"),
        (lambda: fmha(Q, K, K, is_causal=True), "'is_causal' | here it is causal"),
        (lambda: fmha(Q, K, K, attn_mask=Q), "'attn_mask' | here it is bias | or block_mask"),
        (lambda: fmha(Q, K, K, attention_mask=Q), "'attention_mask' | here it is bias= | fmha_padded"),
        (lambda: fmha(Q, K, K, key_padding_mask=Q), "'key_padding_mask' | here it is bias=~ | fmha_padded"),
        (lambda: explain(Q, K, K, mask=Q), "explain() got | 'mask' | here it is bias | fmha_padded"),
        (lambda: fmha(Q, K, K, attention_dropout=0.1), "'attention_dropout' | dropout_p, which may be 0.0 alone"),
        (lambda: fmha(Q, K, K, p=0.1), "'p' | dropout_p, which may be 0.0"),
        (lambda: fmha(Q, K, K, window_size=(1, 0)), "'window_size' | here it is window"),
        (lambda: fmha(Q, K, K, enable_gqa=True), "here it is nothing: k and v may always have fewer heads"),
        (lambda: fmha(Q, K, K, softmax_scale=0.5), "'softmax_scale' | here it is scale"),
        (lambda: fmha(Q, K, K, need_weights=True), "'need_weights' | never in memory; return_lse"),
        (lambda: fmha(Q, K, K, out=Q), "'out' | only fmha_kvcache writes"),
        (lambda: fmha(Q, K, K, cu_seqlens_q=STARTS), "'cu_seqlens_q'; fmha_varlen takes packed"),
        (lambda: fmha(Q, K, K, page_table=STARTS), "'page_table'; fmha_kvcache takes keys in a cache"),
        (lambda: fmha(Q, K, K, training=True), "'training' | no call drops anything"),
        (lambda: varlen(cu_seqlens=STARTS, max_seqlen=5), "'cu_seqlens' | cu_seqlens_q and cu_seqlens_kv"),
        (lambda: varlen(cu_seqlens_k=STARTS), "'cu_seqlens_k' | unexpected keyword | here it is cu_seqlens_kv"),
        (lambda: varlen(max_seqlen_k=3), "'max_seqlen_k' | unexpected keyword | here it is max_seqlen_kv"),
        (lambda: kvcache(cache_seqlens=LENGTHS), "'cache_seqlens' | unexpected keyword | here it is seqlens_kv"),
        (lambda: kvcache(seqused_k=None), "'seqused_k' | here it is seqlens_kv"),
        (lambda: kvcache(block_table=STARTS), "'block_table' | here it is page_table"),
        (lambda: kvcache(cache_batch_idx=None), "'cache_batch_idx' | here it is page_table"),
        (lambda: kvcache(s_aux=None), "'s_aux' | here it is sinks"),
        (lambda: kvcache(scheduler_metadata=None), "'scheduler_metadata' | here it is nothing"),
        (lambda: kvcache(k=ONE), "'k' | write new keys | first"),
        (lambda: kvcache(attn_mask=ONE), "'attn_mask' | bias, [B|1, Hq|1, Sq|1, n] of all keys | or of the last n"),
        (lambda: kvcache(k_descale=ONE), "'k_descale' | k_scale"),
        (lambda: kvcache(q_descale=ONE), "'q_descale' | q has 16 bits, and no scale"),
        (lambda: flex_attention(Q, Q, Q, is_causal=True), "'is_causal' | create_block_mask | causal=True"),
        (lambda: flex_attention(Q, Q, Q, mask_mod=max), "'mask_mod' | block_mask=create_block_mask"),
        (lambda: flex_attention(Q, Q, Q, dropout_p=0.1), "'dropout_p' | no call drops anything"),
        (lambda: flex_attention(q=Q, k=Q, v=Q), "'q' | here it is query"),
        (lambda: flex_attention(Q, Q), "needs query, key, value | nothing for value"),
        (lambda: flex_attention(Q, Q, Q, *[None] * 7), "takes 9 by position; got 10 | as return_aux="),
        (lambda: reference(Q, K, K, is_causal=True), "'is_causal' | here it is causal"),
        (lambda: reference(Q, K, K, backend="cuda"), "'backend' | fmha(..., backend=...)"),
        (lambda: reference(Q, K, K, True), "takes 3 by position; got 4 | as causal="),
        (lambda: multiattn.reference_backward(Q, K, K, Q), "needs q, k, v, out, lse, dout | lse, dout"),
        (lambda: padded(attention_mask=LSE), "'attention_mask' | here it is kv_mask"),
        (lambda: padded(key_padding_mask=LSE), "kv_mask=~key_padding_mask"),
        (lambda: padded(), "needs q, k, v, kv_mask; got None or nothing for kv_mask"),
        (lambda: padded(bias=Q, kv_mask=TOKENS), "'bias' | multiattn.fmha has more options"),
        (lambda: merge((Q, LSE), (Q, LSE)), "needs out_a, lse_a, out_b, lse_b | nothing for out_b, lse_b"),
        (lambda: nn.Attention(64, 4, dropout=0.1), "Attention() got | 'dropout' | no call drops anything"),
        (lambda: nn.Attention(64, 4, batch_first=True), "'batch_first' | x is always [B, S, embed_dim]"),
        (lambda: layer(X, X, X), "Attention.forward() takes 2 by position; got 3"),
        (lambda: layer(X, key_padding_mask=X), "'key_padding_mask' | bias=~mask[:, None, None, :]"),
        (lambda: layer(X, attn_mask=X), "'attn_mask' | bias, bool | [B|1, num_heads|1, Sq|1, Skv|1]"),
        (lambda: over_cache(seqlens_kv=LENGTHS), "'seqlens_kv'; here it is cache_seqlens"),
        (lambda: flash(is_causal=True), "'is_causal'; here it is causal"),
        (lambda: flash(windows=(1, 1)), "flash_attn_func() got an unexpected keyword argument 'windows'"),
    ]
}
VALUES = {
    TypeError: [
        (lambda: reference(Q, K, K, compute_dtype="float64"), "got 'float64' | torch.float64"),
        (lambda: nn.Attention("64", 4), "embed_dim | got str | must be an int"),
        (lambda: layer(numpy.zeros((2, 8, 64))), "x | got numpy.ndarray | torch.from_numpy"),
        (lambda: flash(window_size=128), "got 128 | a pair (left, right) | are (n - 1, 0)"),
        (lambda: flash(window_size=(4, 0, 1)), "got (4, 0, 1) | a pair (left, right)"),
        (lambda: flash(softcap=torch.ones(4)), "softcap | of shape (4,) | one number for all"),
        (lambda: over_cache(page_table=LENGTHS, block_table=LENGTHS), "two names of one tensor"),
        (lambda: over_cache(k=NEW), "k and v must both be given"),
        (lambda: over_cache(cache_seqlens=None, k=NEW, v=NEW), "cache_seqlens must say"),
        (lambda: flash_varlen(5, 5, STARTS, STARTS), "max_seqlen_q: got a tensor of shape [3] | an int | the order is"),
        (lambda: padded(kv_mask=torch.zeros(2, 8)), "torch.float32 | torch.bool and integers"),
        (lambda: padded(kv_mask=[[True] * 8] * 2), "got list | a torch.Tensor or None"),
    ],
    ValueError: [
        (lambda: flex_attention(Q, Q, Q, return_aux=64), "return_aux: got 64 | allowed AuxRequest"),
        (lambda: flex_attention(Q, K, K), "got False with Hq=4, Hkv=2 | as many heads of key | allowed True"),
        (lambda: flex_attention(Q, Q, Q, return_aux=AuxRequest(max_scores=True)), "return_aux: got | max_scores=True"),
        (lambda: flex_attention(Q, Q, Q, return_lse=True, return_aux=AUX), "got return_lse beside it | AuxRequest"),
        (lambda: merge(Q.float(), LSE, LSE, Q.float()), "out_b | [2, 4, 8, 16] | behind its out"),
        (lambda: merge(Q, LSE, Q[:, :, :4], LSE[..., :4]), "[2, 4, 4, 16] | allowed [2, 4, 8, 16] | same queries"),
        (lambda: merge(Q, LSE.mT, Q, LSE), "got shape [2, 8, 4] | allowed [2, 4, 8] | return_lse=True"),
        (lambda: nn.Attention(64, 4, 3), "got 4 and 3 | multiple of num_kv_heads | num_kv_heads=None"),
        (lambda: nn.Attention(48, 5), "multiple of num_heads without head_dim; got 48, 5"),
        (lambda: nn.Attention(64, 0), "num_heads: got 0 | allowed 1 and more"),
        (lambda: nn.Attention(64, 4, window=(-1, 0)), "window's left: got -1"),
        (lambda: nn.Attention(64, 4, softcap=0.0), "softcap: got 0.0 | positive | None"),
        (lambda: nn.Attention(64, 4, backend="fa3"), "got 'fa3' | allowed auto, reference, triton"),
        (lambda: layer(bf16(2, 8, 32)), "got shape (2, 8, 32) | [B, S, 64] | a linear layer"),
        (lambda: over_cache(page_table=LENGTHS), "page_table: got shape [2] | [B, pages]"),
        (lambda: over_cache(k=NEW, v=bf16(2, 2, 2, 16)), "v: got [2, 2, 2, 16], | Snew, 2"),
        (lambda: over_cache(k=NEW[:, :, :1], v=NEW[:, :, :1]), "k: got | allowed [2, Snew, 2, 16"),
        (lambda: over_cache(q=bf16(2, 4, 16)), "q must have rank 4, [B, S, H, D]; got shape [2, 4, 16]"),
        (lambda: flash(q=ROWS), "q must have rank 4, [B, S, H, D]; got shape [9, 4, 16]"),
        (lambda: flash(k=bf16(2, 8, 3, 16)), "k=(2, 8, 3, 16) | allowed [B, S, H, D] | x.transpose(-3, -2)"),
        (lambda: qkvpacked(ROWS), "qkv: got shape [9, 4, 16]; allowed [B, S, 3, H, D]"),
        (lambda: qkvpacked(bf16(2, 8, 4, 16), num_heads_q=3), "num_heads_q=3; allowed [B, S, num_heads_q + 2 * Hkv"),
        (lambda: flash_varlen(*FOR_TABLE, block_table=STARTS[None]), "k must have | [pages, page, H, D]; got shape [9"),
        (lambda: flashinfer.merge_state(*STATE, *FEWER), "v_b: got shape [7, 2, 16] | allowed [7, 4, 16] | other keys"),
        (lambda: padded(kv_mask=TOKENS[:, :5]), "kv_mask"),
        (lambda: fmha_padded(Q, K[:, :, :4], K[:, :, :4], kv_mask=TOKENS[:, :4], causal=True), "Sq <= Skv"),
        (lambda: fmha_padded(ROWS, ROWS, ROWS, kv_mask=TOKENS), "(9, 4, 16) | [B, H, S, D] | fmha_varlen"),
    ],
    NotImplementedError: [
        (lambda: flash(dropout_p=0.1), "flash_attn_func: dropout_p: got 0.1; allowed 0.0"),
        (lambda: flash(attention_chunk=64), "flash_attn_func: attention_chunk: got 64; allowed 0"),
        (lambda: flash(qv=torch.ones(2, 3)), "flash_attn_func: qv: got a tensor of shape [2, 3]; allowed None"),
        (lambda: flash(k_descale=torch.ones(2, 2)), "k_descale: got a tensor of shape [2, 2]; allowed None"),
        (lambda: flash_varlen(STARTS, STARTS, 5, 5, seqused_k=LENGTHS), "seqused_k: got a tensor of shape [2]"),
        (lambda: over_cache(rotary_cos=torch.ones(5, 8)), "rotary_cos: got a tensor of shape [5, 8]; allowed"),
        (lambda: over_cache(cache_leftpad=LENGTHS), "cache_leftpad: got a tensor"),
        (lambda: over_cache(attention_chunk=64), "attention_chunk: got 64; allowed 0"),
        (
            lambda: over_cache(k_descale=torch.ones(2, 2)),
            "k_descale: got a tensor | allowed None or 1 for a cache of torch.",
        ),
        (lambda: over_cache(q_descale=torch.ones(2, 2)), "q_descale: got a tensor of shape [2, 2]; allowed None or 1"),
        (lambda: over_cache(**BYTES, q_descale=0.5), "q_descale: got 0.5; allowed None or 1, as q is fp16 or bf16"),
        (lambda: over_cache(qv=torch.ones(2, 3)), "flash_attn_with_kvcache: qv: got a tensor of shape [2, 3]"),
        (lambda: over_cache(v_cache=bf16(2, 32, 2, 12)), "v_cache: got head_dim 12; allowed multiples of 8, as a"),
        # A cache is never copied.
        (lambda: over_cache(**OF_20), "k_cache: got head_dim 20; allowed multiples of 8, as a cache"),
    ],
    UntraceableError: [
        (lambda: scored(lambda s, i, j: s), "(s, i, j) | (score, b, h, q_idx, kv_idx) -> score"),
        (lambda: scored(lambda b, h, i, j: i >= j), "(b, h, i, j) | block_mask=create_block_mask"),
        (lambda: scored(lambda s, b, h, i, j: numpy.tanh(s)), "__array__ | PyTorch's functions, as torch.tanh"),
        (lambda: scored(lambda s, b, h, i, j: None), "NoneType | return the changed score"),
        (lambda: scored(with_own_tensor), "of shape (8,) | allowed numbers | make a tensor outside, and capture it"),
    ],
}


@pytest.mark.parametrize(("kind", "call", "told"), rows(NAMES, VALUES))
def test_an_error_says_what_came_and_what_to_write(kind, call, told):
    assert_refused(kind, call, told)


@pytest.mark.parametrize("function", [explain, multiattn.fmha_backward, fmha_varlen, multiattn.fmha_varlen_backward])
def test_every_call_knows_the_names_of_fmha_and_tells_its_own(function):
    assert_refused(TypeError, lambda: function(Q, is_causal=True), f"{function.__name__}() got | here it is causal")


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
