"""The models' table: rows that were measured, rows that say why not, and files that come back."""

from dataclasses import replace

import bench_fakes as fakes
import pytest

from bench import models
from bench.models import MODELS, ModelRow, ModelRun, load, merged, save

ROW = ModelRow(model="llama", mode="training", implementation="sdpa", tokens_per_s=2e4, time_ms=1.0, logits_error=1.0)
RUN = ModelRun(
    environment=fakes.SETUP,
    versions={"transformers": "5.0"},
    rows=(
        replace(ROW, implementation="multiattn", tokens_per_s=2.5e4),
        ROW,
        replace(ROW, implementation="eager", tokens_per_s=None, time_ms=None, error="OutOfMemoryError: 80 GiB"),
    ),
)


def test_files_come_back(tmp_path):
    other = replace(RUN, rows=(replace(ROW, model="gemma"),), versions={"transformers": "5.1"})
    save([RUN, other], tmp_path / "models.json")
    assert load(tmp_path / "models.json") == (RUN, other)


def test_all_of_a_model_is_of_its_latest_run():
    gemma = replace(RUN, rows=(replace(ROW, model="gemma"),))
    again = replace(RUN, rows=(ROW,), versions={"transformers": "5.1"})
    assert merged([], RUN) == (RUN,)
    assert merged([RUN], gemma) == (RUN, gemma)
    assert merged([RUN, gemma], again) == (gemma, again)


@pytest.mark.parametrize("model", MODELS, ids=lambda it: it.name)
def test_models_are_made_and_compared(model, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sizes = {**models._SIZES, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    monkeypatch.setattr(models, "_SIZES", sizes)
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
    if model.kind == "DeepseekV3":  # it has widths of its own, and a key head for each
        small = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    built = replace(model, options={**model.options, **small}).make()
    ids = torch.randint(0, 64, (1, 12))
    errors, faults = models._logits_errors(built, ids, ("sdpa", "no_such_attention"))
    assert "no_such_attention" in faults
    assert set(errors) | set(faults) == {"sdpa", "no_such_attention"}
    if model.kind == "Llama":
        assert errors["sdpa"] < models.SLACK
    for mode in models.MODES:
        built.train(mode == "training")
        built.set_attn_implementation("eager")
        models._step(built, ids, mode)
    assert all(it.grad is None or it.grad.isfinite().all() for it in built.parameters())
