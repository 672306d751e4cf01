"""transformers' static caches, whose lengths stay on the device, and continuous batching, beside eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from test_integrations_transformers import BATCH, CACHE, LENGTH, check, decoder, tokens  # noqa: E402
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function  # noqa: E402

import multiattn  # noqa: E402
import multiattn.integrations.transformers as hook  # noqa: E402
import multiattn.integrations.transformers_kinds as kinds  # noqa: E402
import multiattn.integrations.transformers_paged as paged  # noqa: E402

hook.register()
RELEASE = Version(transformers.__version__)
STEP = {"q_length": 1, "kv_length": 9, "allow_is_causal_skip": False, "device": torch.device("cpu")}


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of `fmha_kvcache`."""
    found = []
    for module in (kinds, paged):

        def spy(*args, function=module.fmha_kvcache, **options):
            found.append(options)
            return function(*args, **options)

        monkeypatch.setattr(module, "fmha_kvcache", spy)
    return found


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_steps_over_a_static_cache_take_lengths(name, calls):
    """Past the window, too; the prefill, whose length the host knows, takes none."""

    def logits(model):
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
        found = model.generate(tokens(length=5), output_logits=True, return_dict_in_generate=True, **options)
        return found.logits

    check(decoder(name), logits)
    lengths = [it["seqlens_kv"].tolist() for it in calls]
    expected = [min(length, 6) if name == "Mistral" else length for length in range(6, 11)]
    assert lengths == [[it] * BATCH for it in expected for _layer in range(2)]


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_steps_over_a_static_cache_of_padded_prompts_read_the_keys_in_use(name, calls):
    """The padding goes with the lengths, as a mask of keys; nothing waits for the device."""
    padding = torch.ones(BATCH, 5, dtype=torch.int64)
    padding[0, :2] = 0

    def logits(model):
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
        more = {"attention_mask": padding, "output_logits": True, "return_dict_in_generate": True}
        return model.generate(tokens(length=5), **more, **options).logits

    check(decoder(name), logits)
    lengths = [it["seqlens_kv"].tolist() for it in calls]
    expected = [min(length, 6) if name == "Mistral" else length for length in range(6, 11)]
    assert lengths == [[it] * BATCH for it in expected for _layer in range(2)]
    assert all(it["bias"].shape[1:3] == (1, 1) and it["bias"].dtype == torch.bool for it in calls)


def test_compiled_steps_need_no_other_code():
    """The length is a number on the device, and no shape depends on it."""
    model = decoder("Llama", layers=1)
    compiled = []

    def count(graph, _):
        compiled.append(graph)
        return graph.forward

    def logits(model):
        torch.compiler.reset()
        mine = model.config._attn_implementation != "eager"
        forward = torch.compile(model.forward, fullgraph=True, backend=count) if mine else model.forward
        cache = transformers.StaticCache(config=model.config, max_cache_len=30)
        found = [model(tokens()[:, :16], **{CACHE: cache}).logits]
        found += [forward(tokens()[:, at : at + 1], **{CACHE: cache}).logits for at in range(16, LENGTH)]
        return found

    with torch.no_grad():
        check(model, logits)
    assert len(compiled) == 1
    nodes = list(compiled[0].graph.nodes)
    assert any("kvcache" in str(it.target) for it in nodes)
    values = [it.meta.get("example_value") for it in nodes]
    sizes = [getattr(it, "shape", ()) for it in values if type(it) is not hook.LazyMask]
    assert all(len(it) < 4 or it[-1] != 30 for it in sizes)  # no mask of every score


def test_masks_of_a_step():
    """The tensor that tells them stays on the device, and has one shape at every step."""
    length = torch.tensor(4)
    mask = hook.make_mask(BATCH, q_offset=length, **STEP)
    assert (mask.kind, mask.told.tolist(), mask.shape) == ("lengths", [5] * BATCH, (BATCH, 1, 1, 9))
    window = {"mask_function": sliding_window_causal_mask_function(6), "local_size": 6}
    assert hook.make_mask(BATCH, q_offset=4, **STEP, **window).window == 6
    full = {"q_offset": 20, "kv_offset": 15, **window}
    mask = hook.make_mask(BATCH, **STEP | {"kv_length": 6}, **full)
    assert (mask.kind, mask.told.tolist(), mask.window) == ("lengths", [6] * BATCH, None)
    tokens_of = torch.ones(BATCH, 5, dtype=torch.int64)
    tokens_of[0, :2] = 0
    padded = hook.make_mask(BATCH, q_offset=length, attention_mask=tokens_of, **STEP)
    assert (padded.kind, padded.told.dtype, padded.told[0].tolist()) == (
        "lengths", torch.int32, [5, 0, 0, 1, 1, 1, 0, 0, 0, 0],
    )  # fmt: skip
    assert padded.visible()[0].tolist() == [[[False, False, True, True, True, False, False, False, False]]]
    other = {"mask_function": lambda *it: causal_mask_function(*it)}
    assert hook.make_mask(BATCH, q_offset=length, **STEP, **other).told.shape[1:] == (1, 1, 9)


