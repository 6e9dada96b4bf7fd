"""The rendered book in Chromium: no other host, no error, no dead link, and widgets that move.

Needs the book rendered (`make book`) and Chromium; `make test` sees to the first.
"""

import functools
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import chromium
import pytest
import yaml
from bs4 import BeautifulSoup
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WIDGET = "application/vnd.jupyter.widget-{}+json"
ALL_SHOWN = """([sliders, views]) =>
  document.querySelectorAll('.widget-slider').length >= sliders &&
  document.querySelectorAll('.widget-subarea > .jupyter-widgets').length >= views"""


def sources() -> list[str]:
    """Every page of the contents, as its source file."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *(c["file"] for part in toc["parts"] for c in part["chapters"])]


def html_of(source: str) -> str:
    return str(Path(source).with_suffix(".html").as_posix())


PAGES = [*map(html_of, sources()), "search.html", "genindex.html"]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_) -> None: ...


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Address of the rendered book on loopback, ending in a slash."""
    for source in sources():
        page = HTML / html_of(source)
        assert page.exists(), f"{page.relative_to(ROOT)} is not there: run `make book` first"
        assert page.stat().st_mtime >= (ROOT / source).stat().st_mtime, (
            f"{page.relative_to(ROOT)} is older than {source}: run `make book` first"
        )
    handler = functools.partial(Quiet, directory=HTML)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium.find()
    assert path, chromium.MISSING
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=FLAGS) as launched,
    ):
        yield launched


@functools.cache
def soup(name: str) -> BeautifulSoup:
    return BeautifulSoup((HTML / name).read_text(encoding="utf-8"), "html.parser")


def views(name: str) -> int:
    """How many widgets the page shows."""
    return len(soup(name).find_all("script", type=WIDGET.format("view")))


def sliders(name: str) -> int:
    """How many sliders these widgets hold."""
    states = soup(name).find_all("script", type=WIDGET.format("state"))
    models = (m for s in states for m in json.loads(s.string)["state"].values())
    return sum((m["state"].get("_view_name") or "").endswith("SliderView") for m in models)


class Visit(NamedTuple):
    page: Page
    requested: list[str]  # addresses
    troubles: list[str]  # console errors, exceptions, failed and refused requests


@pytest.fixture(scope="module", params=PAGES)
def visit(request, site, browser) -> Iterator[Visit]:
    """One page of the book, loaded and settled."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    requested, troubles = [], []
    page.on("request", lambda r: requested.append(r.url))
    page.on("requestfailed", lambda r: troubles.append(f"{r.url} failed: {r.failure}"))
    page.on("response", lambda r: r.ok or troubles.append(f"{r.url} gave {r.status}"))
    page.on("pageerror", lambda error: troubles.append(f"exception: {error}"))
    page.on("console", lambda m: m.type == "error" and troubles.append(describe(m)))
    page.goto(site + request.param, wait_until="networkidle")
    page.wait_for_function("window.MathJax === undefined || MathJax.startup?.promise !== undefined")
    page.evaluate("window.MathJax?.startup.promise")
    page.wait_for_function(ALL_SHOWN, arg=[sliders(request.param), views(request.param)])
    page.wait_for_load_state("networkidle")
    yield Visit(page, requested, troubles)
    page.close()


def describe(message: ConsoleMessage) -> str:
    return f"console: {message.text} ({message.location['url']})"


def test_page_loads_without_errors(visit):
    assert visit.troubles == []


def test_page_asks_no_other_host(visit, site):
    local = ("data:", "blob:", site)
    assert [url for url in visit.requested if not url.startswith(local)] == []


def test_formulas_are_typeset(visit):
    formulas = visit.page.locator("article .math:not(dt)")
    assert visit.page.locator("mjx-container").count() == formulas.count()
    unknown = visit.page.locator('mjx-merror, mjx-container [style*="red"]')  # undefined macros
    assert unknown.all_text_contents() == []


def test_pictures_have_alt_text(visit):
    images = visit.page.locator("article img").all()
    assert [i.get_attribute("src")[:80] for i in images if not i.get_attribute("alt")] == []


def shown(widget: Locator) -> list[str]:
    """Addresses of the pictures of a widget that can be seen."""
    return [i.get_attribute("src") for i in widget.locator("img").all() if i.is_visible()]


def test_moving_a_slider_changes_the_picture(visit):
    for slider in visit.page.locator(".widget-slider").all():
        widget = slider.locator("xpath=ancestor::*[contains(@class, 'widget-subarea')]")
        handle = slider.locator(".noUi-handle")
        handle.focus()
        before = shown(widget)
        assert before, "a slider without a picture"
        visit.page.keyboard.press("ArrowRight")
        visit.page.wait_for_timeout(100)
        after = shown(widget)
        visit.page.keyboard.press("ArrowLeft")
        visit.page.wait_for_timeout(100)
        assert len(before) == len(after)
        assert before != after, "the slider moved and the picture did not"
        assert shown(widget) == before


def test_every_widget_is_shown(visit):
    for area in visit.page.locator(".widget-subarea").all():
        assert area.locator(".jupyter-widgets").count() > 0
        assert area.bounding_box()["height"] > 10


def test_theme_button_changes_the_colours(visit):
    page = visit.page
    seen = set()
    for _ in range(3):  # auto, light, dark
        page.locator(".theme-switch-button").first.click()
        seen.add(
            (
                page.locator("html").get_attribute("data-theme"),
                page.evaluate("getComputedStyle(document.body).backgroundColor"),
            )
        )
    assert {theme for theme, _ in seen} == {"light", "dark"}
    assert len({colour for _, colour in seen}) == 2


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name, site):
    """Every link within the book names a file and, after #, an element of it."""
    dead = []
    for link in soup(name).select("a[href]"):
        url, anchor = urldefrag(urljoin(site + name, link["href"]))
        if not url.startswith(site):
            continue
        target = unquote(urlparse(url).path).lstrip("/") or "index.html"
        exists = (HTML / target).is_file()
        if not exists or (anchor and not soup(target).find(id=unquote(anchor))):
            dead.append(link["href"])
    assert dead == []
