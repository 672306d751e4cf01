"""Models of transformers that do with masks, keywords and positions what others do not, beside eager attention."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_integrations_transformers import BATCH, LENGTH, build, check, decoder, padding, small, tokens  # noqa: E402
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask  # noqa: E402
from transformers_models import Recipe, small_of  # noqa: E402

import multiattn  # noqa: E402
import multiattn.integrations.transformers as hook  # noqa: E402

hook.register()
FIRST = 9
POSITIONS = torch.cat((torch.arange(FIRST), torch.arange(LENGTH - FIRST)))


def test_keys_selected_among_other_sequences_are_refused():
    if not hasattr(transformers, "DeepseekV32ForCausalLM"):
        pytest.skip("a transformers without DeepSeek V3.2")
    kind = transformers.DeepseekV32ForCausalLM
    model, rows = build(kind, small_of(kind, Recipe())), tokens()[:1]
    model.set_attn_implementation("multiattn")
    lengths = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
    given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "use_cache": False}
    with pytest.raises(NotImplementedError, match="begin again with each sequence"):
        model(rows, **given)
    mask, chosen = hook.make_mask(BATCH, FIRST, FIRST), torch.zeros(BATCH, FIRST, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="begin again with each sequence"):
        hook.attend(Layer(), *qkv(), mask, indices=chosen, position_ids=torch.arange(FIRST)[None] % 4)
    parts = [model(it, use_cache=False).logits for it in rows.split([FIRST, LENGTH - FIRST], 1)]
    torch.testing.assert_close(model(rows, position_ids=POSITIONS[None], **given).logits, torch.cat(parts, 1))


def test_rows_may_pack_different_sequences():
    model, rows = decoder("GptOss"), tokens()
    positions = torch.stack((POSITIONS, torch.arange(5, 5 + LENGTH)))

    def logits(model):
        if model.config._attn_implementation == "eager":
            parts = [model(it, use_cache=False).logits for it in rows[:1].split([FIRST, LENGTH - FIRST], 1)]
            return [torch.cat(parts, 1), model(rows[1:], position_ids=positions[1:], use_cache=False).logits]
        both = model(rows, position_ids=positions, use_cache=False).logits
        return [both[:1], both[1:]]

    check(model, logits)


class Attention(torch.nn.Module):
    """A decoder's mask and attention, which is all of it that a trace could stumble over."""

    is_causal = True

    def __init__(self, config, knows_positions):
        super().__init__()
        self.config, self.knows_positions = config, knows_positions

    def forward(self, states, positions, mask=None):
        known = {"position_ids": positions if self.knows_positions else None}
        mask = create_causal_mask(self.config, states, mask, past_key_values=None, **known)
        heads = states.unflatten(-1, (4, -1)).transpose(1, 2)
        return hook.attend(self, heads, heads, heads[..., :6], mask, position_ids=positions)[0]  # as in MLA


def attention(knows_positions):
    return Attention(small("Llama", attn_implementation="multiattn"), knows_positions)


def states(length=LENGTH):
    return torch.randn(1, length, 32, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("knows_positions", [False, True])
def test_compiled_functions_keep_packed_sequences_apart(knows_positions):
    torch.compiler.reset()
    layer = attention(knows_positions)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(states(), POSITIONS[None])
    parts = [layer(it, torch.arange(it.shape[1])[None]) for it in states().split([FIRST, LENGTH - FIRST], 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1))


@pytest.mark.parametrize("kind", ["blocks", "chunks", "prefix"])
def test_compiled_functions_lose_no_mask_to_lengths(kind):
    """Blocks that see themselves are kept in packed sequences; what a compiled function cannot tell is refused."""
    if kind == "blocks" and "block_sequence_ids" not in inspect.signature(create_causal_mask).parameters:
        pytest.skip("needs a newer transformers")
    lengths = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
    config = small("Llama", attn_implementation="multiattn", attention_chunk_size=4)

    def forward(states, positions, lengths):
        create = create_chunked_causal_mask if kind == "chunks" else create_causal_mask
        more = {"or_mask_function": lambda b, h, i, j: j < 3} if kind == "prefix" else {}
        more |= {"block_sequence_ids": torch.where(positions < 3, 0, -1)} if kind == "blocks" else {}
        mask = create(config, states, None, None, position_ids=positions, **more)
        heads = states.unflatten(-1, (4, -1)).transpose(1, 2)
        packing = {} if lengths is None else {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
        return hook.attend(Layer(True), heads, heads, heads, mask, **packing)[0]

    torch.compiler.reset()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=kind == "blocks")
    if kind != "blocks":
        with pytest.raises(ValueError, match="lengths beside an attention_mask"):
            compiled(states(), POSITIONS[None], lengths)
        return
    found = compiled(states(), POSITIONS[None], lengths)
    parts = [forward(it, torch.arange(it.shape[1])[None], None) for it in states().split([FIRST, LENGTH - FIRST], 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1))


def test_a_trace_is_refused():
    def layer(q):
        return hook.attend(Layer(True), q, q, q, None)[0]

    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace would keep"):
        torch.jit.trace(layer, torch.randn(1, 2, 5, 8), check_trace=False)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace would keep"):
        torch.jit.trace(lambda it: hook.make_mask(1, 5, 5) + it, torch.ones(1), check_trace=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("knows_positions", [False, True])
def test_attention_exports_with_a_dynamic_length(knows_positions, masked, strict):
    length = torch.export.Dim("length", min=9, max=60)
    layer = attention(knows_positions)

    def given(count):
        mask = (padding(left=5, length=count)[:1],) if masked else ()
        return states(count), torch.arange(count)[None], *mask

    shapes = ({1: length},) * len(given(9))
    program = torch.export.export(layer, given(23), dynamic_shapes=shapes, strict=strict).module()
    torch.testing.assert_close(program(*given(41)), layer(*given(41)))


def test_a_model_with_attention_of_its_own_is_refused():
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=61)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="multiattn")
    with pytest.raises(NotImplementedError, match="bloom computes attention by code of its own"):
        model(tokens())


