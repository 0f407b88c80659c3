"""The report is one file that needs nothing else, and tells all that the rows tell."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from result_rows import in_turns, written
from sweep_rows import failed_row, quality_row, speed_row, sweep

import results
from command import run_one_of
from reporting.commands import COMMANDS
from reporting.html_report import ranks
from reporting.plots import PLOTS
from reporting.select import newest
from reporting.table import make_table
from results import read_rows

ROOT = Path(results.__file__).parent
RESULTS = ROOT / "benchmark_results.txt"
MADE = [*sweep(), failed_row(), quality_row(), quality_row(context=2048), quality_row("bf16")]
NASTY = '<script>alert(1)</script>"&\x1b'
SECTIONS = ["verdicts", "environment", "rows", "pictures", "failures", "reproduce", "definitions"]
FORBIDDEN = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "audio"}
REFERENCES = {"href", "src", "srcset", "xlink:href", "action", "data", "poster", "background"}


class Outline(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, {name: value or "" for name, value in attributes}))

    def handle_data(self, data):
        self.text += data


def report(rows, tmp_path, *flags) -> str:
    path = rows if isinstance(rows, Path) else written(tmp_path / "rows.txt", rows)
    out = tmp_path / "report.html"
    assert run_one_of(COMMANDS, ["report", str(path), "--out", str(out), *flags]) == 0
    return out.read_text()


NASTY_ROWS = [
    speed_row(kv_format, depth, model=NASTY, device_name=NASTY)
    for kv_format in ("bf16", "int8")
    for depth in (0, 64)
]
NASTY_ROWS.append(failed_row(error=NASTY))


@pytest.mark.parametrize("rows", [MADE, RESULTS, NASTY_ROWS], ids=["made", "committed", "nasty"])
def test_the_page_has_no_script_and_refers_to_nothing_outside(rows, tmp_path):
    page = report(rows, tmp_path)
    outline = Outline(page)
    assert not {tag for tag, _ in outline.tags} & FORBIDDEN
    for _, attributes in outline.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in REFERENCES & set(attributes):
            assert attributes[name].startswith("#")
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page
    policies = [a["content"] for t, a in outline.tags if t == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


@pytest.mark.parametrize("rows", [MADE, RESULTS], ids=["made", "committed"])
def test_ids_are_used_once_and_links_lead_somewhere(rows, tmp_path):
    tags = Outline(report(rows, tmp_path)).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {a[name][1:] for _, a in tags for name in ("href", "xlink:href") if name in a}
    labels = {attributes["for"] for tag, attributes in tags if tag == "label"}
    assert links | labels <= set(ids)
    assert len(labels) > 5


def test_the_sections_come_in_their_order_with_a_picture_for_each_plot(tmp_path):
    page = report(MADE, tmp_path)
    assert re.findall(r'<h2 id="(\w+)"', page) == SECTIONS
    assert re.findall(r'<figure id="picture-(\w+)"', page) == list(PLOTS)
    assert len(re.findall("<svg ", page)) == len(PLOTS)


def test_every_row_every_command_and_every_failure_is_told(tmp_path):
    rows = newest(read_rows(written(tmp_path / "rows.txt", MADE)))
    (tmp_path / "rows.txt").open("a").write("schema=1, depth=x\n")
    page = report(tmp_path / "rows.txt", tmp_path)
    text = Outline(page).text
    for row in rows:
        assert '<li id="row-' in page
        assert page.count(html.escape(row.repro, quote=True).replace("&#x27;", "&#39;")) >= 2
    assert len(re.findall(r'<li id="row-\d+">', page)) == len(rows)
    assert "oom: decode: OutOfMemoryError: CUDA out of memory" in text
    assert "rows.txt:13: repro: missing" in text
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        numbers = re.findall(r'href="#row-(\d+)"', figure)
        assert len(numbers) == len(set(numbers)) == figure.count("<li><code>")
        assert numbers


def test_what_differs_between_machines_is_marked(tmp_path):
    rows = [speed_row(), speed_row(device_name="other", threads=16)]
    page = report(rows, tmp_path)
    assert 'class="differs">differs: NVIDIA H200; other<' in page
    assert page.count('class="differs"') == 1


def test_verdicts_are_those_of_compare(tmp_path):
    alone = report([speed_row()], tmp_path)
    assert 'id="verdicts"' not in alone
    in_pairs = written(tmp_path / "pairs.txt", in_turns(6, 1.2))
    assert "<td>FASTER</td>" in report(in_pairs, tmp_path)


def test_rows_are_ranked_by_each_column_the_best_first():
    rows = [speed_row("int8", 0, decode_tok_s=v, peak_mem_gb=v) for v in (3, 1, 2)]
    rows.append(failed_row("int8", 0))
    table = make_table(rows)
    headings = [column.heading for column in table.columns]
    places = list(zip(*ranks(table), strict=True))
    assert places[headings.index("decode tok/s, ± 95 %")] == (1, 3, 2, 4)
    assert places[headings.index("peak GB")] == (3, 1, 2, 4)


def test_a_report_without_rows_or_place_is_refused(tmp_path, capsys):
    path = written(tmp_path / "rows.txt", [speed_row()])
    for words, message in (
        (["report", f"{path}:depth=5"], "depth=5: no such rows"),
        (["report", str(path), "--out", str(path / "x.html")], "x.html: cannot be written: "),
    ):
        assert run_one_of(COMMANDS, words) == 2
        assert message in capsys.readouterr().err


CHROMIUM = browser.find()


@pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: needs Chromium, or CHROMIUM naming one")
def test_a_browser_without_a_network_shows_all_of_it(tmp_path):
    path = tmp_path / "report.html"
    report(MADE, tmp_path)
    with browser.page(CHROMIUM, tmp_path / "profile") as page:
        for width in (1280, 400):
            page.open(path, width)
            asked = [each["request"]["url"] for each in page.of("Network.requestWillBeSent")]
            assert asked == [path.as_uri()]
            sizes = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert sizes[1] == width
            assert sizes[0] <= width
            pictures = page.evaluate(
                "[...document.querySelectorAll('figure svg')].map(s => {"
                "s.scrollIntoView(); const b = s.getBoundingClientRect();"
                "return s.checkVisibility() && b.width >= 600 && b.height > 300"
                " && b.top < innerHeight})"
            )
            assert pictures == [True] * len(PLOTS)
            kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
            assert page.of(*kinds) == []


@pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: needs Chromium, or CHROMIUM naming one")
def test_a_click_on_a_heading_sorts_the_rows(tmp_path):
    report(sweep(), tmp_path)
    with browser.page(CHROMIUM, tmp_path / "profile") as page:
        page.open(tmp_path / "report.html", 1280)
        for heading, best in (("decode tok/s, ± 95 %", max), ("peak GB", min), ("depth", min)):
            values = page.evaluate(
                "(() => {const heads = [...document.querySelectorAll('.sorter th')];"
                f"const at = heads.findIndex(h => h.textContent == {heading!r});"
                "heads[at].querySelector('label').click();"
                "const top = r => r.getBoundingClientRect().top;"
                "return [...document.querySelectorAll('.sorter tbody tr')]"
                ".sort((a, b) => top(a) - top(b)).map(r => parseFloat(r.cells[at].textContent))})()"
            )
            assert len(values) == len(sweep())
            assert values == sorted(values, reverse=best is max)