@pytest.mark.parametrize("kind", ["gradient", "bias", "gradient of a bias"])
@pytest.mark.parametrize("window", [None, 3])
def test_lengths_beside_a_gradient_or_a_bias(kind, window, calls):
    """A position bias goes to the kernel of caches, which reads the keys in use; a gradient to the others."""
    seed = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(BATCH, 4, length, 8, generator=seed) for length in (2, 9, 9))
    bias = torch.randn(1, 4, 2, 9, generator=seed) if "bias" in kind else None
    (q if bias is None else bias).requires_grad_("gradient" in kind)
    lengths = torch.tensor([7, 4], dtype=torch.int32)
    mask = hook.LazyMask(lengths, "lengths", True, window, (BATCH, 1, 2, 9), torch.float32)
    out, _ = hook.attend(torch.nn.Module(), q, k, v, mask, position_bias=bias)
    band = {"causal": True, "window": None if window is None else (window - 1, None)}
    for row, length in enumerate(lengths):
        its_bias = None if bias is None else bias[..., :length]
        its = (q[row : row + 1], k[row : row + 1, :, :length], v[row : row + 1, :, :length])
        torch.testing.assert_close(out[row].transpose(0, 1), multiattn.reference(*its, bias=its_bias, **band)[0][0])
    assert out.requires_grad == ("gradient" in kind)
    assert bool(calls) == (kind == "bias")


def test_a_compiled_step_with_a_position_bias_has_one_graph_for_all_lengths():
    torch._dynamo.reset()
    graphs = []

    def step(q, k, v, lengths, bias):
        mask = hook.lazy_mask(lengths, "lengths", True, None, (BATCH, 1, 1, 9), q.dtype)
        return hook.attend(torch.nn.Module(), q, k, v, mask, position_bias=bias)[0]

    compiled = torch.compile(step, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    seed = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(BATCH, 4, length, 8, generator=seed) for length in (1, 9, 9))
    bias = torch.randn(1, 4, 1, 9, generator=seed)
    with torch.no_grad():
        for length in (9, 4, 1):
            lengths = torch.full((BATCH,), length, dtype=torch.int32)
            found = compiled(q, k, v, lengths, bias)
            keys, values, its = k[:, :, :length], v[:, :, :length], bias[..., :length]
            torch.testing.assert_close(found.transpose(1, 2), multiattn.reference(q, keys, values, bias=its)[0])
    assert len(graphs) == 1


of_its_release = pytest.mark.skipif(
    (RELEASE.major, RELEASE.minor) < (5, 24), reason=f"wraps what transformers 5.24 has; got {RELEASE}"
)


@pytest.mark.parametrize("name", ["position_bias", "sinks"])
def test_what_attention_over_pages_would_leave_out_is_refused(name):
    q = torch.zeros(1, 4, 3, 8)
    lengths = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.arange(4, dtype=torch.int32))
    pages = {"block_table": torch.zeros(3, 1), **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(1, 4, 4, 8))}
    with pytest.raises(NotImplementedError, match=f"{name}: got .* beside a block_table; allowed None; max_blocks"):
        hook.attend(torch.nn.Module(), q, q, q, None, is_causal=True, **lengths, **pages, **{name: q})


@of_its_release
@pytest.mark.parametrize(("name", "dtype"), [("Llama", torch.float32), ("Llama", torch.bfloat16), ("Mistral", None)])
def test_continuous_batching(name, dtype, calls):
    """More requests than a batch holds tokens of, prompts in parts, pages that a sequence fills, tokens of eager's."""
    configuration = transformers.generation.configuration_utils
    hook.register_continuous_batching()
    hook.register_continuous_batching()
    model = decoder(name).to(dtype or torch.float32)
    options = configuration.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12] * 20, [3, 4, 5, 6, 7, 8, 9, 10, 11]]
    found = []
    for attention in ("eager", "multiattn"):
        model.set_attn_implementation(attention)
        sizes = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16}
        batching = configuration.ContinuousBatchingConfig(**sizes, auto_switch_to_flash=False)
        results = model.generate_batch(prompts, generation_config=options, continuous_batching_config=batching)
        found.append([it.generated_tokens for it in results.values()])
        assert not any(it.error for it in results.values())
        assert model.config._attn_implementation == attention
    assert bool(calls) == (name == "Llama")  # sliding windows have no table in transformers
    if dtype is torch.bfloat16:  # a rounding may decide between two tokens, and all that come after
        same = sum(one[:2] == other[:2] for one, other in zip(*found, strict=True))
        assert same >= 3
    else:
        assert found[0] == found[1]


def test_requests_of_no_length_write_nothing():
    """They fill up a batch for a graph; their rows of the table are -1, which is not the last page."""
    seed = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, heads, 4, 8, generator=seed) for heads in (4, 2, 2))
    caches = tuple(torch.randn(6, 4, 2, 8, generator=seed) for _ in range(2))
    before = [it.clone() for it in caches]
    table = torch.tensor([[3, 1], [-1, -1], [5, -1], [-1, -1]], dtype=torch.int32)
    starts = torch.tensor([0, 6, 6, 7, 7], dtype=torch.int32)
    out = paged.attend_paged(q, k, v, caches, table, starts, {"causal": True})
    assert not out[:, :, [1, 3]].any()
    for cache, its, new in zip(caches, before, (k, v), strict=True):
        its[1, 1], its[5, 0] = new[0, :, 0], new[0, :, 2]
        assert torch.equal(cache, its)
    keys, values = (it[[3, 1]].flatten(0, 1)[:6].transpose(0, 1)[None] for it in caches)
    torch.testing.assert_close(out[:, :, :1], multiattn.reference(q[:, :, :1], keys, values)[0])
    paged.attend_paged(q, k, v, caches, table, torch.zeros_like(starts), {"causal": True})
    assert all(map(torch.equal, caches, before))


@of_its_release
def test_other_names_go_where_they_went():
    """transformers still refuses what it knows not, and still decides about its own."""
    hook.register_continuous_batching()
    assert not paged.is_ours("sdpa")
    assert not paged.is_ours(None)
    assert paged.is_ours("multiattn_cuda")
    model = decoder("Llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        model.generate_batch([[3, 4]], max_new_tokens=2)