def test_a_model_that_supports_no_sdpa_and_is_not_known_is_refused(monkeypatch):
    from multiattn.integrations import transformers_models

    model = decoder("GptOss", layers=1)
    model.set_attn_implementation("multiattn")
    monkeypatch.setattr(transformers_models, "EAGER_ONLY", frozenset())
    transformers_models.refuse_untested.cache_clear()
    with pytest.raises(NotImplementedError, match="gpt_oss says that it does not support SDPA"):
        model(tokens())
    transformers_models.refuse_untested.cache_clear()


class Layer(torch.nn.Module):
    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def qkv(seq_q=FIRST, seq_kv=FIRST, heads=4, seed=7):
    of = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, heads, length, 8, generator=of) for length in (seq_q, seq_kv, seq_kv)]


@pytest.mark.parametrize(
    ("says", "given", "causal"),
    [(None, None, False), (False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_causality_with_no_mask(says, given, causal):
    """The keyword says it, else the layer; where nobody does, it is full attention, as eager attention is."""
    q, k, v = qkv()
    out, _ = hook.attend(Layer(says), q, k, v, None, is_causal=given)
    torch.testing.assert_close(out.transpose(1, 2), multiattn.reference(q, k, v, causal=causal)[0])


def test_no_mask_is_full_attention_where_a_model_knows_eager_attention_alone():
    """BridgeTower's layers say that they are causal, have no mask, and see everything; nor do they support SDPA."""
    kind = type("Layer", (Layer,), {"__module__": "transformers.models.bridgetower.modeling_bridgetower"})
    pytest.importorskip(kind.__module__)
    q, k, v = qkv()
    out, _ = hook.attend(kind(True), q, k, v, None)
    torch.testing.assert_close(out.transpose(1, 2), multiattn.reference(q, k, v)[0])


LENGTHS = torch.tensor([0, 4, 18], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS, "max_length_q": 14, "max_length_k": 14}
HOLE = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1], [1] * 9])


@pytest.mark.parametrize(
    ("layer", "lengths", "given", "error", "match"),
    [
        (Layer(True), (4, 9), {}, NotImplementedError, "4 queries to 9 keys"),
        (Layer(), (9, 9), {"sliding_window": 4}, NotImplementedError, "sliding_window: got 4 and no mask"),
        (Layer(True), (9, 9), {"sliding_window": 0}, ValueError, "sliding_window: got 0"),
        (Layer(), (9, 9), {"chosen": 3}, NotImplementedError, "chosen: got 3"),
        (Layer(), (9, 9), {"chosen": False}, NotImplementedError, "chosen: got False"),
        (Layer(), (9, 9), {"chosen": torch.ones(3)}, NotImplementedError, r"chosen: got a Tensor \[3\]"),
        (Layer(), (9, 9), {"block_indices": torch.zeros(2, 1, 9, 1, dtype=int)}, NotImplementedError, "block_indices"),
        (Layer(), (9, 9), {"output_attentions": True}, NotImplementedError, "output_attentions"),
        (Layer(), (9, 9), {"cu_seq_lens_q": LENGTHS}, ValueError, "lengths without cu_seq_lens_k"),
        (Layer(True), (9, 9), {"cu_seq_lens_k": LENGTHS}, ValueError, "lengths without cu_seq_lens_q"),
        (Layer(), (9, 9), PACKED, NotImplementedError, "is_causal="),
        (Layer(True), (9, 9), {**PACKED, "sliding_window": 0}, ValueError, "sliding_window: got 0"),
        (Layer(True), (9, 9), {**PACKED, "attention_mask": HOLE}, ValueError, "lengths beside an attention_mask"),
        (Layer(), (9, 9), {"attention_mask": HOLE, "sliding_window": 3}, NotImplementedError, "between tokens"),
        (Layer(), (9, 9), {"attention_mask": torch.ones(3, 9)}, ValueError, "attention_mask"),
        (Layer(), (2, 2), {"attention_mask": torch.ones(2, 2, dtype=int)}, ValueError, "attention_mask"),
    ],
)
def test_what_has_no_certain_meaning_is_refused(layer, lengths, given, error, match):
    with pytest.raises(error, match=match):
        hook.attend(layer, *qkv(*lengths), given.pop("attention_mask", None), **given)


