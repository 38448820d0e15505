"""The chat in a real browser: conversations that no tab loses, answers that can be had again, and errors in words.

Answers are those of a tiny model with random weights. Where a test needs a certain text, the browser gets a stream that
is written here in the place of the server's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, ViewportSize, expect

from app.commands.conversation import Conversation
from tests.support.harness import Server
from tests.support.pages import DESK, PATIENCE, PHONE, expect_no_violations, looking
from tests.support.tiny_model import tiny_server

CHAT = "/dashboard#chat"
RICH = """Text with `code` and $x^2$.

```python
def f(x: int) -> str:  # a comment
    return "text" + str(1)
```

| a | b |
| :- | -: |
| 1 | 2 |

- [x] done
- [ ] to do

> quoted, with [a link](https://example.com)
"""


def ask(page: Page, words: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(words)
    box.press("Enter")


def wait_for_end(page: Page) -> None:
    expect(page.locator(".send")).to_have_attribute("aria-label", "Send", timeout=PATIENCE)
    expect(page.locator("article.assistant").last).to_have_attribute("aria-busy", "false")


def say(page: Page, words: str) -> None:
    ask(page, words)
    wait_for_end(page)


def names(page: Page) -> Locator:
    return page.locator(".conversations .name")


def set_fields(page: Page, **fields: object) -> None:
    """Write the chat's settings, as they are kept, and load the page again."""
    page.evaluate("kept => localStorage.setItem('headrace-chat-settings', kept)", json.dumps({"settings": fields}))
    page.reload()


def streamed(*deltas: dict[str, Any], reason: str | None = "stop") -> str:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if reason:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if reason else "")


