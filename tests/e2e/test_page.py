"""The page at / in headless Chromium (Debian's package `chromium`): chat, figures, stop, keyboard, key, policy."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import Service, default_model, running

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SCRIPT = (15107, 230, 131, 13874, 44691, 23960, 57, 58, 18601, 220, 137)
TEXT = " 🌶 pepper DEFGHIJ 삼"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


@asynccontextmanager
async def page_of(service: Service, profile: Path, **options: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """A fresh browser at the page, and what it complains about."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS, **options
        )
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(service.url)
        try:
            yield page, complaints
        finally:
            await browser.close()


async def play(request: fe.FakeRequest) -> None:
    """A token every few milliseconds, so that the page has a speed to show."""
    for token_id in SCRIPT:
        await request.send([token_id])
        await asyncio.sleep(0.005)
    await request.play([], eos=2)


async def talk(request: fe.FakeRequest) -> None:
    """A token every few milliseconds until it is cancelled: as fast as possible would leave the browser no CPU."""
    while not request.cancelled.is_set():
        await request.send([1000])
        await asyncio.sleep(0.01)


async def test_a_chat_with_its_figures(tmp_path: Path) -> None:
    async with running(default_model(), play) as service, page_of(service, tmp_path) as (page, complaints):
        await expect(page.locator("#model")).to_have_text("smollm2-135m-instruct · 8,192 tokens")
        await expect(page.locator("#prompt")).to_be_focused()
        await page.keyboard.type("Hello")
        await page.keyboard.press("Enter")
        answer = page.locator("article.assistant span")
        await expect(answer).to_have_text(TEXT, use_inner_text=False)
        await expect(page.locator("#speed")).to_have_text(re.compile(r"^[0-9.]+ tokens/s$"))
        await expect(page.locator("#ttft")).to_have_text(re.compile(r"^\d+ ms$"))
        await expect(page.locator("#count")).to_have_text("12 tokens")
        await expect(page.locator("#prompted")).to_have_text(re.compile(r"^\d+ tokens$"))
        await page.locator("#prompt").fill("And now?")
        await page.locator("#send").click()
        await expect(page.locator("article.assistant")).to_have_count(2)
        await expect(page.locator("article.live")).to_have_count(0)
        assert complaints == []
        prompts = [len(request.prompt) for request in service.engine.requests]
        assert prompts[1] > prompts[0] + 11  # the second has the whole conversation


@pytest.mark.parametrize("how", ["button", "key"])
async def test_stopping_cancels_in_the_engine(tmp_path: Path, how: str) -> None:
    async with (
        running(default_model(), talk) as service,
        page_of(service, tmp_path) as (page, complaints),
    ):
        await page.locator("#prompt").fill("Hello\nthere")
        await page.keyboard.press("Enter")
        await expect(page.locator("article.live span")).not_to_be_empty()
        if how == "button":
            await page.locator("#stop").click()
        else:
            await page.keyboard.press("Escape")
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        await expect(page.locator("article.assistant footer")).to_have_text("stopped")
        await expect(page.locator("#send")).to_be_enabled()
        assert complaints == []


async def test_a_new_chat_takes_nothing_from_the_one_that_it_breaks_off(tmp_path: Path) -> None:
    async with (
        running(default_model(), talk) as service,
        page_of(service, tmp_path) as (page, _),
    ):
        for number in (1, 2):
            await page.locator("#prompt").fill("Hello")
            await page.keyboard.press("Enter")
            await expect(page.locator("article.live span")).not_to_be_empty()
            await page.locator("#new").click()
            await service.engine.wait_until(lambda number=number: service.engine.num_cancelled == number)  # type: ignore[misc]
            await expect(page.locator("#send")).to_be_enabled()
        first, second = service.engine.requests
        assert list(first.prompt) == list(second.prompt)


async def test_a_failure_in_mid_stream_is_shown(tmp_path: Path) -> None:
    async with (
        running(default_model(), talk) as service,
        page_of(service, tmp_path) as (page, _),
    ):
        await page.locator("#prompt").fill("Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("article.live span")).not_to_be_empty()
        await service.engine.break_sessions()
        await expect(page.locator("article.failed footer")).to_contain_text("no engine is connected")


async def test_what_the_model_writes_is_text_and_never_markup(tmp_path: Path) -> None:
    model = default_model()
    markup = "<img src=x onerror=alert(1)><script>document.title='x'</script>"
    ids = model.encoder._tokenizer.encode(markup, False, field="text")

    async def script(request: fe.FakeRequest) -> None:
        await request.play(ids, eos=2)

    async with running(model, script) as service, page_of(service, tmp_path) as (page, complaints):
        await page.locator("#prompt").fill(markup)
        await page.keyboard.press("Enter")
        await expect(page.locator("article.assistant span")).to_have_text(markup)
        assert await page.title() == "Tokenwire"
        assert await page.locator("main img, main script").count() == 0
        await page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.bad = 1'}))"
        )
        assert await page.evaluate("window.bad") is None  # the policy stops what was not in the page
        assert len(complaints) == 1


async def test_an_api_key_and_the_theme(tmp_path: Path) -> None:
    settings = {"api_key": ("secret",)}
    async with (
        running(default_model(), play, **settings) as service,
        page_of(service, tmp_path, color_scheme="light") as (page, _),
    ):
        await expect(page.locator("#model")).to_contain_text("an API key is needed")
        await page.locator("summary").click()
        await page.locator("#key").fill("secret")
        await page.locator("#key").press("Tab")
        await expect(page.locator("#model")).to_contain_text("8,192")
        await page.locator("#prompt").fill("Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("article.assistant span")).to_have_text(TEXT)
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.locator("#theme").click()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != light
