"""The operations page in a headless Chromium: what it shows, what it sets, and how it looks.

Pictures are kept in pytest's temporary folder: `pytest tests/serve/test_page.py --basetemp=FOLDER`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browser import CHROMIUM, Page, browser
from fakes import CHAT, EchoEngine, body, listening
from operated import ADMIN_KEY, FakeServe, operated_app, report

from serve_app.guard import Limits
from serve_app.peers import Plain

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def serve() -> FakeServe:
    return FakeServe()


@pytest.fixture
def url(serve: FakeServe, page: Page) -> Iterator[str]:
    """The address of an endpoint with another replica beside it. Whatever the page does, it asks nobody else and
    complains of nothing."""

    async def ask(_own: Plain) -> list[dict[str, Plain]]:
        return [{"b": report("b").plain()}]

    app, replica = operated_app(EchoEngine(pace_s=0.02), serve, ask=ask)
    page.requests.clear()
    page.problems.clear()
    page.look(1200, 900)
    with listening(app) as url:
        yield url
        page.open("about:blank")
    replica.close()
    assert {request for request in page.requests if not request.startswith((url, "data:", "about:"))} == set()
    assert page.problems == []


def shows(page: Page, **texts: str) -> None:
    """Wait until elements have these texts; `_` in a name stands for `-`."""
    for name, text in texts.items():
        page.wait(f"document.getElementById('{name.replace('_', '-')}').textContent === {text!r}")


def fill(page: Page, **values: object) -> None:
    for name, value in values.items():
        page.run(f"document.getElementById('{name.replace('_', '-')}').value = {str(value)!r}")


def test_it_shows_the_state_of_all_replicas(page: Page, url: str) -> None:
    page.open(f"{url}/ui")
    shows(page, model="echo", running_replicas="1", wanted="1", running="3", waiting="2", tau="3.00", tau_all="3.00")
    shows(page, kv="30 %", scaling="autoscaled, 1 to 4")
    assert page.run("document.querySelectorAll('#slots > div').length") == 5
    assert page.run("document.querySelector('#slots > div').title") == "slot 1: accepted in 83.3 % of blocks"
    names = "[...document.querySelectorAll('#replicas td:first-child')].map(cell => cell.textContent)"
    assert page.run(names) == ["b", "own"]
    assert page.run("document.getElementById('pages').style.width") == "30%"
    assert page.run("document.getElementById('api-key-field').offsetParent") is None  # no key is asked for


def test_rates_and_acceptance_are_live(page: Page, url: str) -> None:
    page.open(f"{url}/ui")
    shows(page, rate="0.0")
    httpx2.post(f"{url}{CHAT}", json=body(60 * "hello "), timeout=60).raise_for_status()
    page.wait("document.querySelector('.span').textContent.startsWith('last')")
    page.wait("document.getElementById('rate').textContent > 0")
    shows(page, tau="4.00")  # of the blocks since the page was opened
    assert page.run("document.querySelector('#slots > div').title") == "slot 1: accepted in 100.0 % of blocks"


def test_a_reason_stands_only_while_it_holds(page: Page, url: str, serve: FakeServe) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("Serve is away")

    news = "document.getElementById('scale-news').textContent"
    answering, serve.details = serve.details, fail
    page.open(f"{url}/ui")
    page.wait(f"{news}.includes('Serve is away')")
    serve.details = answering
    page.wait(f"{news}.includes('lets it choose again')")


def test_a_prompt_streams_and_drafts_are_coloured_by_slot(page: Page, url: str) -> None:
    page.open(f"{url}/ui")
    fill(page, prompt="hello there", max=64)
    page.run("document.getElementById('send').click()")
    page.wait("!document.getElementById('send').disabled && document.getElementById('counts').textContent")
    shows(page, answer="hello there")
    slots = page.run("[...document.querySelectorAll('#answer span')].map(span => span.dataset.slot ?? null)")
    assert slots == [None, "1", "2", "3", None, "1", "2", "3", None, "1", "2", "3"]  # the last is the end token
    colours = page.run("[...document.querySelectorAll('#answer .draft')].map(s => getComputedStyle(s).backgroundColor)")
    assert len(set(colours[:3])) == 3 and colours[:3] == colours[3:6]
    assert "9 of 15 drafts accepted" in page.run("document.getElementById('counts').textContent")
    fill(page, prompt="BOOM")
    page.run("document.getElementById('send').click()")
    page.wait("document.getElementById('answer').textContent.includes('cursed')")


def test_a_long_answer_can_be_stopped(page: Page, url: str) -> None:
    page.open(f"{url}/ui")
    fill(page, prompt=2000 * "a", max=2000)
    page.run("document.getElementById('send').click()")
    page.wait("document.querySelectorAll('#answer span').length > 5")
    page.run("document.getElementById('stop').click()")
    page.wait("!document.getElementById('send').disabled")
    assert page.run("document.getElementById('answer').textContent.length") < 2000


def test_replicas_are_set_with_the_key(page: Page, url: str, serve: FakeServe) -> None:
    page.open(f"{url}/ui")
    shows(page, wanted="1")
    fill(page, count=3, admin_key=ADMIN_KEY.decode())
    page.run("document.getElementById('set').click()")
    shows(page, wanted="3", running_replicas="3", scaling="autoscaler held at 3")
    assert serve.wanted == 3 and "3 wanted" in page.run("document.getElementById('scale-news').textContent")


def test_a_wrong_key_is_told(page: Page, url: str, serve: FakeServe) -> None:
    page.open(f"{url}/ui")
    shows(page, wanted="1")
    fill(page, count=3, admin_key="wrong")
    page.run("document.getElementById('set').click()")
    page.wait("document.getElementById('scale-news').textContent.includes('missing or wrong')")
    assert not serve.deployed
    assert "401" in page.problems.pop()  # the browser notes every refused request


def test_without_a_key_the_control_is_disabled_and_says_why(page: Page, serve: FakeServe) -> None:
    app, replica = operated_app(EchoEngine(), serve, admin_key=None)
    with listening(app) as url:
        page.open(f"{url}/ui")
        page.wait("document.getElementById('scale-news').textContent.includes('admin_key_file')")
        assert page.run("['count', 'admin-key', 'set'].every(id => document.getElementById(id).disabled)")
        page.open("about:blank")
    replica.close()


def test_an_api_key_is_asked_for_where_one_is_needed(page: Page, serve: FakeServe) -> None:
    app, replica = operated_app(EchoEngine(), serve, limits=Limits(api_keys=("open sesame",)))
    with listening(app) as url:
        page.open(f"{url}/ui")
        page.wait("document.getElementById('api-key').offsetParent !== null")
        page.wait("document.getElementById('news').textContent.includes('API key is needed')")
        fill(page, api_key="open sesame")
        shows(page, model="echo", wanted="1")
        fill(page, prompt="hello", max=64)
        page.run("document.getElementById('send').click()")
        shows(page, answer="hello")
        page.open("about:blank")
    replica.close()


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False), (360, True)])
def test_it_fits_and_a_picture_is_kept(page: Page, url: str, tmp_path: Path, width: int, dark: bool) -> None:
    page.look(width, 900, dark)
    page.open(f"{url}/ui")
    shows(page, wanted="1")
    fill(page, prompt="def area(width, height): return width * height", max=200)
    page.run("document.getElementById('send').click()")
    page.wait("!document.getElementById('send').disabled && document.getElementById('counts').textContent")
    assert page.run("document.documentElement.scrollWidth") <= width
    if width < 500:  # one card a line
        assert page.run("new Set([...document.querySelectorAll('.card')].map(card => card.offsetWidth)).size") == 1
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.strip("rgb()").split(","))) < 384) == dark
    path = tmp_path / f"page-{width}-{'dark' if dark else 'light'}.png"
    page.picture(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    print(path)
