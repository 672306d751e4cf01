"""The README keeps its promises: its code and the examples run as they stand, and it is short."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINES_AT_MOST = 150


@pytest.mark.parametrize("code", BLOCKS, ids=[str(place) for place in range(len(BLOCKS))])
def test_each_block_of_the_readme_runs_after_the_first(code, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if "transformers" in code:
        pytest.importorskip("transformers")
    names = {}
    try:
        for part in dict.fromkeys((BLOCKS[0], code)):
            exec(compile(part, "README.md", "exec"), names)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_the_readme_is_short_and_says_first_what_was_timed():
    assert len(README.splitlines()) <= LINES_AT_MOST
    first_screen = README[: README.index("## Install")]
    assert all(word in first_screen for word in ("H200", "H100", "forward (", "backward (", "training a model ("))
    assert len(BLOCKS) == 5


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda it: it.stem)
def test_example_runs(path, capsys, monkeypatch):
    """Here on the CPU; each holds what it asserts."""
    if path.stem == "transformers_model":
        pytest.importorskip("transformers")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
