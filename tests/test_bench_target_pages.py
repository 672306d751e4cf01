"""The pages of the targets: complete, linked, alone in the world, plain about what is compiled and what measured."""

import argparse
import re
from dataclasses import replace
from html.parser import HTMLParser

import bench_fakes
import markupsafe
import pytest
import targets_fakes as fakes

from bench import expected, target_cli, target_docs, target_pages, target_profiles, target_views
from bench.errors import InputError
from bench.expected import Record, current_sources
from bench.results import dumps
from multiattn.inspect.ncu import METRICS, Launch, Measured
from multiattn.inspect.remarks import Row as Remarked
from multiattn.inspect.roofline import Measurement
from multiattn.plan.arch import GPU_ARCHS

PAGES = ("index.html", *(f"{arch}.html" for arch in GPU_ARCHS))
NASTY = '<script>alert("&")</script>'
SPILLING = fakes.facts("spilling", registers=255, hot_spills=70, other_spills=5)
FAILED = fakes.failed("cuda", "sm80", head_dim=64, mask="full")
REFUSED = fakes.refused("triton", "sm86")
ENTRIES = (
    fakes.entry("cuda", "sm90"),
    fakes.entry("cutile", "sm90", kernels=(fakes.facts("prepare_rows"), SPILLING), direction="backward"),
    replace(FAILED, error=f"RuntimeError: {NASTY}\nand a second line"),
    REFUSED,
    replace(fakes.entry("triton", "sm120", kernels=(fakes.facts(NASTY),)), why=NASTY, config=NASTY),
)
REACHED = Measurement(
    gpu="H200",
    direction="forward",
    batch=4,
    heads=16,
    seq=4096,
    head_dim=128,
    dtype="bf16",
    causal=True,
    contender="cutile/two_pass",
    tflops=500.0,
)


class Page(HTMLParser):
    """What a test asks of a page: ids, what is referred to, and every table cell's text and title."""

    def __init__(self, text):
        super().__init__()
        self.text, self.ids, self.links, self.tags, self.cells = text, [], [], set(), []
        self.table, self.inside = "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src", "action") if name in found]
        if tag == "table":
            self.table = found.get("class", "")
        if tag in ("td", "th"):
            self.cells.append({"tag": tag, "table": self.table, "class": found.get("class", ""), "text": ""})
            self.inside = True
        if tag == "a" and self.inside:
            self.cells[-1] |= {"href": found["href"], "title": found.get("title", "")}

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.cells[-1]["text"] += data


def recorded(entries=ENTRIES, sources=()):
    """A record of these entries."""
    return {
        arch: Record(
            entries=tuple(entry for entry in entries if entry.cell.arch == arch),
            compilers={"cuda": "nvrtc 13"},
            sources=dict(sources),
        )
        for arch in {entry.cell.arch for entry in entries}
    }


