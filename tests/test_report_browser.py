"""The page in a real browser: quiet, drawn, every control at work, at three widths, and accessible in either theme.

Skipped where there is no Chromium, or no Playwright to drive it.
"""

import contextlib
import re
import shutil

import pytest
import report_pages

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'multiattn[dev]'")
axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = pytest.mark.xdist_group("report_browser")  # one page and one browser for all
WIDTHS = (390, 1400, 2560)
PARTS = ("forward", "backward", "decode", "parity", "targets", "models")
FITS = """() => [...document.querySelectorAll('.plot svg')].every((it) => it.closest('figure').hidden
    || Math.abs(it.getBoundingClientRect().width - it.closest('.plot').clientWidth) < 24)"""
DRAWN = "() => document.querySelectorAll('.plot:not([data-drawn=\"true\"])').length === 0"


def find_browser():
    """A system's Chromium, or None for Playwright's own."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(sync_api.sync_playwright())
        try:
            found = started.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        except sync_api.Error as error:
            if find_browser() is not None:
                raise  # what is there has to start
            pytest.skip(f"no Chromium to look at the page with: {str(error).splitlines()[0]}")
        stack.callback(found.close)
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {"report": report_pages.report(folder), "compare": report_pages.compared(folder)}


class Visit:
    """A page that is open, and all that it said or asked for."""

    def __init__(self, browser, path):
        size = {"width": 1400, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme="light", reduced_motion="reduce")
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector('html[data-ready="true"]')
        self.url = path.as_uri()

    def settle(self):
        self.page.wait_for_function(DRAWN)

    def drawn(self, part):
        """All of a part that a control may change, places aside: marks, axes and the table."""
        self.settle()
        return self.page.evaluate(
            """(id) => [...document.querySelectorAll(`#${id} .plot path[d], #${id} .plot text, #${id} .table-box tr`)]
            .map((it) => [it.getAttribute('fill'), it.getAttribute('stroke'), it.textContent].join(' ')).sort()""",
            part,
        )


def opened(name):
    @pytest.fixture(scope="module")
    def fixture(browser, files):
        visit = Visit(browser, files[name])
        yield visit
        visit.context.close()

    return fixture


report, compare = opened("report"), opened("compare")


@pytest.fixture(autouse=True)
def stays_quiet(request):
    """Nothing is logged and nothing asked for, whatever a test does to a page."""
    yield
    for visit in (request.getfixturevalue(name) for name in ("report", "compare") if name in request.fixturenames):
        assert visit.said == []
        assert {url for url in visit.asked if not url.startswith("data:")} == {visit.url}


# ---------------------------------------------------------------- drawn


def test_every_plot_is_drawn_and_has_a_name(report):
    plots = report.page.evaluate(
        """() => [...document.querySelectorAll('.plot')].map((it) => ({
            part: it.closest('section').id, label: it.getAttribute('aria-label'),
            role: it.role, hidden: it.closest('figure').hidden,
            marks: it.querySelectorAll('.mark-symbol path, .mark-rect path, .mark-line path').length,
            broken: /NaN|undefined|Infinity/.test(it.innerHTML),
        }))"""
    )
    assert [it["part"] for it in plots] == [*(name for name in PARTS[:3] for _ in range(3)), *PARTS[3:]]
    for it in plots:
        assert not it["broken"], it
        assert re.match("Plot of|Heat map", it["label"]), it
        assert it["role"] == "img", it
        assert it["marks"] > (0 if it["part"] == "targets" else 2) or it["hidden"], it  # a demo's has one kernel here


# ---------------------------------------------------------------- controls


def controls(visit, part):
    """The name, kind and position of each control of a part that a reader sees."""
    return visit.page.evaluate(
        """(id) => [...document.querySelectorAll(`#${id} .field:not([hidden])`)].map((it) => ({
            field: it.dataset.field, radios: it.querySelectorAll('input[type=radio]').length,
            boxes: it.querySelectorAll('input[type=checkbox]').length,
            options: it.querySelector('select')?.length ?? 0,
            unnamed: [...it.querySelectorAll('input, select')].filter((one) => !one.labels.length).length,
        }))""",
        part,
    )


@pytest.mark.parametrize("part", PARTS)
def test_every_control_changes_what_is_drawn(report, part):
    found = controls(report, part)
    assert found
    for it in found:
        assert not it["unnamed"]
        field = report.page.locator(f'#{part} .field[data-field="{it["field"]}"]')
        before = report.drawn(part)
        if it["boxes"]:
            box = field.locator("input").first
            box.click()
            assert report.drawn(part) != before, it
            box.click()
        elif it["options"]:
            chosen = field.locator("select").input_value()
            field.locator("select").select_option(str((int(chosen) + 1) % it["options"]))
            assert report.drawn(part) != before, it
            field.locator("select").select_option(chosen)
        else:
            radios = [field.locator("input").nth(at) for at in range(it["radios"])]
            (chosen,) = (radio for radio in radios if radio.is_checked())
            next(radio for radio in radios if not radio.is_checked()).check()
            assert report.drawn(part) != before, it
            report.page.locator(f"#{chosen.get_attribute('id')}").check()
        assert report.drawn(part) == before, it


@pytest.mark.parametrize(("part", "field"), [("forward", "contenders"), ("parity", "backend")])
def test_an_empty_plot_says_so(report, part, field):
    """And every box is still there."""
    root = report.page.locator(f"#{part}")
    told = root.get_by_text("Nothing to draw")
    boxes = root.locator(f'.field[data-field="{field}"] input')
    checked = [box for box in boxes.all() if box.is_checked()]
    count, before = root.locator(".field input[type=checkbox]").count(), report.drawn(part)
    assert not told.first.is_visible()
    for box in checked:
        box.uncheck()
    report.settle()
    assert told.first.is_visible()
    assert root.locator(".field input[type=checkbox]").count() == count
    for box in checked:
        box.check()
    assert report.drawn(part) == before
    assert not told.first.is_visible()


def test_an_infinite_error_is_no_figure(report):
    part = report.page.locator("#parity")
    part.locator("summary").click()
    part.get_by_role("button", name=re.compile(r"^0\.3: cuda, even, dq")).wait_for()  # strict: one, and no other
    part.get_by_role("button", name=re.compile("^inf: cuda, odd, out")).click()
    assert "inf (max)" in report.page.get_by_role("dialog").inner_text()
    report.page.keyboard.press("Escape")
    part.locator("summary").click()


def test_a_suite_shows_its_own_axis_and_comes_back(report):
    part = report.page.locator("#forward")
    before = report.drawn("forward")
    part.get_by_label("every head_dim").check()
    report.settle()
    assert part.locator(".lines-title").inner_text() == "TFLOPS by D"
    labels = part.locator(".ratios .role-axis-label text").evaluate_all(
        "(its) => its.map((it) => [it.getBoundingClientRect().top, it.textContent])"
    )
    sizes = [int(text.removeprefix("D ")) for _, text in sorted(labels) if text.startswith("D ")]
    assert sizes == sorted(sizes)
    assert len(sizes) == 28
    part.get_by_label("standard", exact=True).check()
    assert report.drawn("forward") == before


# ---------------------------------------------------------------- tables and plans


def column(visit, part, at):
    return visit.page.locator(f"#{part} .table-box tbody tr > :nth-child({at + 1})").all_text_contents()


def test_columns_sort_both_ways(report):
    header, ways = report.page.locator("#forward thead th").nth(1), set()
    for _ in range(2):
        header.get_by_role("button").click()
        ways.add(way := header.get_attribute("aria-sort"))
        values = list(map(float, column(report, "forward", 1)))
        assert values == sorted(values, reverse=way == "descending")
    assert ways == {"ascending", "descending"}
    assert report.page.locator("#forward thead th[aria-sort]").count() == 1


def test_lengths_sort_as_numbers_and_words_stand_last(report):
    report.page.locator("#forward thead th").first.get_by_role("button").click()
    assert column(report, "forward", 0) == ["512", "1k", "2k", "4k", "8k", "16k"]
    part = report.page.locator("#decode")
    part.get_by_label("every cell of the suite").check()
    names = part.locator("thead th button").all_text_contents()
    at = names.index("fa3")
    for _ in range(2):
        part.locator("thead th").nth(at).get_by_role("button").click()
        told = column(report, "decode", at)
        words = [place for place, text in enumerate(told) if not text[0].isdigit()]
        assert words == [*range(len(told) - len(words), len(told))]
        assert 0 < len(words) < len(told)
    part.get_by_label("every cell of the suite").uncheck()


@pytest.mark.parametrize("how", ["click", "Enter"])
def test_a_figure_opens_its_plan_and_escape_gives_the_focus_back(report, how):
    figure = report.page.locator("#forward .table-box button.figure").first
    panel = report.page.get_by_role("dialog")
    if how == "click":
        figure.click()
    else:
        figure.focus()
        report.page.keyboard.press(how)
    panel.wait_for()
    text = panel.inner_text()
    for part in ("Measured", "Plan", "variant", "why", "Config", "python -m bench"):
        assert part in text, part
    report.page.keyboard.press("Escape")
    assert panel.count() == 0
    assert figure.evaluate("(it) => it === document.activeElement")


def test_a_config_in_a_config_is_told_field_by_field(report):
    """The second pass of a backward was "[object Object]"."""
    part, panel = report.page.locator("#backward"), report.page.get_by_role("dialog")
    box = part.get_by_label("cuda/wgmma_two_pass", exact=True)
    box.check()
    report.settle()
    part.get_by_role("button", name="cuda/wgmma_two_pass, ").first.click()
    assert "dq.tile_m" in panel.inner_text()
    assert "object" not in panel.inner_text()
    report.page.keyboard.press("Escape")
    box.uncheck()
    report.settle()


def test_a_refusal_opens_its_reasons_and_the_close_button_closes(report):
    report.page.locator("#decode .table-box").get_by_role("button", name="refused").first.click()
    panel = report.page.get_by_role("dialog")
    assert "Why it did not run" in panel.inner_text()
    assert re.search(r"\w+: got .*; allowed ", panel.inner_text())
    panel.get_by_role("button", name="Close").click()
    assert panel.count() == 0


@pytest.mark.parametrize(
    ("mark", "word"),
    [
        ("#forward .lines .mark-symbol path", "Measured"),
        ("#backward .ratios .mark-rect path", "Plan"),
        ("#parity .mark-symbol path", "Error"),
        ("#targets .mark-rect path", "Kernel"),
    ],
)
def test_a_mark_opens_the_same_panel(report, mark, word):
    report.page.locator(mark).first.click(force=True)
    panel = report.page.get_by_role("dialog")
    assert word in panel.inner_text()
    report.page.keyboard.press("Escape")
    assert panel.count() == 0


# ---------------------------------------------------------------- widths, themes, access


def test_plots_fit_their_place_when_others_come_and_go(report):
    """A long heat map gives the lines a row of their own, which they kept after it was gone."""
    report.page.set_viewport_size({"width": 2560, "height": 1300})
    for suite in ("every head_dim", "held out", "standard"):
        report.page.locator("#forward").get_by_label(suite, exact=True).check()
        report.settle()
        report.page.wait_for_function(FITS, timeout=2000)
    report.page.set_viewport_size({"width": 1400, "height": 900})


OVERLAPPING = """() => {
    const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1
        || b.bottom <= a.top + 1;
    const boxes = (plot, name) => [...plot.querySelectorAll(name)].map((it) => it.getBoundingClientRect());
    return [...document.querySelectorAll('.plot')].filter((plot) => {
        const labels = boxes(plot, '.role-axis-label text');
        const cells = boxes(plot, '.mark-rect.role-mark path');
        return labels.some((it, at) => [...labels.slice(at + 1), ...cells].some((other) => !apart(it, other)));
    }).map((plot) => plot.getAttribute('aria-label'));
}"""
BEYOND = """() => [...document.querySelectorAll('h1, h2, h3, p, label, .card *, figure, .field, summary')]
    .filter((it) => !it.closest('nav, dialog, .away, .skip, .table-box, .wide-box, svg') && it.checkVisibility()
        && it.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map((it) => it.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "compare"])
