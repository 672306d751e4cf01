"""Generated tables and pictures: what they make of results, and how a stale one is found."""

import re
from dataclasses import replace

import bench_fakes as fakes
import pytest

from bench import comparison, docs
from bench.docs import results_block
from bench.docs_support import ranges, support_block
from bench.matrix import SUITES, InputError
from bench.results import RESULTS, dumps
from multiattn.plan.backend import BACKENDS

CELLS = [cell for cell in SUITES["standard"] if cell.head_dim == 128]
ROWS = [
    fakes.row(name, time_ms * cell.seq / 4096, cell=cell, spread=0.02)
    for cell in CELLS
    for name, time_ms in (("cuda", 1.0), ("sdpa-cudnn", 1.5))
]
NOT_MEASURED = comparison.NOT_MEASURED


# ---------------------------------------------------------------- tables


def test_the_support_table_has_a_word_in_every_cell():
    table = [line for line in support_block().splitlines() if line.startswith("|")]
    assert all(name in "".join(table) for name in BACKENDS)
    assert not any(re.search(r"\|\s*\|", line) for line in table)
    assert (ranges([8, 16, 24, 64, 128, 136]), ranges([])) == ("8-24, 64, 128-136", "")


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


# ---------------------------------------------------------------- the comparison


def store(folder, stem, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}.json").write_text(dumps(stem, rows))


def test_the_comparison_tells_the_worst_cell_and_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "auto_backend", lambda cell, arch: "cuda")
    fast, slow = (cell for cell in CELLS if cell.seq in (1024, 4096) and cell.causal)
    times = {fast: {"cuda": 1.0, "fa4": 2.0, "sdpa-cudnn": 3.0}, slow: {"cuda": 4.0, "fa4": 2.0, "sdpa-cudnn": 1.0}}
    store(tmp_path / "h200", "standard", [fakes.row(*it, cell=cell) for cell in times for it in times[cell].items()])
    found = comparison.compared(tmp_path)
    table = comparison.comparison_block(found)
    assert f"forward, H200 | 2       | **{(2 * 0.25) ** 0.5:.2f}** (0.250)<br>D128 causal 4k" in table
    assert "cuDNN, FA4" in table
    assert comparison.verdict_block(found).splitlines() == [
        "- **Slower:** forward (H200 0.71).",
        "- **Slower when you name it:** CUDA in forward (H200 0.71).",
    ]


def test_a_ratio_of_a_kernel_that_has_been_replaced_has_a_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "auto_backend", lambda cell, arch: "cuda")
    rows = [fakes.row("cuda", 1.0, cell=CELLS[0]), fakes.row("fa4", 2.0, cell=CELLS[0])]
    rows[0] = replace(rows[0], plan={"variant": "split_q"})
    store(tmp_path / "h200", "standard", rows)
    found = comparison.compared(tmp_path)
    assert "**2.00**† (2.000)" in comparison.comparison_block(found)
    assert "forward (H200 2.00†). † Some" in comparison.verdict_block(found)


def test_a_peer_that_was_not_timed_in_every_cell_says_in_how_many():
    timed = [(name, cell) for cell in CELLS for name in ("cuda", "sdpa-cudnn", "multiattn", "another")]
    timed += [("fa3", CELLS[0]), ("fa3", CELLS[1]), ("triton/atomic", CELLS[0])]
    assert comparison.peers_of(timed) == "cuDNN, FA3 (2 cells), another"
    assert comparison.peers_of([]) == ""


def test_auto_has_a_backend_in_every_cell_of_decode():
    cells = {row.cell for row in docs._rows(RESULTS / "h200" / "decode.json")}
    kinds = {(it.head_dim, it.queries * it.group, it.mixed, it.page): it for it in cells}
    assert {comparison.auto_backend(it, "sm90") for it in kinds.values()} <= set(BACKENDS)
