"""The chat page in headless Chromium; skipped where Chromium or playwright is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("uvicorn")

import api_kit  # noqa: E402
from page_stub import Stub, StubServer  # noqa: E402
from playwright.sync_api import Browser, Locator, Page, expect  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TIMEOUT = 300_000
"""Milliseconds after which something hangs, on a slow machine too."""


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as running:
        expect.set_options(timeout=TIMEOUT)
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=TIMEOUT)
        yield browser
        browser.close()


@pytest.fixture
def stub(server: StubServer) -> Stub:
    server.stub.__init__()
    return server.stub


@pytest.fixture
def problems() -> list[str]:
    """What the browser reports as an error or blocks. A test that provokes this clears it."""
    return []


@pytest.fixture
def page(browser: Browser, server: StubServer, stub: Stub, problems: list[str]) -> Iterator[Page]:
    """The page at the size of a desktop."""
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" and "status of 4" not in m.text else None)
    page.set_default_timeout(TIMEOUT)
    page.goto(server.url)
    yield page
    context.close()
    assert problems == []


def ask(page: Page, text: str) -> Locator:
    """Send a message, and return the newest answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.locator(".answers").last.locator(".answer").last


def test_a_conversation_streams_and_goes_on(page: Page, stub: Stub) -> None:
    answer = ask(page, "Hi")
    expect(answer.locator(".answer-text")).to_have_text("Hello, world.")
    expect(answer.locator(".stats")).to_have_text(
        re.compile(r"^42 tokens · [\d,.]+ tokens/s · first after \d+ ms · length$")
    )
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    ask(page, "Go on")
    expect(page.locator(".answer-text").last).to_have_text("Hello, world.")
    assert [m["content"] for m in stub.asked[1]["messages"]] == ["Hi", "Hello, world.", "Go on"]
    assert stub.asked[0].keys() == {"model", "stream", "stream_options", "messages"}, "empty fields are the server's"
    assert stub.asked[0]["model"] == "demo-int8"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answer")).to_have_count(0)


def test_sampling_and_the_system_message_are_sent(page: Page, stub: Stub) -> None:
    page.get_by_label("System message").fill("Be brief.")
    for label, value in (("Temperature", "0.7"), ("Top k", "40"), ("Seed", "3"), ("Max tokens", "9")):
        page.get_by_label(label).first.fill(value)
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    sent = stub.asked[0]
    assert (sent["temperature"], sent["top_k"], sent["seed"], sent["max_tokens"]) == (0.7, 40, 3, 9)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_label("Temperature").first.fill("-1")
    page.get_by_label("Message", exact=True).fill("Hi again")
    page.keyboard.press("Enter")
    assert page.get_by_label("Temperature").first.evaluate("e => e === document.activeElement")
    assert len(stub.asked) == 1, "an invalid value is not sent"


@pytest.mark.parametrize("by", ["Escape", "the button"])
def test_stopping_closes_the_stream_and_keeps_the_text(page: Page, stub: Stub, by: str) -> None:
    stub.pieces, stub.seconds = ["word "] * 1000, 0.02
    answer = ask(page, "Hi")
    expect(answer.locator(".answer-text")).to_contain_text("word word")
    if by == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".stats")).to_contain_text("stopped")
    expect(answer.locator(".answer-text")).to_contain_text("word word")
    while stub.num_open:  # the test's own timeout ends what hangs
        page.wait_for_timeout(10)
    stub.pieces = ["Fine."]
    expect(ask(page, "And now?").locator(".answer-text")).to_have_text("Fine.")


