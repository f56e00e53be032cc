"""The site: it builds strictly, and each of its pages is read at a desk and on a telephone."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.report.browser import luminance, measured_in
from tests.report.chromium import NEEDS_CHROMIUM, chromium

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
WIDTHS = (1280, 400)


MEASURE = r"""
function measured(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, body = view.getComputedStyle(page.body);
  const rolls = each => each && (/auto|scroll/.test(view.getComputedStyle(each).overflowX) || rolls(each.parentElement));
  const content = [...page.querySelectorAll(".md-content *")];
  return {
    name: frame.name, width: view.innerWidth,
    scheme: page.body.dataset.mdColorScheme, ink: body.color, paper: body.backgroundColor,
    wider_by: page.documentElement.scrollWidth - view.innerWidth,
    cut: content.filter(each => each.getBoundingClientRect().right > view.innerWidth && !rolls(each)).map(each => each.tagName + " " + each.textContent.slice(0, 60)),
    missing: [...page.images].filter(each => each.naturalWidth === 0).map(each => each.src),
    num_words: content.length && page.querySelector(".md-content").innerText.split(/\s+/).length,
  };
}
addEventListener("load", () => {
  const all = [...document.querySelectorAll("iframe")].map(measured);
  document.body.innerHTML = "<pre id=measured></pre>";
  document.querySelector("pre").textContent = JSON.stringify(all);
});
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder)
    done = processes.run([sys.executable, *words], cwd=ROOT, fresh="it needs no torch")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def look_at(
    site: Path, names: list[str], folder: Path, is_dark: bool
) -> tuple[list[dict], list[str]]:
    frames = "".join(
        f'<iframe name="{name}" width="{width}" height="900" src="{(site / name).as_uri()}.html"></iframe>'
        for name in names
        for width in WIDTHS
    )
    # To the script of one file, another file is a stranger.
    return measured_in(folder, MEASURE, frames, "--allow-file-access-from-files", is_dark=is_dark)


def test_the_site_builds_strictly(site: Path) -> None:
    assert {name for name in PAGES if not (site / f"{name}.html").is_file()} == set()
    page = (site / "index.html").read_text()
    assert re.findall(r'<(?:link|script)[^>]*(?:href|src)="https?:', page) == []  # reads offline


@NEEDS_CHROMIUM
@pytest.mark.all
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_every_page_is_readable(site: Path, tmp_path: Path, is_dark: bool) -> None:
    found, console = look_at(site, sorted(PAGES), tmp_path, is_dark)
    assert console == []
    assert {(seen["name"], seen["width"]) for seen in found} == {
        (name, width) for name in PAGES for width in WIDTHS
    }
    for seen in found:
        assert seen["scheme"] == ("slate" if is_dark else "default"), seen
        assert (luminance(seen["ink"]) > luminance(seen["paper"])) == is_dark, seen
        assert seen["wider_by"] <= 0, seen
        assert (seen["cut"], seen["missing"]) == ([], []), seen
        assert seen["num_words"] >= 100, seen


@NEEDS_CHROMIUM
@pytest.mark.parametrize("name", ["index", "internals/measurements"])
def test_a_page_opened_as_a_file_can_be_searched(site: Path, tmp_path: Path, name: str) -> None:
    with chromium(tmp_path) as tab:
        tab.open(site / f"{name}.html", width=1280)
        tab.click(".md-search__input")  # raises if it cannot be seen
        tab.write("expandable segment")
        tab.press("s")
        tab.wait("document.querySelectorAll('.md-search-result__link').length > 0")
        links = tab.run(
            "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        )
        assert any(link.startswith((site / "allocator.html").as_uri()) for link in links), links
        assert tab.console == []


@NEEDS_CHROMIUM
def test_what_is_wrong_with_a_page_is_measured(site: Path, tmp_path: Path) -> None:
    page = (site / "index.html").read_text()
    spoilt = site / "spoilt.html"
    wrong = '<p style="width: 2000px">wide</p><img src="none.png"><script>no_such()</script>'
    spoilt.write_text(page.replace("</article>", f"{wrong}</article>"))
    found, console = look_at(site, ["spoilt"], tmp_path, is_dark=False)
    spoilt.unlink()
    assert any("no_such" in line for line in console)
    for seen in found:
        assert seen["wider_by"] > 0
        assert "P wide" in seen["cut"]
        assert [each.rpartition("/")[2] for each in seen["missing"]] == ["none.png"]
