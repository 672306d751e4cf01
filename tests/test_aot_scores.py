"""Kernels ahead of time with a modification of scores: its numbers and tensors come with each call."""

import json

import driver_fakes
import pytest
import torch
from aot_fakes import edit, emit

from multiattn import aot
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS
from multiattn.problem import problem_of


def tensors(seq_q=101, seq_kv=130, batch=2):
    q = torch.zeros(batch, 4, seq_q, 64, dtype=torch.bfloat16)
    k = torch.zeros(batch, 2, seq_kv, 64, dtype=torch.bfloat16)
    return q, k, k.clone()


def captured(seq_q=101, seq_kv=130):
    """ALiBi's slopes, bias, and a table by distance."""
    return torch.rand(4), torch.rand(1, 4, seq_q, 1, dtype=torch.bfloat16), torch.rand(4, seq_q + seq_kv)


def scored(qkv, of_score, softcap):
    slopes, bias, table = of_score

    def score_mod(s, b, h, i, j):
        return s + table[h, (i - j).abs()]

    options = Options.of(causal=False, window=None, scale=None, backend="auto", variant=None, deterministic=False)
    return problem_of(*with_score(Operands(*qkv), options, softcap, slopes, bias, score_mod))


@pytest.fixture
def driver(monkeypatch):
    fake = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver(), device=0)
    monkeypatch.setattr(aot, "detect", lambda device: ARCHS["sm90"])
    return fake


@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_and_tensors_come_with_a_call(name, driver, tmp_path):
    own = scored(tensors(), captured(), 30.0)
    _, _, files = emit(tmp_path, name, whole=own)
    digest = own.score.program.digest
    entry = json.loads(files[-1].read_text())["kernels"][0]
    assert entry["problem"]["score"]["sha256"] == digest
    assert digest[:8] in entry["name"]
    kernel = aot.load(tmp_path)
    assert kernel.plan.problem == own
    assert kernel.entry["launch"]["constants"]["score"] == digest
    for sizes, softcap in (((101, 130), 30.0), ((64, 333), 50.0)):
        qkv, of_score = tensors(*sizes), captured(*sizes)
        binding = kernel._try_binding(scored(qkv, of_score, softcap))
        driver.sizes = [abi.size_of(argument) for argument in binding.arguments]
        out, lse = kernel(*qkv, scalars={"softcap": softcap}, captured=of_score)
        areas = dict(zip([abi.WORKSPACE], [address for address, *_ in driver.cleared[-1:]], strict=False))
        operands = Operands(*qkv, out, lse, captured=of_score)
        driver_fakes.check_launches(driver.launched[-1:], [binding], operands, **areas)
        named = abi.names_of(binding)
        assert {"captured0", "captured1", "captured2"} <= set(named)
    assert len(driver.loaded) == 1


WRONG = {
    "no scalar": ({"scalars": {}}, "scalars: got none; allowed softcap"),
    "another scalar": ({"scalars": {"cap": 1.0}}, "scalars: got cap; allowed softcap"),
    "no tensors": ({"captured": ()}, "captured: got none; allowed float32 of rank 1, bfloat16 of rank 4, float32 of"),
    "a dtype": ({"captured": (captured()[0].double(), *captured()[1:])}, "captured: got float64 of rank 1, bfloat16"),
    "a size": ({"captured": (captured()[0][:2], *captured()[1:])}, r"captured tensor 0: got shape \(2,\)"),
    "a gradient": ({"captured": (captured()[0].requires_grad_(), *captured()[1:])}, "gradients: got tensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_program_does_not_take_is_refused(name, driver, tmp_path):
    options, message = WRONG[name]
    emit(tmp_path, "cuda", whole=scored(tensors(), captured(), 30.0))
    kernel = aot.load(tmp_path)
    with pytest.raises(ValueError, match=message):
        kernel(*tensors(), **{"scalars": {"softcap": 30.0}, "captured": captured()} | options)
    assert driver.launched == []


def test_a_kernel_without_scores_takes_none(driver, tmp_path):
    emit(tmp_path, "cuda")
    kernel = aot.load(tmp_path)
    with pytest.raises(ValueError, match="captured: got float32 of rank 1; allowed none"):
        kernel(*tensors(), captured=(torch.rand(4),))


def other_program(score):
    score["program"] = score["program"].replace('"tanh"', '"exp2"', 1)


DAMAGED = {
    "program": (other_program, "problem: score: sha256: got .*; allowed"),
    "text": (lambda score: score.update(program="{"), "damaged|no JSON|Expecting"),
    "fields": (lambda score: score.pop("shapes"), "problem: score: got no shapes"),
    "scalars": (lambda score: score.update(scalars=["x"]), "problem: score: scalars: got 'x'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_another_program_than_was_written_is_not_loaded(name, tmp_path):
    change, message = DAMAGED[name]
    emit(tmp_path, "cuda", whole=scored(tensors(), captured(), 30.0))
    edit(tmp_path, lambda entry: change(entry["problem"]["score"]))
    with pytest.raises(ValueError, match=message):
        aot.load(tmp_path)
