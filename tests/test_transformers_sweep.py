"""transformers' models with multiattn beside their own eager attention: a sample here, and every class each night."""

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")

import transformers_models as models  # noqa: E402
import transformers_sweep as sweeps  # noqa: E402
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs  # noqa: E402

from multiattn.integrations.transformers import HARMLESS, LazyMask, attend  # noqa: E402

PARAMETERS = set(inspect.signature(attend).parameters) - {"kwargs"}

# How many cells are right with transformers 5.24; each class has something that the others lack.
SAMPLE = {
    "LlamaForCausalLM": 13,
    "GPT2LMHeadModel": 13,  # flattens masks
    "Gemma2ForCausalLM": 13,  # softcap, a window in every other layer
    "GptOssForCausalLM": 13,  # sinks; masks that know nothing of positions
    "PhimoeForCausalLM": 14,  # a window that only its masks know
    "T5GemmaForConditionalGeneration": 8,  # its encoder's attention is told a window that is a key too small
    "Llama4ForCausalLM": 10,  # chunks
    "Qwen3NextForCausalLM": 10,  # recurrent layers
    "DeepseekV32ForCausalLM": 11,  # selected keys, another D of values
    "MiniMaxM3VLForCausalLM": 11,  # selected blocks, of which padding leaves none
    "InklingForCausalLM": 11,  # keys of another stride
    "OPTForCausalLM": 11,  # positions of masks
    "BertForMaskedLM": 6,
    "SplinterModel": 6,  # an encoder that does not say that it is none
    "ModernBertForMaskedLM": 6,  # a window to both sides
    "T5ForConditionalGeneration": 8,  # a position bias
    "BartForConditionalGeneration": 8,
    "NllbMoeForConditionalGeneration": 8,  # a decoder that says it is not causal
    "WhisperForConditionalGeneration": 6,
    "Qwen2VLForConditionalGeneration": 15,  # packed images
    "PaliGemmaForConditionalGeneration": 14,  # a prefix without causality
    "Wav2Vec2Model": 3,
    "ViTModel": 2,
    "BloomForCausalLM": 0,  # attention of its own
    "MambaForCausalLM": 0,  # none
}
JOBS = min(os.cpu_count() or 1, 4)
IS_NEW = Version(transformers.__version__) >= Version("5.24")


def full(of, is_causal=False):
    """Attention that sees everything, or everything before it."""

    def faulty(module, query, key, value, attention_mask, **given):
        seen = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
        if is_causal:
            seen = seen.tril(key.shape[2] - query.shape[2])
            given |= dict.fromkeys(set(given) & {"cu_seq_lens_q", "cu_seq_lens_k", "position_ids"})
        return of(module, query, key, value, seen, **given)

    return faulty


def causal_alone(of):
    return full(of, is_causal=True)


def without_windows(of):
    def faulty(module, query, key, value, attention_mask, **given):
        if isinstance(attention_mask, LazyMask) and attention_mask.window is not None:
            it = attention_mask
            attention_mask = LazyMask(it.told, it.kind, it.causal, None, it.shape, it.dtype)
        return of(module, query, key, value, attention_mask, **given | {"sliding_window": None})

    return faulty


def instead(**others):
    def plant(of):
        return lambda *given, **options: of(*given, **options | others)

    return plant