def test_nothing_reaches_beyond_the_page_or_lies_on_a_plots_label(request, name, width):
    """The names of models' attentions lay on the first row, in two lines."""
    visit = request.getfixturevalue(name)
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.page.wait_for_function(FITS)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    assert [visit.page.evaluate(it) for it in (BEYOND, OVERLAPPING)] == [[], []]
    visit.page.set_viewport_size({"width": 1400, "height": 900})


def choose_theme(visit, theme):
    visit.page.get_by_label(theme, exact=True).check()
    visit.settle()


def test_the_theme_follows_the_system_until_a_reader_chooses(report):
    theme = "() => document.documentElement.dataset.theme"
    told = report.page.evaluate("() => JSON.parse(document.getElementById('data').textContent).styles.cuda")
    line = report.page.locator("#forward .lines")
    for scheme in ("dark", "light"):
        report.page.emulate_media(color_scheme=scheme)
        report.page.wait_for_function(f"{theme} === '{scheme}'".replace("() => ", ""))
        report.settle()
        assert line.locator(f'path[stroke="{told[scheme]}"]').count() > 0
    choose_theme(report, "dark")
    assert report.page.evaluate(theme) == "dark"
    assert line.locator(f'path[stroke="{told["dark"]}"]').count() > 0
    choose_theme(report, "system")
    assert report.page.evaluate(theme) == "light"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "compare"])