def test_two_answers_side_by_side(page: Page, stub: Stub) -> None:
    page.get_by_label("Two answers side by side").check()
    page.get_by_label("Temperature").nth(0).fill("0")
    page.get_by_label("Temperature").nth(1).fill("1.5")
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    answers = page.locator(".answer")
    expect(answers.first.locator(".answer-text")).to_have_text("Hello, world.")
    assert sorted(asked["temperature"] for asked in stub.asked) == [0, 1.5]
    boxes = [answers.nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    answers.nth(1).get_by_role("button", name="Go on with this").click()
    expect(answers.nth(1)).to_have_class(re.compile("chosen"))
    page.get_by_label("Two answers side by side").uncheck()
    stub.pieces = ["More"]
    expect(ask(page, "On").locator(".answer-text")).to_have_text("More")
    assert len(stub.asked) == 3 and len(stub.asked[2]["messages"]) == 3


ATTACKS = (
    "<img src=x onerror=\"document.title='owned'\">",
    "text <img src=x onerror=\"document.title='owned'\"> text",
    "<script>document.title='owned'</script>",
    "<svg onload=\"document.title='owned'\"></svg>",
    "<iframe srcdoc=\"<script>parent.document.title='owned'</script>\"></iframe>",
    "<details open ontoggle=\"document.title='owned'\">x</details>",
    "<a href=\"javascript:document.title='owned'\">x</a>",
    "<style>body { display: none }</style>",
    '<form action="https://example.com"><input name=key></form>',
    "[x](javascript:document.title='owned')",
    "[x](JaVaScRiPt:document.title='owned')",
    "[x](<java\nscript:document.title='owned'>)",
    "[x](javascript&#58;document.title='owned')",
    "[x](\tjavascript:document.title='owned')",
    "[x](data:text/html,<script>parent.document.title='owned'</script>)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](//example.com) [x](/v1/models)",
    "<javascript:document.title='owned'>",
    "[x][a]\n\n[a]: javascript:document.title='owned'",
    '![x](https://example.com/x.png "t\\" onerror=\'document.title=1\'")',
    "![x](javascript:document.title='owned')",
    '[x](https://example.com/"onmouseover="document.title=\'owned\'")',
    "| <img src=x onerror=\"document.title='owned'\"> |\n|:-:|\n| <script>document.title='owned'</script> |",
    '```html"><script>document.title=\'owned\'</script>\n</code></pre><img src=x onerror="x">\n```',
    "`<img src=x onerror=\"document.title='owned'\">`",
    "&lt;img src=x onerror=\"document.title='owned'\"&gt; &#60;script&#62;",
    "# <img src=x onerror=\"document.title='owned'\">",
    "- [x] <script>document.title='owned'</script>",
    "<!-- --><script>document.title='owned'</script><!-- -->",
)
ELEMENTS = (
    "P H3 H4 H5 H6 BLOCKQUOTE UL OL LI DIV SPAN TABLE THEAD TBODY TR TH TD PRE CODE BUTTON HR BR STRONG EM DEL A INPUT"
)
ATTRIBUTES = "class type tabindex href target rel style disabled start checked"


def test_what_a_model_writes_is_never_markup(page: Page, stub: Stub) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    attack = "\n\n".join(ATTACKS)
    stub.pieces, stub.reasoning, stub.error = [attack], [attack], attack
    answer = ask(page, attack)
    expect(answer.locator(".error")).to_have_text(attack)
    expect(answer.locator(".reasoning")).to_be_visible()
    found = page.evaluate(
        """() => [...document.querySelectorAll(".turn .answer-text *")].flatMap((e) => [
          ["element", e.tagName], ...[...e.attributes].map(({ name }) => ["attribute", name]),
          ...(e.href ? [["link", e.href]] : []), ...(e.type === "checkbox" || !e.type ? [] : [["type", e.type]]),
        ])"""
    )
    assert {what for kind, what in found if kind == "element"} <= set(ELEMENTS.split())
    assert {what for kind, what in found if kind == "attribute"} <= set(ATTRIBUTES.split())
    assert all(what.startswith("https://example.com/") for kind, what in found if kind == "link")
    assert page.locator(".turn :is(.text, .error) *").count() == 0
    expect(answer.locator(".answer-text")).to_contain_text("<img src=x onerror=")
    expect(answer.locator(".answer-text")).to_contain_text("<script>document.title='owned'</script>")
    page.reload()
    expect(page.locator(".answer-text")).to_contain_text("<script>document.title='owned'</script>")
    assert page.title() == "bminf-lite"
    assert all(url.startswith((page.url, "data:")) for url in requests), "nothing is loaded"


@pytest.mark.parametrize("text", [">" * 20_000, "1. " * 8000, "[" * 20_000, "_a" * 5000], ids=lambda text: text[:3])
def test_a_text_that_is_hard_to_parse_is_shown_as_it_stands(page: Page, stub: Stub, text: str) -> None:
    stub.pieces = [text]
    answer = ask(page, "Hi")
    expect(answer.locator(".stats")).to_contain_text("length")
    assert answer.locator(".answer-text").inner_text().strip() == text.strip()


def test_markdown(page: Page, stub: Stub) -> None:
    stub.pieces = [
        "# Title\n\nSome *emphasis*, **strong** words, `in_line` &amp; a [link](https://example.com/a?b&c).\n",
        "A line.\n\n",
        "```python\ndef f(x):\n    return x < 1  # **plain**\n```\n\n",
        "3. three\n4. four\n   - nested\n\n- [x] done\n- [ ] open\n\n",
        "| a | b |\n|---|--:|\n| 1<br>2 | `c` |\n\n> quoted\n\n---\n\n![picture](https://example.com/x.png)",
    ]
    answer = ask(page, "Hi").locator(".answer-text")
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("p").first).to_have_text(
        "Some emphasis, strong words, in_line & a link.\nA line.", use_inner_text=True
    )
    expect(answer.locator("p a").first).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(answer.locator("pre code")).to_have_text("def f(x):\n    return x < 1  # **plain**")
    for code in (answer.locator("pre code"), answer.locator("p code").first):
        assert "mono" in code.evaluate("e => getComputedStyle(e).fontFamily")
    widths = answer.locator("pre code").evaluate(
        """e => ["iiii", "WWWW"].map((text) => { e.textContent = text; const range = document.createRange();
             range.selectNodeContents(e); return range.getBoundingClientRect().width; })"""
    )
    assert widths[0] == pytest.approx(widths[1], abs=0.5), "all characters of code have one width"
    assert answer.locator("ol").get_attribute("start") == "3"
    expect(answer.locator("ol ul li")).to_have_text("nested")
    assert answer.locator("input").evaluate_all("boxes => boxes.map((e) => [e.checked, e.disabled])") == [
        [True, True],
        [False, True],
    ]
    assert answer.locator("td").first.inner_text() == "1\n2"
    expect(answer.locator("blockquote")).to_have_text("quoted")
    expect(answer.locator("p a").last).to_have_text("[image: picture]")
    assert answer.locator("img").count() == 0


