"""Attention over caches in fp64, as `multiattn.fmha_kvcache`, and as the modules of peers have it."""

import math

import torch

from bench import peers_decode


def attended(q, k, v, *, seqlens_kv, page_table=None, cu_seqlens_q=None, causal=False, **_):
    """Attention over a cache in fp64, a sequence at a time; q ``[B, Hq, Sq, D]`` or packed."""
    out = torch.empty_like(q)
    for entry, length in enumerate(seqlens_kv.tolist()):
        own = slice(None) if cu_seqlens_q is None else slice(*cu_seqlens_q[entry : entry + 2].tolist())
        rows = q[entry] if cu_seqlens_q is None else q[own].transpose(0, 1)
        keys, values = (
            it[entry] if page_table is None else torch.cat([it[page] for page in page_table[entry].tolist()], dim=1)
            for it in (k, v)
        )
        keys, values = (it[:, :length].double() for it in (keys, values))
        keys, values = (it.repeat_interleave(rows.shape[0] // it.shape[0], dim=0) for it in (keys, values))
        scores = rows.double() @ keys.mT / math.sqrt(q.shape[-1])
        if causal:
            places = torch.arange(rows.shape[1])[:, None] + length - rows.shape[1]
            scores = scores.masked_fill(torch.arange(length) > places, -math.inf)
        result = (scores.softmax(-1) @ values).to(q.dtype)
        if cu_seqlens_q is None:
            out[entry] = result
        else:
            out[own] = result.transpose(0, 1)
    return out


def of_flash_attention(q, k, v, causal=False, packed=None, table=None, lengths=None):
    """Attention of ``[B, S, H, D]`` or packed, by what flash-attn's functions are given."""
    swap = (lambda it: it) if packed is not None else (lambda it: it.transpose(1, 2))
    options = {"seqlens_kv": lengths, "page_table": table, "cu_seqlens_q": packed, "causal": causal}
    return swap(attended(swap(q), k.transpose(1, 2), v.transpose(1, 2), **options))


def fa3(q, k, v, *, cache_seqlens, num_splits, causal, page_table=None, cu_seqlens_q=None, max_seqlen_q=None):
    assert num_splits in peers_decode.SPLITS
    assert (cu_seqlens_q is None) == (max_seqlen_q is None)
    return of_flash_attention(q, k, v, causal, cu_seqlens_q, page_table, cache_seqlens)


def fa4(q, k, v, *, seqused_k, max_seqlen_q, causal, page_table=None, cu_seqlens_q=None):
    return of_flash_attention(q, k, v, causal, cu_seqlens_q, page_table, seqused_k), None


class FakeWrapper:
    """Both wrappers of FlashInfer: a plan, then runs of ``[T, H, D]``."""

    def __init__(self, workspace, layout, use_cuda_graph, *buffers, **_):
        assert (layout, use_cuda_graph) == ("NHD", True)
        assert not workspace.any()
        self.is_prefill = len(buffers) == 4 and not isinstance(buffers[0], bool)

    def plan(self, *args, q_len_per_req=1, causal=None, q_data_type, kv_data_type):
        starts = args[0] if self.is_prefill else None
        indptr, indices, last, heads, heads_kv, head_dim, page = args[1:] if self.is_prefill else args
        counts = indptr.diff()
        self.lengths = (counts - 1) * page + last
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, begin, count in zip(self.table, indptr.tolist(), counts.tolist(), strict=False):
            row[:count] = indices[begin : begin + count]
        queries = torch.full_like(last, q_len_per_req)
        self.starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)) if starts is None else starts
        self.sizes = heads, heads_kv, head_dim

    def run(self, q, cache):
        k, v = (it.transpose(1, 2) for it in cache)
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.sizes
        options = {"page_table": self.table, "cu_seqlens_q": self.starts, "causal": True}
        return attended(q, k, v, seqlens_kv=self.lengths, **options)


class FakeNode:
    """A tensor of cuDNN's graph."""

    def __init__(self, dim=None, stride=None):
        self.dim, self.stride, self.ragged = dim, stride, None

    def set_output(self, _):
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_ragged_offset(self, node):
        self.ragged = node


class FakeGraph:
    """A graph of cuDNN's frontend; `refused` is what building it raises."""

    refused = None

    def __init__(self, **_):
        self.asked = {}

    def tensor_like(self, tensor):
        return FakeNode(tuple(tensor.shape), tensor.stride())

    def tensor(self, *, dim, stride, data_type):
        return FakeNode(dim, stride)

    def sdpa(self, **asked):
        self.asked, self.result = asked, FakeNode()
        return self.result, None

    def build(self, _):
        if self.refused:
            raise self.refused

    def get_workspace_size(self):
        return 0

    def execute(self, pack, workspace, handle):
        asked, out = self.asked, pack[self.result]
        q, lengths = pack[asked["q"]], pack[asked["seq_len_kv"]].flatten()
        tables = [pack[asked[name]] for name in asked if name.endswith("_table")]
        packed = None
        if (ragged := asked["q"].ragged) is not None:
            assert self.result.ragged is ragged
            packed = pack[ragged].flatten() // q.stride(0)
        queries = pack[asked["seq_len_q"]].flatten()
        assert asked["q"].dim[2] == queries.max()
        causal = "diagonal_alignment" in asked
        options = {"page_table": tables[0][:, 0, :, 0] if tables else None, "cu_seqlens_q": packed, "causal": causal}
        out.copy_(attended(q, pack[asked["k"]], pack[asked["v"]], seqlens_kv=lengths, **options))


class FakeRefusal(Exception):  # noqa: N818
    """cudnnGraphNotSupportedError."""


def fake_modules():
    """The peers' modules by name."""

    class Names:
        def __getattr__(self, name):
            return name

    cudnn = {
        "pygraph": FakeGraph,
        **dict.fromkeys(("data_type", "heur_mode", "diagonal_alignment"), Names()),
        "cudnnGraphNotSupportedError": FakeRefusal,
        "create_handle": object,
        "set_stream": lambda handle, stream: None,
        "backend_version": lambda: 91900,
    }
    return {
        "cudnn": cudnn,
        "flash_attn_interface": {"flash_attn_with_kvcache": fa3},
        "flash_attn.cute": {"flash_attn_varlen_func": fa4},
        "flashinfer": dict.fromkeys(
            ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"), FakeWrapper
        ),
    }
