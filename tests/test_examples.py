"""Every example runs, here on the CPU, and holds what it asserts."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda it: it.stem)
def test_example_runs(path, capsys, monkeypatch):
    if path.stem == "transformers_model":
        pytest.importorskip("transformers")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