def test_blocks_that_are_complete_stay_as_they_are(page: Page, stub: Stub) -> None:
    """What is selected or scrolled in them stays, while the answer grows."""
    stub.pieces, stub.seconds = ["First.\n\nSecond", *[" word"] * 100], 0.02
    answer = ask(page, "Hi").locator(".answer-text")
    expect(answer.locator("p").nth(1)).to_contain_text("Second word")
    answer.evaluate("e => { window.first = e.firstChild; }")
    expect(page.locator(".stats")).to_contain_text("length")
    assert answer.evaluate("e => e.firstChild === window.first && e.children.length === 2")
    assert answer.locator("p").nth(1).inner_text() == "Second" + " word" * 100


def test_a_reload_keeps_the_conversation_and_the_settings(page: Page, stub: Stub) -> None:
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").first.fill("0.7")
    stub.reasoning = ["Thinking"]
    expect(ask(page, "Hi").locator(".stats")).to_contain_text("length")
    stats = page.locator(".stats").inner_text()
    page.get_by_label("Message", exact=True).fill("Half typed")
    page.reload()
    expect(page.locator(".question .text")).to_have_text("Hi")
    expect(page.locator(".answer-text")).to_have_text("Hello, world.")
    expect(page.locator(".stats")).to_have_text(stats)
    expect(page.locator(".reasoning .text")).to_have_text("Thinking")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half typed")
    expect(page.get_by_label("Temperature").first).to_have_value("0.7")
    expect(ask(page, "Go on").locator(".answer-text")).to_have_text("Hello, world.")
    assert [m["content"] for m in stub.asked[1]["messages"]] == ["Be brief.", "Hi", "Hello, world.", "Go on"]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.locator("#state")).to_be_hidden()
    assert page.locator(".turn").count() == 0