def test_axe_finds_nothing(request, name, theme):
    visit = request.getfixturevalue(name)
    choose_theme(visit, theme)
    folded = "(open) => document.querySelectorAll('main details:not([open]), details.axe').forEach((it) => "
    folded += "(it.classList.toggle('axe', open), it.open = open))"
    visit.page.evaluate(folded, True)
    colours = {"runOnly": ["color-contrast", "link-in-text-block"]}  # all else is the same in either theme
    plots = {"exclude": [[".plot svg"]]}  # hidden from readers of the page's tree; the next test looks into them
    found = axe_playwright.Axe().run(visit.page, context=plots, options=None if theme == "light" else colours)
    assert found.violations_count == 0, found.generate_report()
    visit.page.locator(".table-box button.figure").first.click()
    found = axe_playwright.Axe().run(visit.page, context="dialog")
    assert found.violations_count == 0, found.generate_report()
    visit.page.keyboard.press("Escape")
    visit.page.evaluate(folded, False)
    choose_theme(visit, "system")


def test_text_in_plots_stands_out_from_what_is_below_it(report):
    """Axe does not look into plots: the text of every cell of a heat map, and of every axis, by WCAG's own formula."""
    for theme in ("light", "dark"):
        choose_theme(report, theme)
        worst = report.page.evaluate(
            """() => {
            const parts = (it) => it.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const light = (it) => parts(it).map((one) => one / 255)
                .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
                .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
            const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
            const fill = (it) => getComputedStyle(it).fill;
            const card = getComputedStyle(document.querySelector('figure')).backgroundColor;
            const labels = [...document.querySelectorAll('.plot .role-axis-label text')];
            const found = labels.map((it) => contrast(fill(it), card));
            for (const plot of document.querySelectorAll('.ratios, .shares')) {
                const cells = [...plot.querySelectorAll('.mark-rect path')];
                for (const group of plot.querySelectorAll('.mark-text.role-mark')) {
                    const texts = [...group.querySelectorAll('text')];
                    found.push(...texts.map((it, at) => contrast(fill(it), fill(cells[at]))));
                }
            }
            return Math.min(...found);
        }"""
        )
        assert worst >= 4.5, theme
    choose_theme(report, "system")