def drawn(monkeypatch, out, record, measurements=(), files=()):
    """The text of every page."""
    monkeypatch.setattr(target_docs, "measured", lambda: tuple(measurements))
    monkeypatch.setattr(target_docs, "result_files", lambda: list(files))
    return {path.name: path.read_text() for path in target_pages.write(record, out)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every page, parsed."""
    with pytest.MonkeyPatch.context() as patch:
        texts = drawn(patch, tmp_path_factory.mktemp("targets") / "deep" / "er", recorded(), [REACHED])
    return {name: Page(text) for name, text in texts.items()}


def heat(page):
    """The cells of the heat maps."""
    return [cell for cell in page.cells if cell["table"] == "heat" and cell["tag"] == "td"]


def test_a_page_for_every_target_and_one_across_them(pages):
    assert tuple(pages) == PAGES
    assert all("compiled, not measured" in page.text for page in pages.values())
    assert len(heat(pages["index.html"])) == 2 * len(target_views.MAPS) * 18 * len(GPU_ARCHS)


def test_every_link_leads_somewhere(pages):
    for name, page in pages.items():
        assert len(set(page.ids)) == len(page.ids)
        for link in page.links:
            file, _, place = link.partition("#")
            assert (file or name) in pages, link
            assert not place or place in pages[file or name].ids, link


def test_nothing_outside_is_referred_to(pages):
    for page in pages.values():
        assert not page.tags & {"script", "link", "img", "iframe"}
        assert not re.search(r"https?://|url\(|@import", page.text)


def test_no_cell_is_empty(pages):
    assert not [cell for page in pages.values() for cell in page.cells if not cell["text"].strip()]


def test_an_empty_cell_says_why(pages):
    found = {cell["href"]: cell for cell in heat(pages["index.html"]) if cell["class"] == "empty"}
    refused, failed = found["sm86.html#forward-triton-d128-causal"], found["sm80.html#forward-cuda-d64-full"]
    assert (refused["text"], refused["title"]) == ("refused: arch", f"refused: {REFUSED.text}")
    assert failed["text"].startswith("error: RuntimeError")
    assert failed["title"].endswith("and a second line")
    assert found["sm121.html#forward-triton-d64-full"]["text"] == "not on record"
    for page, cell in (("sm86.html", refused), ("sm80.html", failed)):
        for place in ("index.html", page):
            assert f"<li>{markupsafe.escape(cell['title'])}" in pages[place].text
    assert all(cell["title"] for cell in found.values())


def test_a_heat_map_counts_the_spills_of_all_kernels(pages):
    link = "sm90.html#backward-cutile-d128-causal"
    found = [cell for cell in heat(pages["index.html"]) if cell["href"] == link]
    assert [cell["text"] for cell in found[:2]] == ["168", "70 +5"]
    assert [cell["class"] for cell in found] == ["l1", "l3", "l3", ""]
    assert "registers" in found[2]["text"]
    assert found[3]["text"] == "wgmma TMA load"


def test_the_kernels_of_a_target(pages):
    page = pages["sm90.html"]
    texts = [cell["text"] for cell in page.cells if cell["table"] == "kernels"]
    start = texts.index("spilling")
    shown = ["128", "255", "70 + 5", "0", "0 + 65536", "3, by registers", "18.8 %", "4096"]
    assert texts[start + 1 : start + 9] == shown
    assert texts[start + 9 : start + 14] == ["16 x HGMMA.64x128x16.F32.BF16", "TMA load", "14.4", "12.0", "2.0"]
    assert "Chosen because: the rule says nothing" in page.text
    assert "HGMMA.64x128x16.F32.BF16</code>" in page.text


def test_what_was_measured_stands_beside_its_ceiling(pages):
    texts = {name: [cell["text"] for cell in page.cells] for name, page in pages.items()}
    assert "500, 51 % cutile/two_pass" in texts["index.html"]
    assert "500, 51 % cutile/two_pass" in texts["sm90.html"]
    assert "not measured" in texts["sm90.html"]
    assert "not measured" in texts["sm80.html"]
    assert not any("51 %" in text for name in PAGES if name not in ("index.html", "sm90.html") for text in texts[name])


def test_names_and_errors_are_escaped(pages):
    for name in ("index.html", "sm80.html", "sm120.html"):
        assert NASTY not in pages[name].text
        assert "&lt;script&gt;alert(&#34;&amp;&#34;)&lt;/script&gt;" in pages[name].text


def test_the_same_record_gives_the_same_bytes(monkeypatch, tmp_path, pages):
    again = drawn(monkeypatch, tmp_path, recorded(), [REACHED])
    assert again == {name: page.text for name, page in pages.items()}


def test_results_are_named_with_where_they_are_from(monkeypatch, tmp_path):
    setup = replace(bench_fakes.SETUP, gpu="NVIDIA H200", commit="c0ffee")
    path = tmp_path / "h200" / "standard.json"
    path.parent.mkdir()
    row = bench_fakes.row("cuda", 1.0, setup=setup)
    replayed = replace(row, regime="graph", command="python -m bench run --regime graph")
    path.write_text(dumps("standard", [row, replayed]))
    texts = drawn(monkeypatch, tmp_path / "out", recorded(), [REACHED], [path])
    for name in ("index.html", "sm90.html"):
        assert "bench/results/h200/standard.json" in texts[name]
        assert "commit c0ffee" in texts[name]
        assert "python -m bench run" in texts[name]
        assert "--regime graph" not in texts[name]  # the pages are of the device regime
        assert str(tmp_path) not in texts[name]
    assert "c0ffee" not in texts["sm80.html"]


@pytest.mark.parametrize("current", [True, False])
def test_remarks_show_their_line_only_of_the_sources_that_were_compiled(monkeypatch, tmp_path, current):
    remark = Remarked(file="forward.py", line=1, what="TMA load 64x64", count=2, failed=True)
    entry = fakes.entry("cutile", "sm90", kernels=(fakes.facts(remarks=(remark,)),))
    sources = current_sources() if current else {"cutile forward": "of another day"}
    text = drawn(monkeypatch, tmp_path, recorded([entry], sources))["sm90.html"]
    first = (target_pages.ROOT / "multiattn" / "cutile" / "kernels" / "forward.py").read_text().splitlines()[0]
    assert "forward.py:1" in text
    assert "failed:</strong> TMA load 64x64" in text
    assert (str(markupsafe.escape(first)) in text) is current
    assert ("other sources than here" in text) is not current


@pytest.mark.parametrize(
    ("scale", "changes", "level"),
    [
        (target_views.REGISTERS, {"registers": 128}, 0),
        (target_views.REGISTERS, {"registers": 129}, 1),
        (target_views.REGISTERS, {"registers": 255}, 4),
        (target_views.SPILLS, {}, 0),
        (target_views.SPILLS, {"other_spills": 1}, 1),
        (target_views.SPILLS, {"other_spills": 1016}, 2),
        (target_views.SPILLS, {"hot_spills": 257}, 4),
        (target_views.OCCUPANCY, {"share": 1.0}, 0),
        (target_views.OCCUPANCY, {"share": 0.5}, 0),
        (target_views.OCCUPANCY, {"share": 0.125}, 3),
        (target_views.OCCUPANCY, {"share": 0.0625}, 4),
    ],
)
def test_a_scale_goes_from_best_to_worst(scale, changes, level):
    assert scale.level(fakes.facts(**changes)) == level


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.125, "12.5 %"), (0.0625, "6.3 %"), (0.1875, "18.8 %"), (0.25, "25 %"), (1.0, "100 %"), (0.3333, "33.3 %")],
)
def test_a_share_has_a_tenth_of_a_percent_where_it_is_not_whole(share, text):
    assert target_views.percent(share) == text
    (occupancy,) = (heat for heat in target_views.MAPS if heat.name == "occupancy")
    assert occupancy.show(fakes.entry(kernels=(fakes.facts(share=share),))).text == text


# ---------------------------------------------------------------- measured by Nsight Compute

TOLD = ("duration", "registers", "static smem", "dynamic smem", "occupancy", "achieved occupancy", "local loads")
UNITS = ("ns", "register/thread", "byte/block", "byte/block", "%", "%", "")
LIKE = (1_234_500, 168, 0, 65_536, 18.75, 17.94, 0)
"""What ncu would measure of the fakes' kernel, by TOLD."""


def quoted(*cells):
    return ",".join(f'"{cell}"' for cell in cells)


def ncu_csv(*launches, cc="9.0", asked=()):
    """``--page raw`` of ncu: of launches that are a name and numbers by TOLD."""
    place = ("CC",) if cc else ()
    head = quoted("ID", "Kernel Name", "Block Size", "Grid Size", *place, *(METRICS[name] for name in TOLD), *asked)
    units = quoted(*[""] * (4 + len(place)), *UNITS, *["inst"] * len(asked))
    rows = [
        quoted(number, name, "(128, 1, 1)", "(512, 1, 1)", *((cc,) if cc else ()), *values)
        for number, (name, *values) in enumerate(launches)
    ]
    return "\n".join(["==PROF== Connected to process 4711", head, units, *rows, ""])


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The pages that the command writes, with files of ncu."""

    def draw(record, *texts):
        files = [tmp_path / f"found{number}.csv" for number, _ in enumerate(texts)]
        for path, text in zip(files, texts, strict=True):
            path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
        monkeypatch.setattr(expected, "load_all", lambda folder: record)
        monkeypatch.setattr(target_docs, "measured", lambda: ())
        monkeypatch.setattr(target_docs, "result_files", list)
        parser = argparse.ArgumentParser()
        target_cli.add_pages(parser)
        given = [word for path in files for word in ("--ncu", str(path))]
        assert target_cli.write_pages(parser.parse_args(["--out", str(tmp_path / "out"), *given])) == 0
        return {path.name: Page(path.read_text()) for path in (tmp_path / "out").glob("*.html")}

    return draw


def below(page):
    """The cells of the section's rows, kernel by kernel."""
    start = page.text.index('<h2 id="ncu">')
    start = page.text.index("<tbody>", start)
    rows = []
    for cell in Page(page.text[start : page.text.index("</tbody>", start)]).cells:
        rows += [[]] if cell["tag"] == "th" else []
        rows[-1].append(cell)
    return rows


TWO = (
    fakes.entry("cuda", "sm90", kernels=(fakes.facts("forward_bf16"),)),
    fakes.entry("triton", "sm90", kernels=(fakes.facts("attention_forward"),)),
    fakes.entry("triton", "sm90", mask="full", kernels=(fakes.facts("attention_forward", registers=154),)),
    fakes.entry("cutile", "sm90", kernels=(fakes.facts("forward", static_smem_bytes=65536, dynamic_smem_bytes=0),)),
    fakes.entry("cuda", "sm80", kernels=(fakes.facts("forward_bf16", registers=200),)),
)


def test_what_ncu_measured_stands_beside_what_was_compiled(measured):
    pages = measured(recorded(TWO), ncu_csv(("forward_bf16", *LIKE)))
    (row,) = below(pages["sm90.html"])
    assert [cell["text"] for cell in row[:4]] == [
        "forward_bf16", "cuda forward D=128 causal sm90", "(512, 1, 1), (128, 1, 1)", "found0.csv"
    ]  # fmt: skip
    assert row[1]["href"] == "sm90.html#forward-cuda-d128-causal"
    compared = ["168", "168", "0", "0", "65,536", "65,536", "18.8 %", "18.8 %"]
    assert [cell["text"] for cell in row[4:12]] == compared
    assert [cell["text"] for cell in row[12:14]] == ["1,234.5", "17.9 %"]
    assert [cell["text"] for cell in row[14:]].count("not measured") == len(METRICS) - len(TOLD)
    assert not [cell for cell in row if "l4" in cell["class"]]
    assert "Measured by Nsight Compute" in pages["sm90.html"].text.partition("</p>")[0]  # what is measured, up there
    for name, page in pages.items():
        assert all(link.partition("#")[2] in ("", *pages[link.partition("#")[0] or name].ids) for link in page.links)
        assert ("Nsight Compute" in page.text) is (name == "sm90.html")
        assert all(cell["text"].strip() for cell in page.cells)


def test_what_differs_from_what_was_compiled_is_marked(measured):
    values = {**dict(zip(TOLD, LIKE, strict=True)), "registers": 170, "occupancy": 12.5}
    (row,) = below(measured(recorded(TWO), ncu_csv(("forward_bf16", *values.values())))["sm90.html"])
    marked = [(cell["text"], cell["class"]) for cell in row if "differs" in cell["text"]]
    assert marked == [("170 differs", "l4"), ("12.5 % differs", "l4")]
    assert "href" in row[1]


def test_two_decimals_of_a_kilobyte_do_not_differ():
    kernel = fakes.facts()
    metrics = {target_profiles.DYNAMIC: Measured(value=65.54, unit="Kbyte/block")}
    launch = Launch(kernel=kernel.name, arch="sm90", grid="", block="", metrics=metrics)
    it = target_profiles.Profiled(file="", launch=launch, cell=None, note="", kernel=kernel)
    assert [slot.level for figure in target_profiles.COMPARED for slot in it.compared(figure)] == [None] * 8


def test_cells_whose_kernels_share_a_name_are_told_apart_by_their_figures(measured):
    full, causal, other = ((LIKE[0], registers, *LIKE[2:]) for registers in (154, 168, 99))
    pages = measured(
        recorded(TWO),
        ncu_csv(("attention_forward", *full), ("attention_forward", *causal), ("attention_forward", *causal)),
        ncu_csv(("attention_forward", *other), ("forward_Kt2_i32(int)", *LIKE[:2], 65536, 0, *LIKE[4:])),
    )
    rows = below(pages["sm90.html"])
    assert [row[1].get("href", row[1]["text"]) for row in rows] == [
        "sm90.html#forward-triton-d128-full",
        "sm90.html#forward-triton-d128-causal",
        "not told",
        "sm90.html#forward-cutile-d128-causal",
    ]
    assert "differs in registers or shared memory from all 2 kernels of this name" in rows[2][0]["text"]
    assert [row[3]["text"] for row in rows] == ["found0.csv"] * 2 + ["found1.csv"] * 2


def test_a_kernel_that_may_be_of_two_cells_leads_to_none(measured):
    twins = [fakes.entry("triton", "sm90", mask=mask, kernels=(fakes.facts("keys"),)) for mask in ("full", "causal")]
    (row, stranger) = below(measured(recorded(twins), ncu_csv(("keys", *LIKE), ("rung", *LIKE)))["sm90.html"])
    assert "may be of: triton forward D=128 full sm90, triton forward D=128 causal sm90" in row[0]["text"]
    assert [cell["text"] for cell in row[4:6]] == ["168", "168"]  # the same of both
    assert "no kernel of this name on record" in stranger[0]["text"]
    assert [cell["text"] for cell in stranger[4:6]] == ["not told", "168"]
    assert not [cell for cell in (*row, *stranger) if "href" in cell]


def test_without_the_gpu_a_kernel_is_on_the_pages_that_its_name_and_figures_are_of(measured):
    pages = measured(recorded(TWO), ncu_csv(("forward_bf16", LIKE[0], 200, *LIKE[2:]), cc=""))
    assert {name for name, page in pages.items() if 'id="ncu"' in page.text} == {"sm80.html"}


def test_a_metric_that_was_asked_for_has_its_column(measured):
    page = measured(recorded(TWO), ncu_csv(("forward_bf16", *LIKE, "0.29"), asked=("smsp__stalled.ratio",)))[
        "sm90.html"
    ]
    assert "smsp__stalled.ratio measured" in [cell["text"] for cell in page.cells]
    assert below(page)[0][-1]["text"] == "0.29 inst"


def test_no_file_of_ncu_changes_nothing(measured, monkeypatch, tmp_path):
    assert {name: page.text for name, page in measured(recorded(TWO)).items()} == drawn(
        monkeypatch, tmp_path / "plain", recorded(TWO)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ncu printed no table"),
        (b"\x89PNG\xff\x00", "no text"),
        ("==ERROR== ERR_NVGPUCTRPERM\n", "ERR_NVGPUCTRPERM"),
        (ncu_csv(("forward_bf16", *LIKE), cc="7.0"), "got forward_bf16 on sm70; allowed sm80"),
        (ncu_csv(("stranger", *LIKE), cc=""), "got stranger and no CC"),
    ],
)
def test_a_file_that_is_not_of_ncu_is_named(measured, text, message):
    with pytest.raises(InputError, match=rf"--ncu: \S*found0\.csv: .*{message}"):
        measured(recorded(TWO), text)


def test_a_file_of_ncu_that_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.csv: cannot be read: No such file"):
        target_pages.read_profile(tmp_path / "none.csv")