def test_a_reload_during_an_answer_keeps_what_was_written(page: Page, stub: Stub) -> None:
    stub.pieces, stub.seconds = ["word "] * 1000, 0.02
    expect(ask(page, "Hi").locator(".answer-text")).to_contain_text("word word")
    page.reload()
    expect(page.locator(".answer-text")).to_contain_text("word word")
    expect(page.locator(".stats")).to_contain_text("interrupted")
    stub.pieces = ["Fine."]
    expect(ask(page, "And now?").locator(".answer-text")).to_have_text("Fine.")


def test_what_was_kept_by_another_version_is_left_out(page: Page, stub: Stub) -> None:
    for kept in ("{", "[]", '{"turns": [{"question": 1}]}', '{"turns": 3}', '"x"'):
        page.evaluate(f"() => {{ window.addEventListener('pagehide', () => sessionStorage.conversation = {kept!r}); }}")
        page.reload()
        expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")


def test_an_answer_is_written_again(page: Page, stub: Stub) -> None:
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    expect(ask(page, "Go on").locator(".answer-text")).to_have_text("Hello, world.")
    expect(page.locator(".regenerate").first).to_be_hidden()
    stub.pieces = ["Another."]
    page.get_by_role("button", name="Regenerate").last.click()
    expect(page.locator(".answer-text").last).to_have_text("Another.")
    assert page.locator(".answer").count() == 2
    assert stub.asked[2]["messages"] == stub.asked[1]["messages"]


def test_one_of_two_answers_is_written_again(page: Page, stub: Stub) -> None:
    page.get_by_label("Two answers side by side").check()
    page.get_by_label("Temperature").nth(1).fill("1.5")
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.locator(".answer").nth(1).get_by_role("button", name="Go on with this").click()
    stub.pieces = ["Another."]
    page.locator(".answer").nth(1).get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer-text").nth(1)).to_have_text("Another.")
    expect(page.locator(".answer-text").nth(0)).to_have_text("Hello, world.")
    expect(page.locator(".answer").nth(1)).to_have_class(re.compile("chosen"))
    assert len(stub.asked) == 3 and stub.asked[2]["temperature"] == 1.5


def test_an_earlier_message_is_edited(page: Page, stub: Stub) -> None:
    for text in ("One", "Two", "Three"):
        expect(ask(page, text).locator(".answer-text")).to_have_text("Hello, world.")
    message = page.get_by_label("Message", exact=True)
    page.get_by_role("button", name="Edit").nth(1).click()
    expect(message).to_have_value("Two")
    expect(page.locator("#note")).to_contain_text("Sending replaces this message and what follows it.")
    page.get_by_role("button", name="Cancel").click()
    expect(message).to_have_value("")
    assert page.locator(".turn").count() == 3 and page.locator(".replaced").count() == 0
    page.get_by_role("button", name="Edit").nth(1).click()
    expect(page.locator(".replaced")).to_have_count(2)
    expect(ask(page, "Two!").locator(".answer-text")).to_have_text("Hello, world.")
    assert page.locator(".question .text").all_inner_texts() == ["One", "Two!"]
    assert [m["content"] for m in stub.asked[3]["messages"]] == ["One", "Hello, world.", "Two!"]
    expect(page.locator("#note")).to_be_hidden()


def test_a_message_typed_during_an_answer_goes_when_it_ends(page: Page, stub: Stub) -> None:
    stub.pieces, stub.seconds = ["word "] * 1000, 0.02
    expect(ask(page, "Hi").locator(".answer-text")).to_contain_text("word")
    message = page.get_by_label("Message", exact=True)
    message.fill("Nex")
    page.keyboard.press("Enter")
    expect(page.locator("#note")).to_contain_text("The message goes when this answer ends.")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#note")).to_be_hidden()
    expect(message).to_have_value("Nex")
    page.keyboard.press("t")
    page.keyboard.press("Enter")
    stub.pieces, stub.seconds = ["Fine."], 0.01
    page.keyboard.press("Escape")
    expect(page.locator(".answer-text").last).to_have_text("Fine.")
    assert [m["content"] for m in stub.asked[1]["messages"]][2:] == ["Next"]
    expect(message).to_have_value("")