def test_paper_shows_all_of_a_table_and_the_colours(report):
    """A table was cut where it scrolls, and the dark theme's text stood on white."""
    report.page.emulate_media(media="print")
    part = report.page.locator("#decode")
    part.get_by_label("every cell of the suite").check()
    box = part.locator(".table-box")
    assert box.evaluate("(it) => it.scrollHeight - it.clientHeight") < 2
    assert report.page.evaluate("getComputedStyle(document.body).printColorAdjust") == "exact"
    part.get_by_label("every cell of the suite").uncheck()
    report.page.emulate_media(media="screen")


# ---------------------------------------------------------------- differences


def test_the_page_of_differences_draws_filters_and_opens_both_readings(compare):
    part = compare.page.locator("#changes")
    assert part.locator(".mark-symbol path").count() == 59
    part.locator("summary").click()
    part.locator("tbody tr").first.wait_for()
    assert part.locator("tbody tr").count() == 60
    part.get_by_label("same", exact=True).uncheck()
    compare.settle()
    assert sorted(column(compare, "changes", 7)) == ["gone", "slower"]
    part.get_by_role("button", name=re.compile(r"^0\.500:")).click()
    text = compare.page.get_by_role("dialog").inner_text()
    assert text.count("variant") == 2
    for word in ("Before", "After", "slower"):
        assert word in text
    compare.page.keyboard.press("Escape")
    part.get_by_label("same", exact=True).check()
    part.locator("summary").click()
    compare.settle()