PLANTED = {
    "LlamaForCausalLM": {
        "plain": full,
        "left padding": causal_alone,
        "4-D mask of bools": causal_alone,
        "packed by position_ids": causal_alone,
        "packed by cu_seq_lens": causal_alone,
        "generate, dynamic": full,
        "generate, static": causal_alone,
        "training": instead(scaling=0.2501),
    },
    "BertForMaskedLM": {"right padding": full},
    "Llama4ForCausalLM": {"plain": causal_alone},
    "DeepseekV32ForCausalLM": {"left padding": instead(indices=None)},
    "MiniMaxM3VLForCausalLM": {"plain": instead(block_indices=None)},
    "Gemma2ForCausalLM": {"sliding": without_windows, "plain": instead(softcap=None)},
    "Qwen2VLForConditionalGeneration": {"sliding": without_windows},
    "GptOssForCausalLM": {"generate, beams": instead(s_aux=None)},
    "BartForConditionalGeneration": {"decoder padding": full},
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_is_right_and_shows_planted_faults(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    found = sweeps.sweep(name)
    assert found["made small"][0] == "yes", found
    assert not sweeps.faults(found), sweeps.faults(found)
    right = sum(verdict == "right" for verdict, _ in found.values())
    if IS_NEW or not SAMPLE[name]:
        assert right >= SAMPLE[name], found
        assert SAMPLE[name] or not right, found
    for cell, plant in PLANTED.get(name, {}).items():
        assert found[cell][0] == "right"
        assert sweeps.sweep(name, (cell,), plant)[cell][0] == "WRONG", cell


def call_at(code, start):
    """The arguments of the call that opens before this place."""
    depth, end = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        end += 1
    return code[start - 1 : end]


def keywords_of_models():
    """The keywords by which models call the attention interface, each with one file that does."""
    found = dict.fromkeys(FlashAttentionKwargs.__annotations__, "FlashAttentionKwargs")
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        code = path.read_text()
        for start in re.finditer(r"attention_interface\(", code):
            found |= dict.fromkeys(re.findall(r"[(\s](\w+)=", call_at(code, start.end())), path.name)
    return found


def test_each_keyword_of_a_model_is_known():
    found = keywords_of_models()
    assert {"dropout", "scaling", "s_aux", "cu_seq_lens_q", "softcap"} <= set(found)
    unknown = {name: file for name, file in found.items() if name not in PARAMETERS | HARMLESS | {"output_attentions"}}
    assert not unknown, f"look whether they change attention, then take or refuse them in `attend`: {unknown}"


@pytest.mark.nightly
def test_every_class(capsys):
    found, seconds = {}, 0.0
    for name, verdicts, took in sweeps.sweep_all(list(models.classes()), JOBS):
        found[name], seconds = verdicts, seconds + took
    with capsys.disabled():
        told = f"{len(found)} classes of transformers {transformers.__version__}, {seconds:.0f} s of processors"
        print(f"\n{told}\n{sweeps.table(found)}", file=sys.stderr)  # the stream that pytest-xdist leaves to its workers
    wrong = {name: sweeps.faults(of) for name, of in found.items() if sweeps.faults(of)}
    assert not wrong, wrong
    if IS_NEW:
        count = sweeps.counts(found)
        assert count["made small", "yes"] >= 545
        assert sum(count[cell, "too slow"] for cell in {cell for cell, _ in count}) <= 20
        assert sum(count[cell, "right"] for cell in {cell for cell, _ in count}) >= 3700


UNSEEN = {
    "BigBirdPegasusForConditionalGeneration",  # encoders by code of their own
    "LongT5ForConditionalGeneration",
    "PegasusXForConditionalGeneration",
    "DogeForCausalLM",  # sliding_window of a config whose model has none
    "ZayaForCausalLM",
    "HYV4VLTextModel",  # without causality: four keys of many that are visible, which it selects among these alone
    "MistralLarge4TextModel",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cells", "plant"),
    [(("left padding", "4-D mask of numbers", "packed by position_ids"), full), (("sliding",), without_windows)],
)
def test_every_class_shows_a_fault(cells, plant):
    """Attention that ignores a mask or a window is wrong in each cell that has one; none is right unseen."""
    names = list(models.classes())
    found = {name: its for name, its, _ in sweeps.sweep_all(names, JOBS, only=cells, plant=plant)}
    unseen = {name for name, its in found.items() if any(its.get(cell, ("",))[0] == "right" for cell in cells)}
    assert unseen <= UNSEEN