def test_a_message_that_waits_stays_when_the_answer_fails(page: Page, stub: Stub) -> None:
    stub.pieces, stub.seconds, stub.error = ["word "] * 50, 0.02, "out of order"
    answer = ask(page, "Hi")
    expect(answer.locator(".answer-text")).to_contain_text("word")
    page.get_by_label("Message", exact=True).fill("Next")
    page.keyboard.press("Enter")
    expect(answer.locator(".error")).to_have_text("out of order")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Next")
    assert len(stub.asked) == 1


def test_the_conversation_is_exported(page: Page, stub: Stub) -> None:
    page.get_by_label("System message").fill("Be brief.")
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    with page.expect_download() as markdown:
        page.get_by_role("button", name="Export as Markdown").click()
    assert re.fullmatch(r"conversation-[\dT-]+\.md", markdown.value.suggested_filename)
    assert markdown.value.path().read_text() == (
        "# Conversation with demo-int8\n\n## System\n\nBe brief.\n\n## User\n\nHi\n\n## Assistant\n\nHello, world.\n"
    )
    with page.expect_download() as exported:
        page.get_by_role("button", name="Export as JSON").click()
    answer = {"text": "Hello, world.", "reasoning": ""}
    assert json.loads(exported.value.path().read_text()) == {
        "model": "demo-int8",
        "system": "Be brief.",
        "turns": [{"mode": "chat", "question": "Hi", "chosen": 0, "answers": [answer]}],
    }


def test_defaults_are_shown(page: Page, stub: Stub) -> None:
    stub.model["default_sampling_params"] = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_tokens": None,
    }
    page.reload()
    for label, shown in (
        ("Temperature", "0.6"),
        ("Top p", "0.95"),
        ("Top k", "20"),
        ("Min p", "0"),
        ("Seed", "random"),
        ("Repetition penalty", "1.1"),
        ("Max tokens", "no limit"),
    ):
        expect(page.get_by_label(label).first).to_have_attribute("placeholder", shown)


def test_a_model_without_a_chat_template_continues_texts(page: Page, stub: Stub) -> None:
    stub.model["capabilities"] = {"chat": False}
    page.reload()
    expect(page.locator("#no-chat")).to_be_visible()
    expect(page.locator("#mode")).to_have_value("completion")
    stub.pieces = [" upon **a** time"]
    page.get_by_label("Text to continue").fill("Once")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-text")).to_have_text("upon **a** time")
    assert stub.asked[0]["prompt"] == "Once"


def test_the_policy_blocks_scripts_markup_and_other_hosts(page: Page, problems: list[str]) -> None:
    blocked = """async () => {
      const results = [];
      try { document.body.innerHTML = "<b>x</b>"; results.push("markup"); } catch {}
      try { document.createElement("script").text = "1"; results.push("script"); } catch {}
      try { document.body.setAttribute("onclick", "1"); results.push("handler"); } catch {}
      try { await fetch("http://localhost:9/"); results.push("fetch"); } catch {}
      return results;
    }"""
    violations = page.evaluate(
        f"""async () => {{
          const seen = [];
          document.addEventListener("securitypolicyviolation", (e) => seen.push(e.effectiveDirective));
          const done = await ({blocked})();
          while (!["connect-src", "require-trusted-types-for"].every((name) => seen.includes(name)))
            await new Promise((resolve) => setTimeout(resolve, 10));  // the test's own timeout ends what hangs
          return done;
        }}"""
    )
    assert violations == []
    problems.clear()


def test_a_key_is_asked_for_and_used(page: Page, stub: Stub, server: StubServer) -> None:
    stub.key = "secret"
    answer = ask(page, "Hi")
    expect(answer.locator(".error")).to_have_text("401: wrong API key\nEnter the API key in the settings.")
    page.get_by_label("API key").fill("secret")
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    stored = page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]")
    assert stored == [0, 1, ""]
    assert "secret" not in page.evaluate("() => JSON.stringify(sessionStorage)")
    page.reload()
    assert "secret" not in page.evaluate("() => JSON.stringify(sessionStorage)")
    expect(page.get_by_label("API key")).to_have_value("")


def test_continuing_a_text(page: Page, stub: Stub) -> None:
    page.get_by_label("Mode", exact=False).and_(page.locator("#mode")).select_option("completion")
    page.get_by_label("Text to continue").fill("Once")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-text").last).to_have_text("Hello, world.")
    assert stub.asked[0]["prompt"] == "Once" and "messages" not in stub.asked[0]


