"""The cells of a model in the sweep over transformers' models: what runs, and what of eager attention is true."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
import transformers_models as models
from transformers import AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function
from transformers_models import BATCH, LENGTH, tokens

Tensors = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Results, each with the rows that count, a bool ``[B, S]``; None where all do."""

FIRST, STEPS, PROMPT = 9, 7, 9
"""Tokens in the first of two packed sequences; tokens that are generated, and those of the prompt."""
NO_BOOL_MASKS = ("deepseek_v4",)
"""Models that join a mask of numbers to the caller's, by which bools become 0 and 1 under any implementation."""


def flat(found: Any) -> Iterator[torch.Tensor]:
    """All floating tensors of a model's output, less its cache, masks and weights of attention."""
    if isinstance(found, torch.Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, dict):
        for name, it in found.items():
            if not any(part in name for part in ("past", "cache", "mask", "attentions")):
                yield from flat(it)
    elif isinstance(found, (tuple, list)):
        for it in found:
            yield from flat(it)


def padding(left: int = 0, right: int = 0, length: int = LENGTH) -> torch.Tensor:
    """A mask ``[B, length]`` of the tokenizer's kind; one row has padding, the other less."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, : left // 3] = 0
    mask[1, length - right :] = 0
    return mask


def unpack_by_torch() -> None:
    """Have quanto unpack by PyTorch's operations; the extension that it would compile takes 20 seconds."""

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])

    with contextlib.suppress(ImportError):
        extensions = importlib.import_module("optimum.quanto.library.extensions")
        extensions.get_extension("quanto_cpp")._lib = types.SimpleNamespace(unpack=unpack)