def answer_with(page: Page, *deltas: dict[str, Any], reason: str | None = "stop") -> list[dict[str, Any]]:
    """Answer all questions of the page so, and return the list of the bodies that it sends."""
    bodies: list[dict[str, Any]] = []

    def take(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        route.fulfill(content_type="text/event-stream", body=streamed(*deltas, reason=reason))

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", take)
    page.route("**/timeline", lambda route: route.fulfill(json={"segments": []}))
    return bodies


# ------------------------------------------------------------------------------------------------------ conversations


def test_chat_streams_stops_and_keeps_conversations(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("max tokens").fill("8")
        ask(page, "Hello <img src=x onerror=alert(1)>")
        facts = page.locator("article.assistant .facts-line")
        expect(facts.first).to_contain_text("first token", timeout=PATIENCE)
        expect(facts.first).to_contain_text("prefill", timeout=PATIENCE)
        expect(facts.first).to_contain_text("cached")
        assert page.locator("article img").count() == 0
        page.get_by_label("max tokens").fill("7000")
        ask(page, "Go on for ever")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        open_server.wait_until(lambda now: now.running == 1)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("article.assistant").nth(1)).to_contain_text("Stopped.", timeout=PATIENCE)
        assert open_server.wait_idle().aborted >= 1
        page.get_by_role("button", name="New conversation").click()
        set_fields(page, max_tokens=8)
        expect(names(page)).to_have_count(1)
        expect(page.locator("article.user")).to_have_count(2)


def test_two_tabs_keep_each_others_conversations(browser: Browser, open_server: Server) -> None:
    old = {
        "talks": [{"system": "", "messages": [{"role": "user", "content": "before"}]}],
        "settings": {"max_tokens": 4},
    }
    with looking(browser, open_server, CHAT) as first:
        first.evaluate("old => localStorage.setItem('headrace-chats', JSON.stringify(old))", old)
        first.reload()
        expect(first.get_by_label("max tokens")).to_have_value("4")
        second = first.context.new_page()
        second.goto(open_server.base_url + CHAT)
        for page, words in ((first, "from the first"), (second, "from the second"), (first, "first again")):
            page.get_by_role("button", name="New conversation").click()
            say(page, words)
        said = {"before", "from the first", "from the second", "first again"}
        for page in (first, second):  # at once, and after a reload
            for _ in range(2):
                for words in said:
                    expect(names(page).filter(has_text=words)).to_have_count(1, timeout=PATIENCE)
                page.reload()
        second.locator(".conversations li", has_text="from the first").hover()
        second.get_by_role("button", name="Delete “from the first”").click()
        expect(names(first).filter(has_text="from the first")).to_have_count(0, timeout=PATIENCE)


def test_two_tabs_that_answer_in_one_conversation_keep_both_answers(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as first:
        set_fields(first, max_tokens=4)
        say(first, "the beginning")
        second = first.context.new_page()
        second.goto(open_server.base_url + CHAT)
        expect(second.locator("article.user")).to_have_count(1)
        set_fields(first, max_tokens=3000)
        ask(first, "the first goes on")
        open_server.wait_until(lambda now: now.running == 1)
        expect(second.locator("article.user")).to_have_count(2, timeout=PATIENCE)
        answer_with(second, {"content": "an answer of the second tab"})
        say(second, "the second goes on")
        first.get_by_role("button", name="Stop").click()
        wait_for_end(first)
        first.reload()
        kept = first.evaluate("() => Object.keys(localStorage).map((key) => localStorage.getItem(key)).join()")
        for words in ("the first goes on", "the second goes on", "an answer of the second tab"):
            assert words in kept
        expect(names(first)).to_have_count(2)
        expect(names(first).filter(has_text="(copy)")).to_have_count(1)


def test_a_full_store_is_reported_and_costs_no_conversation(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"content": "a short answer"})
        say(page, "kept before")
        page.evaluate(
            """() => {
                for (let size = 2 ** 22; size >= 1;) {
                    try {
                        localStorage.setItem(`filler-${size}`, "x".repeat(size));
                    } catch { /* too much */ }
                    size = Math.floor(size / 2);
                }
            }"""
        )
        page.get_by_role("button", name="Answer again").click()
        wait_for_end(page)
        expect(page.locator(".note")).to_contain_text("no room left")
        page.get_by_role("button", name="Answer again").click()
        wait_for_end(page)
        expect(page.locator(".versions")).to_contain_text("3 / 3")
        expect(names(page)).to_have_text("kept before")  # no copy: no other tab has changed it
        page.get_by_role("button", name="New conversation").click()
        say(page, "not kept " * 100)
        expect(page.locator(".note")).to_contain_text("no room left")
        page.reload()
        expect(names(page)).to_have_count(1)
        expect(names(page)).to_have_text("kept before")


def test_conversations_are_renamed_found_deleted_and_brought_back(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"content": "Water drives the wheel."})
        say(page, "What is a mill?")
        page.get_by_role("button", name="New conversation").click()
        answer_with(page, {"content": "Leaves in hot water."})
        say(page, "What is tea?")
        page.get_by_role("button", name="More about this conversation").click()
        page.get_by_role("menuitem", name="Rename").click()
        name = page.get_by_label("Name of the conversation")
        expect(name).to_have_value("What is tea?")
        name.fill("Drinks")
        name.press("Enter")
        expect(page.locator(".toolbar .title")).to_have_text("Drinks")
        page.reload()
        expect(names(page)).to_have_text(["Drinks", "What is a mill?"])
        page.keyboard.press("Control+k")
        page.keyboard.type("WHEEL")  # in an answer
        expect(names(page)).to_have_text(["What is a mill?"])
        page.get_by_label("Search conversations").fill("nowhere")
        expect(page.locator(".conversations")).to_contain_text("No conversation has these words.")
        page.get_by_label("Search conversations").fill("")
        names(page).filter(has_text="Drinks").hover()
        page.get_by_role("button", name="Delete “Drinks”").click()
        expect(names(page)).to_have_text(["What is a mill?"])
        page.get_by_role("button", name="Undo").click()
        page.reload()
        expect(names(page)).to_have_text(["Drinks", "What is a mill?"])
        expect(page.locator("article.assistant")).to_contain_text("Leaves in hot water.")


