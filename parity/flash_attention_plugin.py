"""The plugin of pytest by which FlashAttention's tests run on our functions: `parity.flash_attention` starts it."""

from __future__ import annotations

import functools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from multiattn import Unsupported
from multiattn.integrations import flash_attn

NAMES = tuple(name for name in vars(flash_attn) if name.startswith("flash_attn_"))
FOREIGN = "flash_attn_combine"
"""A function that the test files import and no case that is chosen calls."""

SMALL_PAIRS, SMALL_HEAD_DIM = 32768, 64
"""Limits of Sq * Skv and D on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One process's share of a run: of each test's `each` cases, every `shards`th from `shard` on."""

    backend: str
    each: int
    small: bool
    """Only cases that a CPU runs in seconds."""
    without: tuple[str, ...]
    """Parts of names of tests to leave out."""
    shard: int
    shards: int
    deadline: float
    """By `time.time`: cases that are not begun by then are skipped."""
    results: str
    """A file that gets a line of JSON for what was left out of each test, and for each case that ran."""


def why_left_out(parameters: Mapping[str, Any], *, small: bool) -> str:
    """The feature that a case needs and that is refused here; empty for one that can run."""
    if parameters.get("dropout_p", 0.0) > 0.0:
        return "dropout"
    if parameters.get("has_qv"):
        return "qv"
    if parameters.get("rotary_fraction", 0.0) > 0.0:
        return "rotary embedding"
    if parameters.get("has_leftpad"):
        return "left padding"
    if parameters.get("alibi") and "new_kv" in parameters:
        return "alibi over a cache"
    if parameters.get("add_unused_qkv"):
        return "used lengths (seqused)"
    seq_q = parameters.get("seqlen_q", parameters.get("seqlen", 0))
    seq_kv = parameters.get("seqlen_k", parameters.get("seqlen", 0))
    if "has_qv" in parameters and seq_kv == 1:
        return (
            "one key, for which FlashAttention 3's tests want gradients of exactly 0"  # sums in this order miss by 1e-6
        )
    if small and (seq_q * seq_kv > SMALL_PAIRS or parameters.get("d", 0) > SMALL_HEAD_DIM):
        return "too large for a CPU"
    return ""


def select(test: str, axes: list[tuple[list[str], list[Any]]], settings: Settings) -> tuple[list[Any], Counter[str]]:
    """The values of the cases of a test that are chosen, and how many others were left out, by reason."""
    left_out: Counter[str] = Counter()
    possible: list[list[Any]] = []
    if part := next((part for part in settings.without if part in test), ""):
        left_out[f"{part} in the test's name"] = math.prod(len(values) for _, values in axes)
        return possible, left_out
    for point in product(*(values for _, values in axes)):
        values = [it for (names, _), value in zip(axes, point, strict=True) for it in _as_tuple(names, value)]
        parameters = dict(zip((name for names, _ in axes for name in names), values, strict=True))
        if reason := why_left_out(parameters, small=settings.small):
            left_out[reason] += 1
        else:
            possible.append(values)
    chosen = random.Random(test).sample(possible, min(settings.each, len(possible)))
    left_out["not chosen"] += len(possible) - len(chosen)
    return chosen, left_out


def _as_tuple(names: list[str], value: Any) -> tuple[Any, ...]:
    return (value,) if len(names) == 1 else tuple(value)


# ---------------------------------------------------------------- stand-ins


def pad_input(packed: torch.Tensor, indices: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
    """The padded tensor ``[batch, seq, ...]`` of a packed one, with zeros between."""
    padded = packed.new_zeros(batch * seq, *packed.shape[1:])
    return padded.index_put((indices,), packed).view(batch, seq, *packed.shape[1:])


def unpad_input(padded: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> tuple[Any, ...]:
    """The packed tensor of a padded one and bool ``[batch, seq]``; where rows are from, cu_seqlens, the longest."""
    kept = mask if unused is None else mask | unused
    lengths = kept.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    indices = kept.flatten().nonzero().flatten()
    used = mask.sum(dim=1, dtype=torch.int32)
    return padded.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def install_stand_ins(backend: str) -> None:
    """Put modules of FlashAttention's names where imports find them first, with our functions in them."""

    def refuses(name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{name} is not here")

        return call

    functions: dict[str, Any] = {name: functools.partial(getattr(flash_attn, name), backend=backend) for name in NAMES}
    functions |= {FOREIGN: refuses(FOREIGN), "get_scheduler_metadata": lambda *_, **__: None}  # plans are made here
    padding = {"pad_input": pad_input, "unpad_input": unpad_input}
    inside = {"_get_block_size_n": refuses("_get_block_size_n"), "USE_TRITON_ROCM": False}
    modules: dict[str, Mapping[str, Any]] = {
        "flash_attn": functions,
        "flash_attn.bert_padding": padding,
        "flash_attn.flash_attn_interface": functions | inside,
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": refuses("apply_rotary_emb")},
        "flash_attn_interface": functions,
        "padding": padding,
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


# ---------------------------------------------------------------- hooks

_SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the settings as JSON."""
    parser.addoption("--flash-attention", metavar="JSON", help="fields of parity.flash_attention_plugin.Settings")


def pytest_configure(config: pytest.Config) -> None:
    """Replace FlashAttention before its tests import it."""
    settings = Settings(**json.loads(config.getoption("--flash-attention")))
    config.stash[_SETTINGS] = settings
    install_stand_ins(settings.backend)
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose from the product of a test's parameters before pytest makes an item of each case."""
    marks = list(metafunc.definition.iter_markers("parametrize"))
    if not marks:
        return
    settings, test = metafunc.config.stash[_SETTINGS], metafunc.definition.name
    axes = []
    for mark in marks:
        names, values = mark.args
        axes.append(([it.strip() for it in names.split(",")], list(values)))
    chosen, left_out = select(test, axes, settings)
    if settings.shard == 0:
        _tell(settings, {"test": test, "left_out": left_out})
    own = metafunc.definition.own_markers
    own[:] = [mark for mark in own if mark.name != "parametrize"]
    mine = chosen[settings.shard :: settings.shards]
    ids = ["-".join(str(it).removeprefix("torch.") for it in values) for values in mine]
    metafunc.parametrize([name for names, _ in axes for name in names], mine, ids=ids)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what stands for a test of which this process has no case."""
    items[:] = [it for it in items if not any("empty parameter set" in str(mark) for mark in it.iter_markers("skip"))]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run one case. What is refused by name is no failure."""
    if time.time() > pyfuncitem.config.stash[_SETTINGS].deadline:
        pytest.skip("not begun before the time was up")
    try:
        return (yield)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    except Unsupported as refusal:
        pytest.skip("; ".join(dict.fromkeys(map(str, refusal.reasons))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write down how a case ended."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if isinstance(report.longrepr, tuple):  # of a skip: path, line and reason
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # where it failed, and the message
            reason = f"line {crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        result = {"outcome": report.outcome, "reason": reason, "seconds": report.duration}
        test = getattr(item, "originalname", item.name)
        _tell(item.config.stash[_SETTINGS], {"test": test, "case": item.name, **result})
    return report


def _tell(settings: Settings, line: Mapping[str, Any]) -> None:
    with Path(settings.results).open("a") as file:
        file.write(json.dumps(line) + "\n")