def test_harmless_keywords_and_none_change_nothing():
    q, k, v = qkv()
    plain, _ = hook.attend(Layer(), q, k, v, None)
    given = dict.fromkeys(sorted(hook.HARMLESS - {"block_table"}), 1) | {"chosen": None, "output_attentions": False}
    assert torch.equal(hook.attend(Layer(), q, k, v, None, **given)[0], plain)


@pytest.mark.parametrize("kind", ["none", "causal", "packed", "numbers"])
def test_sinks_of_each_query(kind):
    """As one more column of scores that eager attention appends."""
    q, k, v = qkv()
    sinks = torch.randn(BATCH, 4, FIRST, 2, generator=torch.Generator().manual_seed(8))
    added = torch.zeros(FIRST, FIRST)
    mask, given = None, {}
    if kind in ("causal", "packed"):
        mask = hook.make_mask(BATCH, FIRST, FIRST)
        added = mask.whole()
    elif kind == "numbers":
        mask = added = torch.randn(BATCH, 1, FIRST, FIRST, generator=torch.Generator().manual_seed(9))
    if kind == "packed":
        lengths = torch.arange(0, BATCH * FIRST + 1, 3, dtype=torch.int32)
        given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
        sequence = torch.arange(FIRST) // 3
        added = added.masked_fill(sequence[:, None] != sequence, -torch.inf)
    scores = torch.cat((q @ k.mT * 8**-0.5 + added, sinks), -1).softmax(-1)[..., :FIRST]
    out, _ = hook.attend(Layer(), q, k, v, mask, sinks=sinks, **given)
    torch.testing.assert_close(out.transpose(1, 2), scores @ v)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_queries_that_see_none_of_their_selected_keys(has_sinks):
    """Every score is the lowest number then: all values have one weight, or none where there is a sink."""
    q, k, v = qkv()
    layer = Layer()
    layer.indexer = torch.nn.Module()
    layer.indexer.block_size = 4
    blocks = torch.zeros(BATCH, 1, FIRST, 1, dtype=torch.int64)
    mask = (torch.arange(FIRST) >= torch.tensor([0, 4] + [2] * 7)[:, None])[None, None]
    sinks = torch.zeros(4) if has_sinks else None
    out, _ = hook.attend(layer, q, k, v, mask, block_indices=blocks, s_aux=sinks)
    wanted, _ = multiattn.reference(q, k, v, bias=mask & (torch.arange(FIRST) < 4), sinks=sinks)
    if not has_sinks:
        wanted[:, :, 1] = v.mean(2)
    torch.testing.assert_close(out.transpose(1, 2), wanted)


def test_a_position_bias_of_packed_sequences():
    q, k, v = qkv()
    bias = torch.randn(1, 4, FIRST, FIRST, generator=torch.Generator().manual_seed(8))
    lengths = torch.tensor([0, 4, 9, 18], dtype=torch.int32)
    given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    out, _ = hook.attend(Layer(True), q, k, v, None, position_bias=bias, **given)
    for row, first, last in ((0, 0, 4), (0, 4, 9), (1, 0, 9)):
        part = slice(first, last)
        its = [it[row : row + 1, :, part] for it in (q, k, v)]
        wanted = multiattn.reference(*its, bias=bias[:, :, part, part], causal=True)[0]
        torch.testing.assert_close(out[row : row + 1, part].transpose(1, 2), wanted)


def test_queries_that_all_sequences_share_and_values_of_other_sizes():
    q, k, v = qkv(seq_q=3)
    wide = torch.cat((v, v), -1)
    out, _ = hook.attend(Layer(), q[:1], k, wide, None)
    wanted = multiattn.reference(q[:1].expand(BATCH, -1, -1, -1), k, v)[0]
    torch.testing.assert_close(out.transpose(1, 2), torch.cat((wanted, wanted), -1))
    assert out.is_contiguous()