def test_an_answer_goes_on_while_another_conversation_is_shown(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        set_fields(page, max_tokens=400, ignore_eos=True)
        ask(page, "a long one")
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator("article")).to_have_count(0)
        expect(page.locator(".conversations li .dots")).to_have_count(1)
        expect(page.locator(".conversations li .dots")).to_have_count(0, timeout=PATIENCE)
        names(page).click()
        expect(page.locator("article.assistant .facts-line")).to_contain_text("400 tokens")


def test_what_came_before_a_reload_is_kept_and_can_go_on(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        set_fields(page, max_tokens=7000, ignore_eos=True)
        ask(page, "never ends")
        text = page.locator("article.assistant .text")
        expect(text).not_to_be_empty(timeout=PATIENCE)
        set_fields(page, max_tokens=8, ignore_eos=True)
        open_server.wait_idle()
        expect(text).not_to_be_empty()
        expect(page.locator("article.assistant")).to_contain_text("Stopped.")
        before = text.inner_text()
        page.get_by_role("button", name="Continue").click()
        wait_for_end(page)
        assert text.inner_text().startswith(before[:-1])
        assert len(text.inner_text()) > len(before)


# -------------------------------------------------------------------------------------------------- answers and errors


def test_an_answer_again_and_an_edited_question_keep_the_versions_before(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        articles = page.locator("article")
        answer_with(page, {"content": "first answer"})
        say(page, "a question")
        answer_with(page, {"content": "second answer"})
        page.get_by_role("button", name="Answer again").click()
        wait_for_end(page)
        expect(articles.nth(1)).to_contain_text("second answer")
        expect(page.locator(".versions")).to_have_text("2 / 2")
        say(page, "and more")
        page.get_by_role("button", name="The version before").click()
        expect(articles).to_have_count(2)
        expect(articles.nth(1)).to_contain_text("first answer")
        bodies = answer_with(page, {"content": "third answer"})
        articles.nth(0).hover()
        page.get_by_role("button", name="Edit and send again").click()
        page.get_by_label("Edit the message").fill("another question")
        page.get_by_role("button", name="Send").first.click()
        wait_for_end(page)
        assert bodies[0]["messages"] == [{"role": "user", "content": "another question"}]
        expect(articles.nth(1)).to_contain_text("third answer")
        page.reload()
        page.get_by_role("button", name="The version before").click()
        expect(articles.nth(0)).to_contain_text("a question")
        page.get_by_role("button", name="The version after").last.click()
        expect(articles).to_have_count(4)
        expect(articles.nth(2)).to_contain_text("and more")


def test_what_is_edited_while_an_answer_comes_is_not_lost(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        set_fields(page, ignore_eos=True)
        ask(page, "never ends")
        expect(page.locator("article.assistant .text")).not_to_be_empty(timeout=PATIENCE)
        page.get_by_role("button", name="Edit and send again").click()
        field = page.get_by_label("Edit the message")
        field.fill("edited")
        field.press("Enter")
        expect(page.locator(".note")).to_contain_text("Stop it first")
        expect(field).to_have_value("edited")
        page.get_by_role("button", name="Stop").click()
        wait_for_end(page)
        answer_with(page, {"content": "An answer."})
        field.press("Enter")
        wait_for_end(page)
        expect(page.locator("article.user")).to_contain_text("edited")


def test_a_refusal_is_an_error_with_its_reason_and_can_be_retried(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT, allowed="400") as page:
        set_fields(page, max_tokens=8, more='{"temperature": -3}')
        ask(page, "a question")
        error = page.locator("article.assistant .error")
        expect(error).to_contain_text("temperature", timeout=PATIENCE)
        red, green, blue = (int(each) for each in re.findall(r"\d+", _style(error, "color"))[:3])
        assert red > 150 > max(green, blue)
        expect(page.locator("#chat > [aria-live=polite]")).to_contain_text("The answer failed: ")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("More fields").fill('{"temperature": ')
        expect(page.locator(".wrong")).to_contain_text("not JSON")
        page.get_by_role("button", name="Retry").click()
        expect(error).to_contain_text("not JSON")
        page.get_by_label("More fields").fill("")
        page.get_by_role("button", name="Retry").click()
        expect(error).to_have_count(0)
        wait_for_end(page)
        expect(page.locator("article.assistant .facts-line")).to_contain_text("token")
        expect(page.locator("article")).to_have_count(2)


def test_a_warning_of_the_server_is_shown(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        set_fields(page, max_tokens=4, more='{"temprature": 1}')
        say(page, "a question")
        expect(page.locator("article.assistant .warning")).to_contain_text("temprature")


def test_a_wrong_key_is_told_apart_from_none(browser: Browser, governed_server: Server) -> None:
    with looking(browser, governed_server, CHAT, allowed="401") as page:
        expect(page.locator("#chat > .talk > .notice")).to_contain_text("An API key is needed.", timeout=PATIENCE)
        ask(page, "a question")
        error = page.locator("article.assistant .error")
        expect(error).to_contain_text("An API key is needed.", timeout=PATIENCE)
        error.get_by_role("button", name="Enter a key").click()
        page.fill("#client-key", "wrong")
        page.get_by_role("button", name="Save").click()
        page.get_by_role("button", name="Retry").click()
        expect(error).to_contain_text("key that was entered is wrong", timeout=PATIENCE)
        error.get_by_role("button", name="Enter a key").click()
        page.fill("#client-key", "client")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#chat > .talk > .notice")).to_be_hidden(timeout=PATIENCE)
        page.get_by_role("button", name="Retry").click()
        expect(error).to_have_count(0)


def test_a_server_that_dies_leaves_what_came_and_says_so(browser: Browser) -> None:
    with tiny_server() as server, looking(browser, server.wait_ready(), CHAT, allowed="ERR_") as page:
        set_fields(page, ignore_eos=True)
        ask(page, "never ends")
        expect(page.locator("article.assistant .text")).not_to_be_empty(timeout=PATIENCE)
        server.kill()
        expect(page.locator("article.assistant .error")).to_contain_text("broke", timeout=PATIENCE)
        expect(page.locator("article.assistant .text")).not_to_be_empty()
        expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_a_stream_without_an_end_is_no_whole_answer(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"content": "half an ans"}, reason=None)
        say(page, "a question")
        expect(page.locator("article.assistant .error")).to_contain_text("ended too early")
        expect(page.locator("article.assistant .text")).to_have_text("half an ans")


def test_an_answer_that_was_stopped_goes_on_where_it_ended(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        bodies = answer_with(page, {"content": "One, two,"}, reason="length")
        say(page, "Count")
        expect(page.locator("article.assistant")).to_contain_text("Cut: ")
        bodies = answer_with(page, {"content": " three."})
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("article.assistant .text")).to_have_text("One, two, three.")
        wait_for_end(page)
        assert bodies[0]["continue_final_message"] is True
        assert bodies[0]["add_generation_prompt"] is False
        assert bodies[0]["messages"][-1] == {"role": "assistant", "content": "One, two,"}
        expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_an_answer_that_ends_in_its_reasoning_is_given_again_and_not_continued(
    browser: Browser, open_server: Server
) -> None:
    """A final message without content cannot be continued: the thoughts would be lost, or read as the answer."""
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"reasoning_content": "First I have to"}, reason="length")
        say(page, "Count")
        answer = page.locator("article.assistant")
        expect(answer).to_contain_text("Cut: ")
        expect(answer.locator("details.reasoning")).to_contain_text("First I have to")
        expect(page.get_by_role("button", name="Continue")).to_have_count(0)
        bodies = answer_with(page, {"reasoning_content": "Now."}, {"content": "One"}, reason="length")
        page.get_by_role("button", name="Answer again").click()
        expect(answer.locator(".text")).to_have_text("One")
        expect(answer.locator("details.reasoning")).not_to_contain_text("First")
        assert [message["role"] for message in bodies[0]["messages"]] == ["user"]
        assert "continue_final_message" not in bodies[0]
        wait_for_end(page)
        bodies = answer_with(page, {"content": ", two"})
        page.get_by_role("button", name="Continue").click()
        expect(answer.locator(".text")).to_have_text("One, two")
        assert bodies[0]["messages"][-1] == {"role": "assistant", "content": "One"}
        expect(answer.locator("details.reasoning")).to_contain_text("Now.")


GIVE = """([event, files, words]) => {
    const given = new DataTransfer();
    for (const [name, type, text] of files) given.items.add(new File([text], name, { type }));
    if (words) given.setData("text/plain", words);
    const data = event === "paste" ? { clipboardData: given } : { dataTransfer: given };
    const kind = event === "paste" ? ClipboardEvent : DragEvent;
    const made = new kind(event, { bubbles: true, cancelable: true, ...data });
    document.querySelector("[aria-label=Message]").dispatchEvent(made);
    return made.defaultPrevented;
}"""


def test_text_files_are_attached_by_button_drop_and_paste(
    browser: Browser, open_server: Server, tmp_path: Path
) -> None:
    chosen = tmp_path / "notes.md"
    chosen.write_text("# Notes\n\n```python\nprint(1)\n```\n")
    with looking(browser, open_server, CHAT) as page:
        bodies = answer_with(page, {"content": "Read."})
        box = page.get_by_label("Message", exact=True)
        box.fill("Compare these.")
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Attach text files").click()
        chooser.value.set_files(chosen)
        expect(box).to_have_value(re.compile("````md\n# Notes"))
        assert page.evaluate(GIVE, ["dragover", [["a.py", "", "b = 2\n"]], ""])
        expect(page.locator("#chat")).to_have_class(re.compile("is-target"))
        assert page.evaluate(GIVE, ["drop", [["a.py", "", "b = 2\n"]], ""])
        expect(page.locator("#chat")).not_to_have_class(re.compile("is-target"))
        expect(box).to_have_value(re.compile("b = 2"))
        assert page.evaluate(GIVE, ["paste", [["LICENSE", "text/plain", "Free"]], "LICENSE"])
        expect(box).to_have_value(re.compile("Free"))
        box.press("Enter")
        wait_for_end(page)
        fence = "```"
        assert bodies[0]["messages"][-1]["content"] == (
            f"Compare these.\n\nnotes.md:\n`{fence}md\n{chosen.read_text()}`{fence}\n\n"
            f"a.py:\n{fence}py\nb = 2\n{fence}\n\nLICENSE:\n{fence}\nFree\n{fence}"
        )


def test_what_is_no_text_is_not_attached_and_the_page_says_why(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        note = page.locator(".note")
        refused = (
            (
                ["cat.png", "image/png", "x"],
                "cat.png was not attached: it is an image, and this model reads text only.",
            ),
            (["a.bin", "", "a\0b"], "a.bin was not attached: it is no text."),
            (["big.log", "text/plain", "x" * (2**20 + 2**19)], "it has 1.5 MiB, and 1 MiB of text is allowed"),
        )
        for file, words in refused:
            for event in ("drop", "paste"):
                assert page.evaluate(GIVE, [event, [file], ""])
                expect(note).to_contain_text(words)
        assert not page.evaluate(GIVE, ["paste", [["cells.png", "image/png", "x"]], "1\t2"]), (
            "the text of a table is pasted"
        )
        assert not page.evaluate(GIVE, ["drop", [], "words"]), "words are the browser's"
        expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_answers_and_code_are_copied(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        source = "Here:\n\n```python\nprint(1)\n```\n"
        answer_with(page, {"content": source})
        say(page, "code")
        for name, copied in (("Copy code", "print(1)"), ("Copy this message", source)):
            page.locator("article.assistant").get_by_role("button", name=name).click()
            expect(page.get_by_role("button", name="Copied")).to_be_visible()
            assert page.evaluate("navigator.clipboard.readText()") == copied
            expect(page.get_by_role("button", name="Copied")).to_have_count(0)


def test_reasoning_and_tool_calls_are_folded(browser: Browser, open_server: Server) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Rome"}'}}
    with looking(browser, open_server, CHAT) as page:
        pieces = ({"reasoning_content": "They ask for the weather."}, {"content": "I look."})
        answer_with(page, *pieces, {"tool_calls": [call]}, {"tool_calls": [rest]}, reason="tool_calls")
        say(page, "How is it in Rome?")
        thoughts = page.locator("details.reasoning")
        expect(thoughts).not_to_have_attribute("open", "")
        thoughts.locator("summary").click()
        expect(page.get_by_text("They ask for the weather.")).to_be_visible()
        called = page.locator("details", has_text="Call of weather")
        expect(called.locator("pre")).to_be_hidden()
        called.locator("summary").click()
        assert json.loads(called.locator("pre").inner_text()) == {"city": "Rome"}


# ---------------------------------------------------------------------------------------------------- files in and out


@pytest.mark.parametrize("form", ["JSON", "Markdown"])
def test_a_conversation_leaves_as_a_file_and_comes_back(
    browser: Browser, open_server: Server, tmp_path: Path, form: str
) -> None:
    answer = "## A heading\n\n## user\n\n\\## user\n\nText."
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"reasoning_content": "Hm."}, {"content": answer})
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("System prompt").fill("Be short.")
        say(page, "A question?")
        page.get_by_role("button", name="More about this conversation").click()
        with page.expect_download() as offered:
            page.get_by_role("menuitem", name=f"Export as {form}").click()
        path = tmp_path / offered.value.suggested_filename
        offered.value.save_as(path)
        assert path.stem == "a-question"
        if form == "JSON":
            kept = json.loads(path.read_text())
            created = kept.pop("created")
            assert re.match(r"\d{4}-\d\d-\d\dT", created)
            assert kept == {
                "headrace_conversation": 1,
                "title": "A question?",
                "model": "tiny",
                "system": "Be short.",
                "messages": [
                    {"role": "user", "content": "A question?"},
                    {"role": "assistant", "content": answer, "reasoning": "Hm."},
                ],
            }
        else:
            assert path.read_text().startswith("# A question?\n\n## system\n\nBe short.\n\n## user\n\nA question?\n")
        terminal = Conversation("tiny", {})
        terminal.read_file(path.read_bytes(), is_markdown=form == "Markdown")
        assert [each["content"] for each in terminal.messages] == ["A question?", answer]
        assert (terminal.system, terminal.title) == ("Be short.", "A question?")
        path.write_bytes(terminal.as_file(is_markdown=form == "Markdown"))
        page.set_input_files("#chat input[type=file]", path)
        expect(page.locator(".note")).to_contain_text("was imported")
        expect(names(page)).to_have_count(2)
        expect(page.get_by_label("System prompt")).to_have_value("Be short.")
        expect(page.locator("article.user")).to_have_text("A question?")
        found = page.evaluate(
            """() => Object.keys(localStorage).filter((key) => key.startsWith("headrace-talk-"))
                .map((key) => JSON.parse(localStorage.getItem(key)).messages[1].content)"""
        )
        assert found == [answer, answer]


def test_all_conversations_leave_as_one_file_and_come_back(
    browser: Browser, open_server: Server, tmp_path: Path
) -> None:
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"content": "An answer."})
        for words in ("first", "second"):
            page.get_by_role("button", name="New conversation").click()
            say(page, words)
        with page.expect_download() as offered:
            page.get_by_role("button", name="Export all").click()
        offered.value.save_as(tmp_path / "all.json")
        page.evaluate("localStorage.clear()")
        page.reload()
        expect(names(page)).to_have_count(0)
        page.set_input_files("#chat input[type=file]", tmp_path / "all.json")
        expect(page.locator(".note")).to_contain_text("2 conversations were imported.")
        page.reload()
        expect(names(page)).to_have_text(["second", "first"])


