"""The chat page in headless Chromium; skipped where Chromium or playwright is missing."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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
    page.set_default_timeout(60_000)
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
    page.wait_for_timeout(200)
    assert stub.num_open == 0
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


def test_what_a_model_writes_is_never_markup(page: Page, stub: Stub) -> None:
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
    stub.pieces, stub.reasoning, stub.error = [attack], [attack], attack
    answer = ask(page, attack)
    expect(answer.locator(".error")).to_have_text(attack)
    expect(answer.locator(".answer-text")).to_have_text(attack)
    expect(answer.locator(".reasoning")).to_be_visible()
    assert page.locator("main img, main script").count() == 0 and page.title() == "bminf-lite"


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
          await new Promise((resolve) => setTimeout(resolve, 50));
          return [done, [...new Set(seen)].sort()];
        }}"""
    )
    assert violations[0] == []
    assert {"connect-src", "require-trusted-types-for"} <= set(violations[1])
    problems.clear()


def test_a_key_is_asked_for_and_used(page: Page, stub: Stub, server: StubServer) -> None:
    stub.key = "secret"
    answer = ask(page, "Hi")
    expect(answer.locator(".error")).to_have_text("401: wrong API key\nEnter the API key in the settings.")
    page.get_by_label("API key").fill("secret")
    expect(ask(page, "Hi").locator(".answer-text")).to_have_text("Hello, world.")
    stored = page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]")
    assert stored == [0, 0, ""]
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("")


def test_continuing_a_text(page: Page, stub: Stub) -> None:
    page.get_by_label("Mode", exact=False).and_(page.locator("#mode")).select_option("completion")
    page.get_by_label("Text to continue").fill("Once")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-text").last).to_have_text("Hello, world.")
    assert stub.asked[0]["prompt"] == "Once" and "messages" not in stub.asked[0]


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
    page.goto(server.url)
    page.get_by_label("Max tokens").first.fill("30")
    stats = ask(page, "Hi").locator(".stats")
    expect(stats).to_have_text(re.compile(r"^30 tokens · .* · length$"))
    page.get_by_label("Mode", exact=False).and_(page.locator("#mode")).select_option("completion")
    page.get_by_label("Two answers side by side").check()
    page.get_by_label("Text to continue").fill("Once")
    page.keyboard.press("Enter")
    for i in range(2):
        expect(page.locator(".two .stats").nth(i)).to_have_text(re.compile(r"tokens · .* · length$"), timeout=60_000)
    page.close()
    server.close()


def test_a_phone(page: Page, stub: Stub) -> None:
    page.set_viewport_size(PHONE)
    page.reload()
    expect(page.locator("#settings")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Two answers side by side").check()
    page.get_by_role("button", name="Settings").click()
    stub.pieces = ["a" * 500]
    expect(ask(page, "b" * 300).locator(".answer-text")).to_have_text("a" * 500)
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
