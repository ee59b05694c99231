"""The page at `/`, as a browser shows it: a chat, its errors in words, and nothing that a model's text could start."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm.llm import EMBEDDED_MODEL
from tests.browser import CHROMIUM, Page, browser
from tests.server.harness import STORY, Served, server

in_a_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>\n```html\n<b>bold</b>\n```\nend"

LISTEN = "window.asked ??= fetch; window.fetch = (...given) => { window.sent = given; return asked(...given) }"


def test_the_page_is_open_and_holds_nothing_from_elsewhere() -> None:
    with server(shadow=True, app_options={"api_keys": ("sesame",)}) as served:
        answer = httpx.get(served.url + "/")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
        assert httpx.head(served.url + "/").status_code == 200
        assert httpx.get(served.url + "/v1/models").status_code == 401
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
        assert not re.search(r"//\w|src=|@import|url\(", answer.text), "it would ask somebody else"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|\son\w+=", answer.text)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """Quiet in the end: nothing in the console, and no request to anybody else."""
    tab.console.clear()
    tab.requests.clear()
    tab.look(1280)
    yield tab
    assert not [line for line in tab.console if "Failed to load resource" not in line]  # a status that is an error
    assert {re.sub(r":\d+/.*", "", url) for url in tab.requests} <= {"http://127.0.0.1"}


def visit(page: Page, served: Served) -> None:
    page.open(served.url + "/")
    page.wait("by('model').textContent !== '…' || !by('key').hidden")
    page.wait("by('greeting').textContent")


def say(page: Page, text: str, wait: bool = True) -> None:
    """Type it and send it."""
    page.js("by('prompt').focus()")
    page.type(text)
    page.press("Enter")
    page.wait("document.querySelector('article')")
    if wait:
        page.wait("running === null")


def answers(page: Page, what: str = "answer") -> list[str]:
    found: list[str] = page.js(f"[...document.querySelectorAll('article .{what}')].map(e => e.textContent)")
    return found


def check_fits(page: Page, width: int) -> None:
    assert page.js("document.documentElement.scrollWidth") <= width
    over = "[...document.querySelectorAll('header, header button, #compose, aside, article > *')]"
    assert page.js(f"{over}.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length") == 0


class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_chat_is_streamed_remembered_and_measured(self, page: Page, served: Served) -> None:
        visit(page, served)
        assert page.js("document.title") == "story"
        page.js("by('temperature').value = 0; by('max_tokens').value = 12")
        say(page, STORY)
        [first] = answers(page)
        body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 12}
        whole = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=30).json()
        assert first == whole["choices"][0]["message"]["content"].strip("\n")
        assert re.fullmatch(
            r"12 tokens  ·  [\d.]+ tokens/s  ·  first token after [\d.]+ s  ·  ended at the length limit",
            answers(page, "meta")[0],
        )
        page.js(LISTEN)
        say(page, "Otto")
        sent = json.loads(page.js("sent[1].body"))["messages"]
        assert [turn["content"] for turn in sent] == [STORY, whole["choices"][0]["message"]["content"], "Otto"]
        turns = [(turn["role"], turn["content"]) for turn in page.js("turns")]
        assert [role for role, _ in turns] == ["user", "assistant"] * 2
        assert (turns[0][1], turns[2][1]) == (STORY, "Otto") and len(answers(page)) == 2
        page.js("by('fresh').click()")
        assert page.js("turns") == [] and answers(page) == []

    def test_keys(self, page: Page, served: Served) -> None:
        """Shift+Enter is a new line, Enter sends, Escape stops; the server computes nothing any more then."""
        visit(page, served)
        page.type("Nell")
        page.press("Enter", shift=True)
        page.type("Otto")
        assert page.js("by('prompt').value") == "Nell\nOtto" and answers(page) == []
        page.js(LISTEN)
        page.js("by('system').value = ''; parameters = () => ({ignore_eos: true, max_tokens: 230})")
        page.press("Enter")
        page.wait("document.querySelector('.answer')?.textContent.length > 5")
        assert page.js("by('stop').hidden") is False and page.js("by('send').hidden") is True
        page.press("Escape")
        page.wait("running === null && !document.querySelector('.running')")
        assert answers(page, "meta")[0].endswith("stopped")
        served.wait_idle()
        sent = json.loads(page.js("sent[1].body"))
        assert sent["messages"] == [{"role": "user", "content": "Nell\nOtto"}] and sent["stream"] is True

    def test_settings_are_sent_if_they_are_set(self, page: Page, served: Served) -> None:
        visit(page, served)
        assert page.js("parameters()") == {}
        page.js("by('more').click()")
        for name, value in {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": -7}.items():
            page.js(f"by('{name}').focus()")
            page.type(str(value))
        assert page.js("parameters()") == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": -7}
        page.js("by('system').value = 'Be kind.'")
        say(page, STORY)
        [error] = answers(page, "error")
        assert "no system messages" in error  # the reason of this model's template
        assert page.js("turns") == [] and page.js("by('prompt').value") == STORY, "not lost, and not a part of the chat"
        page.js("by('system').value = ''; by('temperature').value = 3; by('prompt').value = ''")
        say(page, STORY)
        assert answers(page, "error")[1].startswith("temperature: ")

    def test_errors_are_told_in_words(self, page: Page, served: Served) -> None:
        visit(page, served)
        say(page, STORY * 40)
        assert "max_model_len=256" in answers(page, "error")[0]
        with server(shadow=True) as gone:
            visit(page, gone)
        page.js("by('prompt').value = ''")
        say(page, "Nell")
        assert answers(page, "error")[0].startswith("The connection to the server is lost.")

    def test_a_server_with_a_key_asks_for_it(self, page: Page) -> None:
        with server(shadow=True, app_options={"api_keys": ("sesame",)}) as served:
            visit(page, served)
            assert page.js("by('greeting').textContent") == "This server asks for an API key."
            for key, told in ("wrong", "The server does not know this API key."), ("sesame", "Talk to story"):
                page.wait("document.activeElement === by('secret')")
                page.js("by('secret').value = ''")
                page.type(key)
                page.press("Enter")
                page.wait(f"by('greeting').textContent === {told!r}")
            assert page.js("by('key').hidden") is True
            assert "sesame" not in " ".join(page.requests)

    def test_a_model_without_a_template_completes(self, page: Page, tmp_path: Path) -> None:
        shutil.copytree(EMBEDDED_MODEL, tmp_path / "base")
        config = tmp_path / "base" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
        with server(tmp_path / "base") as served:
            visit(page, served)
            assert page.js("by('chat').disabled && mode") == "complete"
            page.js("by('max_tokens').value = 5; by('seed').value = 1")
            say(page, STORY)
            body = {"prompt": STORY, "max_tokens": 5, "seed": 1}
            text = httpx.post(served.url + "/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
            assert answers(page) == [STORY + text] and answers(page, "new") == [text]

    def test_the_text_of_a_model_is_text(self, page: Page, served: Served) -> None:
        visit(page, served)
        event = {"choices": [{"delta": {"content": HOSTILE, "reasoning_content": HOSTILE}}]}
        page.js(f"window.turn = new Turn({HOSTILE!r}, true); turn.take({json.dumps(event)}); turn.end()")
        assert page.js("document.querySelectorAll('article img, article script, article b').length") == 0
        assert page.js("document.querySelector('article pre').textContent") == "<b>bold</b>"
        assert page.js("document.querySelector('.answer').lastChild.textContent") == "end"
        assert page.js("window.hit") is None

    def test_even_a_hole_in_the_page_would_run_nothing(self, page: Page, served: Served) -> None:
        """The policy alone keeps out what somebody had brought into the page."""
        visit(page, served)
        page.js(f"by('greeting').innerHTML = {HOSTILE!r}")
        page.js(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 3'}))"
        )
        page.js("fetch('http://127.0.0.2:1/').catch(() => 0)")
        refused = " ".join(page.console)
        assert page.js("window.hit") is None and refused.count("Content Security Policy") >= 3
        page.console.clear()

    @pytest.mark.parametrize("dark", [False, True])
    @pytest.mark.parametrize("width", [390, 1280])
    def test_it_fits_a_telephone_and_a_desk(self, page: Page, served: Served, width: int, dark: bool) -> None:
        page.look(width, dark=dark)
        visit(page, served)
        check_fits(page, width)
        assert page.js("getComputedStyle(document.body).backgroundColor") == (
            "rgb(20, 23, 28)" if dark else "rgb(252, 252, 250)"
        )
        page.js("by('max_tokens').value = 8")
        say(page, STORY + "x" * 60)
        event: Any = {"choices": [{"delta": {"content": "```\n" + "long " * 50 + "\n```\n" + "y" * 200}}]}
        page.js(f"window.turn = new Turn('a', true); turn.take({json.dumps(event)})")
        page.js(f"turn.end(new Refusal('{'z' * 200}'))")
        check_fits(page, width)
        page.js("by('more').click()")
        check_fits(page, width)
        assert page.js("by('settings').getBoundingClientRect().width") == (width if width < 500 else 264)