def seed() -> None:
    """Let a model draw the same numbers each time."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def outputs(model: Any, mask: torch.Tensor | None = None, **given: Any) -> Tensors:
    """Results of a model; with a mask only those of its rows that are tokens."""
    seed()
    with torch.no_grad():
        found = [it.double() for it in flat(model(**given))]
    if mask is None:
        return [(it, None) for it in found]
    return [(it, mask.bool()) for it in found if it.shape[:2] == mask.shape]


class Subject:
    """A class made small, its inputs, and its cells."""

    def __init__(self, name: str) -> None:
        self.kind = getattr(transformers, name)
        failures: list[str] = []
        for recipe in models.recipes():
            self.weights: dict[str, torch.Tensor] | None = None
            try:
                self.config = models.small_of(self.kind, recipe)
                self.eager = self.build("eager")
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
                continue
            for given in models.inputs(self.eager):
                try:
                    if outputs(self.eager, **given):
                        self.inputs = given
                        self.is_text, self.has_two_parts = "input_ids" in given, "decoder_input_ids" in given
                        can_generate = isinstance(self.eager, transformers.GenerationMixin)
                        self.generates = can_generate and self.kind.can_generate()
                        return
                    failures.append("no output")
                except Exception as error:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
                    failures.append(f"{list(given)}: {type(error).__name__}: {str(error)[:160]} {where}")
        raise ValueError(" | ".join(failures[:3]))

    def build(self, implementation: str, **changes: Any) -> Any:
        config = copy.deepcopy(self.config)
        for name, it in changes.items():
            for part in (config, config.get_text_config(decoder=True)):
                if hasattr(part, name):
                    setattr(part, name, it)
        model = models.build(self.kind, config, implementation)
        if self.weights is None:
            self.weights = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.weights)  # some models leave weights as memory was
        return model

    def takes(self, name: str) -> bool:
        names = inspect.signature(self.kind.forward).parameters
        return name in names

    def cells(self) -> Iterator[tuple[str, Callable[[Any], Tensors], list[Callable[[Any], Tensors]], dict[str, Any]]]:
        """Each cell: its name, what multiattn runs, what of eager attention is true, and changes of the config."""
        plain = self.plain
        yield "plain", plain, [plain], {}
        if self.is_text and self.takes("attention_mask"):
            yield "left padding", self.left, [self.left], {}
            yield "right padding", self.right, [self.right], {}
            if self.has_two_parts and self.takes("decoder_attention_mask"):
                yield "decoder padding", self.targets, [self.targets], {}
            if not self.has_two_parts:
                added, bools = self.mask(False), self.mask(True)
                yield "4-D mask of numbers", added, [added], {}
                if self.config.model_type not in NO_BOOL_MASKS:
                    yield "4-D mask of bools", bools, [added], {}
        elif not self.is_text and self.takes("attention_mask"):
            yield "right padding", self.sound, [self.sound], {}
        if self.generates and self.is_text and not self.has_two_parts:
            names = inspect.signature(self.kind.forward).parameters
            by_masks = partial(self.blocks, self.takes("position_ids"))
            if self.takes("position_ids"):
                yield "packed by position_ids", self.packed(True, False), [self.apart, by_masks], {}
            if any(it.kind == it.VAR_KEYWORD for it in names.values()):
                alone, both = self.packed(False, True), self.packed(self.takes("position_ids"), True)
                yield "packed by cu_seq_lens alone", alone, [partial(self.blocks, False)], {}
                yield "packed by cu_seq_lens", both, [self.apart, by_masks], {}
            if hasattr(self.config.get_text_config(decoder=True), "sliding_window"):
                yield "sliding", self.sliding, [self.sliding], self.windows()
        if self.generates:
            unpack_by_torch()
            quanto = {"backend": "quanto", "q_group_size": 16, "nbits": 4}
            ways: dict[str, dict[str, Any]] = {
                "dynamic": {"cache_implementation": "dynamic"},
                "static": {"cache_implementation": "static"},
                "quantized": {"cache_implementation": "quantized", "cache_config": quanto},
                "beams": {"num_beams": 3},
            }
            for name, how in ways.items():
                yield f"generate, {name}", self.generate(**how), [self.generate(**how)], {}
        yield "training", self.train, [self.train], {}
        for name in ("get_image_features", "get_audio_features"):
            if hasattr(self.kind, name) and name.split("_")[1] not in "".join(self.inputs):
                yield name.split("_")[1], self.features(name), [self.features(name)], {}

    def plain(self, model: Any) -> Tensors:
        found = outputs(model, **self.inputs)
        if self.is_text and self.takes("position_ids") and self.generates and not self.has_two_parts:
            with contextlib.suppress(IndexError, RuntimeError, ValueError):
                found += outputs(model, input_ids=tokens(1), position_ids=torch.arange(3, 3 + LENGTH)[None])
        return found

    def left(self, model: Any) -> Tensors:
        mask = padding(left=7)
        found = self._padded(model, mask)
        if self.takes("position_ids") and self.generates and not self.has_two_parts:
            positions = (mask[:1].cumsum(-1) - 1).clamp(min=0)
            found += outputs(model, mask[:1], input_ids=tokens(1), attention_mask=mask[:1], position_ids=positions)
        return found

    def right(self, model: Any) -> Tensors:
        return self._padded(model, padding(right=7))

    def _padded(self, model: Any, mask: torch.Tensor) -> Tensors:
        """Rows of tokens; results that have no rows where none has rows that tell which are padding."""
        given = self.inputs | {"attention_mask": mask}
        return outputs(model, mask, **given) or [it for it in outputs(model, **given) if it[0].ndim <= 2]

    def targets(self, model: Any) -> Tensors:
        length = self.inputs["decoder_input_ids"].shape[1]
        mask = padding(right=4, length=length)
        given = self.inputs | {"decoder_attention_mask": mask, "attention_mask": padding(right=7)}
        return outputs(model, mask, **given)

    def sound(self, model: Any) -> Tensors:
        (given,) = (it for name, it in self.inputs.items() if name != "decoder_input_ids")
        for dim in (1, 2):
            if given.ndim <= dim:
                continue
            mask = torch.ones(BATCH, given.shape[dim], dtype=torch.long)
            mask[1, given.shape[dim] // 2 :] = 0
            with contextlib.suppress(RuntimeError, ValueError, IndexError):
                found = outputs(model, **self.inputs, attention_mask=mask)
                break
        else:
            found = outputs(model, **self.inputs, attention_mask=mask)
        if self.has_two_parts:  # rows of the encoder that are padding may be anything
            length = self.inputs["decoder_input_ids"].shape[1]
            return [it for it in found if it[0].ndim >= 2 and it[0].shape[1] == length]
        return [(it, self._first_half(it)) for it, _ in found if it.ndim >= 2]

    @staticmethod
    def _first_half(found: torch.Tensor) -> torch.Tensor:
        rows = torch.ones(found.shape[:2], dtype=torch.bool)
        rows[1, max(found.shape[1] // 2 - 3, 0) :] = False
        return rows

    def mask(self, is_bool: bool) -> Callable[[Any], Tensors]:
        seen = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.6
        seen |= torch.eye(LENGTH, dtype=torch.bool)
        seen = seen.tril() if self.generates else seen
        added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return partial(outputs, **self.inputs | {"attention_mask": seen if is_bool else added})

    def packed(self, has_positions: bool, has_lengths: bool) -> Callable[[Any], Tensors]:
        given: dict[str, Any] = {"input_ids": tokens(1), "use_cache": False}
        if has_positions:
            positions = torch.cat((torch.arange(FIRST), torch.arange(LENGTH - FIRST)))[None]
            is_split = "shape[0] == 4" in inspect.getsource(sys.modules[self.kind.__module__])
            given["position_ids"] = positions.expand(4, 1, -1) if is_split else positions  # of text, then of images
        if has_lengths:
            lengths = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
            given |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            given |= {"max_length_q": LENGTH - FIRST, "max_length_k": LENGTH - FIRST}

        return lambda model: self._rows(outputs(model, **given))

    @staticmethod
    def _rows(found: Tensors) -> Tensors:
        return [it for it in found if it[0].ndim >= 3][:1]

    def apart(self, model: Any) -> Tensors:
        parts = (outputs(model, input_ids=it, use_cache=False) for it in tokens(1).split([FIRST, LENGTH - FIRST], 1))
        return [(torch.cat([self._rows(it)[0][0] for it in parts], 1), None)]

    def blocks(self, has_positions: bool, model: Any) -> Tensors:
        """Packed sequences that eager's masks keep apart: the truth of models that mix neighbours elsewhere, too."""
        is_second = torch.arange(LENGTH) >= FIRST
        eager = AttentionMaskInterface()["eager"]

        def together(b: Any, h: Any, i: Any, j: Any) -> Any:
            return is_second[i] == is_second[j]

        def apart(*args: Any, mask_function: Any = causal_mask_function, **given: Any) -> Any:
            return eager(*args, mask_function=and_masks(mask_function, together), **given)

        AttentionMaskInterface.register("eager", apart)
        try:
            return self.packed(has_positions, False)(model)
        finally:
            AttentionMaskInterface.register("eager", eager)

    def generate(self, **how: Any) -> Callable[[Any], Tensors]:
        masks = None, padding(left=4, length=PROMPT)
        return lambda model: [found for mask in masks for found in self._generated(model, mask, **how)]

    def _generated(self, model: Any, mask: torch.Tensor | None, **how: Any) -> Tensors:
        given = {name: it for name, it in self.inputs.items() if name != "decoder_input_ids"}
        if self.is_text:
            given["input_ids"] = given["input_ids"][:, :PROMPT]
            given["attention_mask"] = torch.ones_like(given["input_ids"]) if mask is None else mask
        elif mask is not None:
            return []
        if self.has_two_parts:
            how = {"decoder_start_token_id": 1} | how
        seed()
        with torch.no_grad():
            told = {"return_dict_in_generate": True, "output_logits": True}
            asked = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "num_beams": 1}
            out = model.generate(**given, **told, **asked | how)
        return [(it.double().nan_to_num(neginf=0.0), None) for it in out.logits]

    def windows(self) -> dict[str, Any]:
        """Changes of the config by which a layer or more has a window; most configs choose when they are made."""
        kinds = list(getattr(self.config.get_text_config(decoder=True), "layer_types", None) or ())
        if "full_attention" in kinds and not any("sliding" in it for it in kinds):
            kinds[kinds.index("full_attention")] = "sliding_attention"
        return {"sliding_window": 6, "use_sliding_window": True} | ({"layer_types": kinds} if kinds else {})

    def sliding(self, model: Any) -> Tensors:
        found = self.right(model) + self.generate()(model)
        return found + self.generate(cache_implementation="static")(model)

    def train(self, model: Any) -> Tensors:
        model = model.train()
        model.zero_grad()
        seed()
        given = dict(self.inputs)
        if self.is_text and self.takes("attention_mask"):
            given["attention_mask"] = padding(right=7)
        mask = given.get("attention_mask")
        if self.is_text and self.generates and self.takes("labels"):
            labels = given.get("decoder_input_ids", given["input_ids"])
            if not self.has_two_parts and mask is not None:
                labels = labels.masked_fill(mask == 0, -100)
            loss = model(**given, labels=labels).loss
        else:
            loss = 0.0
            for it in flat(model(**given)):
                is_rows = mask is not None and it.shape[:2] == mask.shape
                if it.requires_grad and (mask is None or is_rows or it.ndim <= 2):
                    rows = it[mask.bool()] if mask is not None and is_rows else it
                    loss = loss + (rows * models.noise(*rows.shape)).mean()
        loss.backward()
        grads = [it.grad.double() for it in model.parameters() if it.grad is not None]
        largest = max(it.abs().max() for it in grads)
        # A gradient that is rounding alone is measured by the largest of all.
        found = [torch.cat((it.flatten(), 1e-2 * largest[None])) for it in grads]
        return [(it, None) for it in (*found, loss.detach().double())]

    def features(self, name: str) -> Callable[[Any], Tensors]:
        def run(model: Any) -> Tensors:
            failures: list[Exception] = []
            for given in models.media(self.config, inspect.signature(getattr(model, name)).parameters):
                try:
                    return outputs(getattr(model, name), **given)
                except Exception as error:
                    failures.append(error)
            raise failures[0] if failures else ValueError("no inputs")

        return run