def test_a_file_that_is_no_conversation_is_refused_in_words(
    browser: Browser, open_server: Server, tmp_path: Path
) -> None:
    files = {"broken.json": "{", "other.json": '{"a": 1}', "notes.md": "Just a text.", "empty.json": '{"messages": []}'}
    for name, called in (("name", {"name": {"toString": 1}}), ("arguments", {"name": "f", "arguments": {"a": 1}})):
        messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": called}]}]
        files[f"{name}.json"] = json.dumps({"messages": messages})
    words = {
        "broken.json": "not JSON",
        "other.json": "no “messages”",
        "notes.md": "## user",
        "empty.json": "no messages",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with looking(browser, open_server, CHAT) as page:
        for name in files:
            page.set_input_files("#chat input[type=file]", tmp_path / name)
            expect(page.locator(".note")).to_contain_text(f"{name} was not imported: ")
            expect(page.locator(".note")).to_contain_text(words.get(name, "a call of a tool"))
        page.reload()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        expect(names(page)).to_have_count(0)
        large = {"messages": [{"role": "tool", "content": "x" * 5_500_000}]}  # folded, so that it is drawn soon
        (tmp_path / "large.json").write_text(json.dumps(large))
        page.set_input_files("#chat input[type=file]", tmp_path / "large.json")
        expect(page.locator(".note")).to_contain_text("no room left", timeout=PATIENCE)


# ------------------------------------------------------------------------------------------------------ what it shows


def test_only_the_last_block_of_a_growing_answer_is_made_again(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        made = page.evaluate(
            """async () => {
                const { Growing, markdown } = await import("/dashboard/files/markdown.js");
                const text = "First.,,- one,,- two,,| a |,| - |,| 1 |,,```py,x = 1,```,,End.".replaceAll(",", "\\n");
                const [place, whole] = [document.createElement("div"), document.createElement("div")];
                const growing = new Growing(place);
                let [same, first] = [true, null];
                for (let length = 1; length <= text.length; length++) {
                    growing.update(text.slice(0, length));
                    whole.replaceChildren(markdown(text.slice(0, length)));
                    same &&= whole.innerHTML === place.innerHTML;
                    if (length === 16) first = place.firstChild;
                }
                return [same, first === place.firstChild, place.children.length];
            }"""
        )
        assert made == [True, True, 5]


def test_the_log_follows_an_answer_unless_one_reads_above(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT, allowed="400") as page:
        log = page.locator(".log")
        rest = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
        answer_with(page, {"content": "\n\n".join(f"Paragraph {number}." for number in range(60))})
        say(page, "a long one")
        assert log.evaluate(rest) < 2
        newest = page.get_by_role("button", name="Newest")
        expect(newest).to_be_hidden()
        log.evaluate("log => { log.scrollTop = 0; }")
        expect(newest).to_be_visible()
        newest.click()
        assert log.evaluate(rest) < 2
        expect(newest).to_be_hidden()
        page.unroute("**/v1/chat/completions")
        set_fields(page, more='{"temperature": -3}')
        say(page, "an error")
        expect(page.locator("article .error")).to_be_in_viewport()


def test_one_column_in_the_middle_and_a_field_that_grows(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        answer_with(page, {"content": "An answer."})
        say(page, "A question")
        place = page.locator(".talk").bounding_box()
        column = page.locator(".column").bounding_box()
        box = page.locator(".compose .box").bounding_box()
        assert place
        assert column
        assert box
        for each in (column, box):
            assert abs(each["x"] + each["width"] / 2 - place["x"] - place["width"] / 2) < 12
            assert each["width"] < 800
        field = page.get_by_label("Message", exact=True)
        low = field.evaluate("field => field.clientHeight")
        field.fill("\n".join("abcdefg"))
        grown = field.evaluate("field => field.clientHeight")
        assert grown > 3 * low
        field.fill("\n" * 200)
        assert field.evaluate("field => field.clientHeight") < 720 / 2
        field.fill("")
        assert field.evaluate("field => field.clientHeight") == low


def test_on_a_phone_conversations_are_in_a_drawer(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT, size=PHONE) as page:
        answer_with(
            page, {"content": "| a | b |\n| - | - |\n| " + "wide " * 40 + " | 2 |\n\n```\n" + "x" * 300 + "\n```"}
        )
        say(page, "a question")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        expect(names(page)).to_be_hidden()
        page.get_by_role("button", name="Conversations").click()
        expect(names(page)).to_be_visible()
        page.keyboard.press("Escape")
        expect(names(page)).to_be_hidden()
        page.get_by_role("button", name="Conversations").click()
        names(page).click()
        expect(names(page)).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_model_and_what_is_set_stay_in_view(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        expect(page.get_by_label("Model", exact=True)).to_have_value("tiny", timeout=PATIENCE)
        state = page.locator(".compose-foot .what-is-set")
        expect(state).to_have_text("the model’s settings")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("temperature").fill("0.5")
        page.get_by_label("max tokens").fill("4")
        page.get_by_label("System prompt").fill("Be short.")
        expect(state).to_have_text("temperature 0.5 · max tokens 4 · system prompt")
        say(page, "a question")
        expect(state).to_contain_text("of 8,192 tokens")
        page.get_by_role("button", name="Use the model’s settings").click()
        expect(page.get_by_label("temperature")).to_have_value("")


def test_keys_do_what_their_list_says(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        bodies = answer_with(page, {"content": "An answer."})
        say(page, "a question")
        page.keyboard.press("ArrowUp")  # in the empty field
        expect(page.get_by_label("Edit the message")).to_have_value("a question")
        page.keyboard.press("Escape")
        page.keyboard.press("Control+Shift+Y")
        expect(page.locator(".versions")).to_have_text("2 / 2")
        assert len(bodies) == 2
        page.keyboard.press("Control+Shift+O")
        expect(page.locator("article")).to_have_count(0)
        say(page, "another")
        page.keyboard.press("Alt+ArrowDown")
        expect(page.locator("article.user")).to_have_text("a question")
        page.keyboard.press("Control+,")
        expect(page.get_by_label("System prompt")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_label("System prompt")).to_be_hidden()
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("new conversation")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.press("Shift+Enter")
        expect(page.get_by_label("Message", exact=True)).to_have_value("\n")


def test_the_end_of_an_answer_is_announced(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, CHAT) as page:
        set_fields(page, max_tokens=4, ignore_eos=True)
        news = page.locator("#chat > [aria-live=polite]")
        expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")
        say(page, "a question")
        expect(news).to_have_text("The answer is finished: 4 tokens")
        set_fields(page, ignore_eos=True)
        ask(page, "never ends")
        page.get_by_role("button", name="Stop").click()
        expect(news).to_have_text("The answer was stopped.")


def test_the_theme_is_the_systems_or_chosen_and_stays(browser: Browser, open_server: Server) -> None:
    def dark() -> bool:
        return max(int(each) for each in re.findall(r"\d+", _style(page.locator("body"), "background-color"))) < 60

    with looking(browser, open_server, CHAT) as page:
        page.emulate_media(color_scheme="dark")
        page.reload()
        assert dark()
        page.get_by_role("button", name="Theme: system").click()
        assert not dark()
        page.reload()
        assert not dark()
        page.get_by_role("button", name="Theme: light").click()
        page.emulate_media(color_scheme="light")
        assert dark()
        page.get_by_role("button", name="Theme: dark").click()
        assert not dark()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing(browser: Browser, open_server: Server, scheme: str, size: ViewportSize) -> None:
    with looking(browser, open_server, CHAT, size=size, allowed="400") as page:
        page.evaluate("scheme => window.theme.choose(scheme)", scheme)
        expect_no_violations(page)
        answer_with(page, {"reasoning_content": "Hm."}, {"content": RICH})
        ask(page, "a question")
        wait_for_end(page)
        expect_no_violations(page)
        page.get_by_role("button", name="Answer again").click()
        wait_for_end(page)
        page.get_by_role("button", name="Settings", exact=True).click()
        expect_no_violations(page)
        page.get_by_label("More fields").fill("[")
        page.get_by_role("button", name="Close the settings").click()
        ask(page, "an error")
        expect(page.locator(".error")).to_be_visible()
        if size == PHONE:
            page.get_by_role("button", name="Conversations").click()
        expect_no_violations(page)
        page.evaluate("document.querySelector('.shortcuts').showModal()")
        expect_no_violations(page)


def _style(locator: Locator, name: str) -> str:
    return str(locator.evaluate("(element, name) => getComputedStyle(element).getPropertyValue(name)", name))
