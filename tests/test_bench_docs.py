"""Generated tables and pictures: what they make of results, and how a stale one is found."""

import re

import bench_fakes as fakes
import pytest

from bench import comparison, docs
from bench.docs import results_block
from bench.matrix import SUITES, InputError
from bench.results import dumps

CELLS = [cell for cell in SUITES["standard"] if cell.head_dim == 128]
ROWS = [
    fakes.row(name, time_ms * cell.seq / 4096, cell=cell, spread=0.02)
    for cell in CELLS
    for name, time_ms in (("cuda", 1.0), ("sdpa-cudnn", 1.5))
]
NOT_MEASURED = comparison.NOT_MEASURED


# ---------------------------------------------------------------- tables


def test_tables_are_made_again(tmp_path):
    made = {"results": lambda: results_block(tmp_path)}
    page = docs.render("a\n<!-- generated:results -->\nstale\n<!-- /generated -->\nb\n", made)
    assert page == f"a\n<!-- generated:results -->\n\n{NOT_MEASURED}\n\n<!-- /generated -->\nb\n"
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "standard.json").write_text(dumps("standard", ROWS))
    assert re.search(r"128 \| causal \| 4096 +\| 100", page := docs.render(page, made))
    assert "backward" not in page
    for text, why in (
        ("no marker", "there is no <!-- gen"),
        ("<!-- generated:x -->\n<!-- /generated -->", "nothing gen"),
    ):
        with pytest.raises(InputError, match=why):
            docs.render(text, made)


def test_every_page_and_picture_is_current_and_can_be_made_before_anything_is_measured(tmp_path):
    assert docs.update_all(check=True) == [], "run python -m bench docs"
    for blocks in docs.pages(tmp_path).values():
        assert all(make() for make in blocks.values())