def test_the_real_application_without_a_chat_template(browser: Browser) -> None:
    server = api_kit.fake_server(seconds_per_step=0.002)
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(server.url)
    page.locator("#prompt").fill("Once")
    page.locator("#prompt").press("Enter")
    expect(page.locator(".stats")).to_have_text(re.compile(r"tokens · .* · length$"))
    page.close()
    server.close()


def test_a_server_that_goes_away(page: Page, problems: list[str]) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    answer = ask(page, "Hi")
    expect(answer.locator(".error")).to_have_text("The connection to the server broke.")
    problems.clear()


def test_a_message_before_the_models_are_known(page: Page, stub: Stub, problems: list[str]) -> None:
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    expect(page.locator("#state")).to_have_text("The server does not answer.")
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    assert "model" not in stub.asked[0]
    problems.clear()


def test_the_real_application(browser: Browser, tmp_path: Path) -> None:
    server = api_kit.fake_server(api_kit.folder_with_template(tmp_path / "model"), seconds_per_step=0.002)
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(server.url)
    page.get_by_label("Max tokens").first.fill("30")
    stats = ask(page, "Hi").locator(".stats")
    expect(stats).to_have_text(re.compile(r"^30 tokens · .* · length$"))
    page.get_by_label("Mode", exact=False).and_(page.locator("#mode")).select_option("completion")
    page.get_by_label("Two answers side by side").check()
    page.get_by_label("Text to continue").fill("Once")
    page.keyboard.press("Enter")
    for i in range(2):
        expect(page.locator(".two .stats").nth(i)).to_have_text(re.compile(r"tokens · .* · length$"))
    page.close()
    server.close()


def test_a_phone(page: Page, stub: Stub) -> None:
    page.set_viewport_size(PHONE)
    page.reload()
    expect(page.locator("#settings")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Two answers side by side").check()
    settings, composer = page.locator("#settings").bounding_box(), page.locator("#composer").bounding_box()
    assert settings["height"] <= PHONE["height"] / 2, "the conversation stays in view"
    assert settings["y"] + settings["height"] <= composer["y"], "and a message can be typed"
    stub.pieces = ["a" * 500]
    expect(ask(page, "b" * 300).locator(".answer-text")).to_have_text("a" * 500)
    expect(page.locator("#settings")).to_be_hidden()
    boxes = [page.locator(".answer").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[1]["y"] > boxes[0]["y"], "one below the other"
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.locator("header").bounding_box()["height"] < 60, "one row"
    for name in ("New chat", "Settings", "Send"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"] and box["height"] >= 30


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page: Page) -> None:
    page.get_by_label("Two answers side by side").check()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("body button, body input, body select, body textarea")]
          .filter((e) => !e.closest("template") && !e.labels?.length && !e.ariaLabel && !e.textContent.trim())
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    page.get_by_label("Message", exact=True).focus()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id || document.activeElement.name"))
    assert {
        "model",
        "new",
        "theme",
        "toggle",
        "key",
        "mode",
        "system",
        "compare",
        "temperature",
        "max_tokens",
    } <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: Page, scheme: str) -> None:
    """Text has a contrast of 4.5 at least (WCAG AA), in the theme of the system and in the one of the button."""
    page.emulate_media(color_scheme=scheme)
    assert worst_contrast(page) >= 4.5
    page.get_by_role("button", name="Switch between light and dark").click()
    assert worst_contrast(page) >= 4.5


def worst_contrast(page: Page) -> float:
    return page.evaluate(
        """() => {
          const probe = document.body.appendChild(document.createElement("span"));
          const luminance = (name) => {
            probe.style.color = `var(--${name})`;
            const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((v) => v / 255)
              .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const pairs = [["text", "background"], ["text", "surface"], ["text", "question"], ["muted", "surface"],
            ["muted", "background"], ["muted", "sunken"], ["error", "surface"], ["on-accent", "accent"]];
          const ratios = pairs.map(([a, b]) => {
            const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
            return (high + 0.05) / (low + 0.05);
          });
          probe.remove();
          return Math.min(...ratios);
        }"""
    )
