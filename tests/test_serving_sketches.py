"""The sketches of docs/serving.md: their calls, with stand-ins for the servers' classes that they build on."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from multiattn import fmha_kvcache

CODE = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "serving.md").read_text(), re.DOTALL)
PAGES, PAGE, HEADS, HEADS_KV, HEAD_DIM = 9, 4, 4, 2, 16
LENGTHS = torch.tensor([7, 12], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 4], dtype=torch.int32)
TABLE = torch.tensor([[3, 1, 0], [8, 2, 5]], dtype=torch.int32)


class Theirs:
    """A class of a server's: what a sketch does not take comes here."""

    def forward(self, *_, **__):
        return "theirs"

    forward_decode = forward_extend = forward
    kv_cache_dtype = "auto"


def sketch(monkeypatch, code, **modules):
    """The names of a sketch, whose imports find these modules."""
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    found = {}
    exec(compile(code, "docs/serving.md", "exec"), found)
    return found


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def expected(q, keys, values, **options):
    where = {"seqlens_kv": LENGTHS, "page_table": TABLE, "cu_seqlens_q": STARTS, "max_seqlen_q": 3}
    return fmha_kvcache(q, keys, values, causal=True, scale=0.2, softcap=20.0, **where, **options)


SCALES = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}


@pytest.mark.parametrize("kind", ["plain", "fp8", "slopes", "cascade"])
def test_vllm(monkeypatch, kind):
    plain = kind != "cascade"
    registered = []
    backends = {"FlashAttentionBackend": object, "FlashAttentionImpl": Theirs}
    registry = {
        "AttentionBackendEnum": SimpleNamespace(CUSTOM=1),
        "register_backend": lambda *it: registered.append(it),
    }
    modules = {"flash_attn": backends, "registry": registry}
    names = {f"vllm.v1.attention.backends.{name}": it for name, it in modules.items()}
    found = sketch(monkeypatch, CODE[0], **names)
    found["register"]()
    assert registered == [(1, "my_plugin.vllm_backend.MultiattnBackend")]
    layer = found["MultiattnBackend"].get_impl_cls()()
    assert not layer.supports_quant_query_input
    slopes = torch.linspace(0, 1, HEADS) if kind == "slopes" else None
    layer.attn_type, layer.alibi_slopes, layer.dcp_world_size = "decoder", slopes, 1
    layer.head_size, layer.sliding_window, layer.scale = HEAD_DIM, (4, 0), 0.2
    layer.logits_soft_cap, layer.sinks = 20.0, torch.ones(HEADS)
    lengths = {"seq_lens": LENGTHS, "query_start_loc": STARTS, "max_query_len": 3, "num_actual_tokens": 4}
    asked = {"use_cascade": not plain, "causal": True, "max_num_splits": 0}
    metadata = SimpleNamespace(**lengths, **asked, block_table=TABLE)
    q, cache = normal(6, HEADS, HEAD_DIM), normal(PAGES, HEADS_KV, PAGE, 2 * HEAD_DIM)
    output, given, more = torch.full_like(q, 7.0), cache, {"alibi_slopes": slopes}
    if kind == "fp8":
        layer.kv_cache_dtype, more = "fp8_e4m3", SCALES
        cache = cache.to(torch.float8_e4m3fn)
        given = cache.view(torch.uint8)
    theirs = SimpleNamespace(_k_scale=SCALES["k_scale"], _v_scale=SCALES["v_scale"])
    result = layer.forward(theirs, q, None, None, given, metadata, output)
    if not plain:
        assert result == "theirs"
        return
    wanted = expected(q[:4], *cache.chunk(2, dim=-1), window=(4, 0), sinks=torch.ones(HEADS), **more)
    assert torch.equal(output[:4], wanted)
    assert bool((output[4:] == 7.0).all())
    assert not layer.forward(None, q, None, None, cache, None, output).any()


@pytest.mark.parametrize("name", ["forward_decode", "forward_extend"])
@pytest.mark.parametrize(("window", "dtype"), [(-1, torch.bfloat16), (-1, torch.float8_e4m3fn), (8, torch.bfloat16)])
def test_sglang(monkeypatch, name, window, dtype):
    registered, written = {}, []
    attention = "sglang.srt.layers.attention."
    modules = {
        f"{attention}flashattention_backend": {"FlashAttentionBackend": Theirs},
        f"{attention}attention_registry": {
            "register_attention_backend": lambda it: lambda kind: registered.setdefault(it, kind)
        },
        "sglang.srt.server_args": {"add_attention_backend_choices": written.extend},
    }
    sketch(monkeypatch, CODE[1], **modules)["register"]()
    assert written == ["multiattn"]
    q, both = normal(4, HEADS * HEAD_DIM), normal(2, PAGES * PAGE, HEADS_KV, HEAD_DIM).unbind(0)
    backend = registered["multiattn"]()
    both = tuple(it.to(dtype) for it in both)
    backend.use_mla, backend.page_size, backend.kv_cache_dtype = False, PAGE, dtype
    lengths = {"cache_seqlens_int32": LENGTHS, "cu_seqlens_q": STARTS, "max_seq_len_q": 3}
    backend.forward_metadata = SimpleNamespace(**lengths, page_table=TABLE)
    pool = SimpleNamespace(get_kv_buffer=lambda _: both, set_kv_buffer=lambda *it: written.append(it[1:4]))
    batch = SimpleNamespace(token_to_kv_pool=pool, out_cache_loc="places", spec_info=None)
    kind = {"is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"), "layer_id": 0}
    sizes = {"tp_q_head_num": HEADS, "tp_k_head_num": HEADS_KV, "head_dim": HEAD_DIM, "sliding_window_size": window}
    layer = SimpleNamespace(**kind, **sizes, scaling=0.2, logit_cap=20.0, **SCALES)
    result = getattr(backend, name)(q, "k", "v", layer, batch)
    if window == 8:
        assert result == "theirs"
        return
    assert written[1:] == [("places", "k", "v")]
    pages = (it.view(PAGES, PAGE, HEADS_KV, HEAD_DIM).transpose(1, 2) for it in both)
    more = SCALES if dtype.itemsize == 1 else {}
    assert torch.equal(result, expected(q.view(4, HEADS, HEAD_DIM), *pages, **more).flatten(1))
