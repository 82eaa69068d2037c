"""Chat templates: the text that `transformers` makes, and bounds on what a template may do."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from typing import Any

import pytest

from services.common.errors import FieldInvalid, PromptTooLong
from services.engine.text import chat_template
from services.engine.text.chat_template import MAX_STEPS, ChatTemplate, TemplateUnfit
from tests.engine.text.chats.conversations import CASES, FOLDER, SPECIAL, said, template_of

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
SIZE = 1 << 16


def written(source: str, messages: list[dict[str, Any]] | None = None, size: int = SIZE, **arguments: Any) -> str:
    # Whatever the machine is busy with, the limit of time is not what ends it.
    return ChatTemplate(source, SPECIAL, clock=lambda: 0.0).render(messages or said("Hi!"), size=size, **arguments)


def rendered(name: str) -> str:
    """A case, by its arguments as `apply_chat_template` takes them."""
    template, messages, given = CASES[name]
    own = {key: given[key] for key in ("tools", "continue_final_message") if key in given}
    asking = given.get("add_generation_prompt", False)
    other = {key: value for key, value in given.items() if key not in (*own, "add_generation_prompt")}
    return written(template_of(template), messages, add_generation_prompt=asking, arguments=other, **own)


def test_every_case_has_an_expectation() -> None:
    assert EXPECTED.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    assert rendered(name) == EXPECTED[name]["text"]


def test_the_day_is_the_clocks() -> None:
    template = ChatTemplate(template_of("llama3"), SPECIAL, today=lambda: datetime(2026, 2, 3))
    assert "Today Date: 03 Feb 2026\n" in template.render(said("Hi!"), size=SIZE)


def test_a_message_to_go_on_with_is_found_where_it_is() -> None:
    twice = "{{ messages[0].content }} and {{ messages[0].content }}!"
    assert written(twice, said("x"), continue_final_message=True) == "x and x"
    assert written("{{ messages[-1].content | trim }}!", said(" x "), continue_final_message=True) == " x ".strip()
    with pytest.raises(FieldInvalid, match="does not render the final message"):
        written("nothing", continue_final_message=True)


def test_messages_are_left_as_they_were() -> None:
    messages = said("x")
    written("{{ messages[0].content }}", messages, continue_final_message=True)
    assert messages == said("x")
    with pytest.raises(FieldInvalid, match="SecurityError"):
        written("{% set _ = messages.append(1) %}", messages)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for x in messages %}", "line 1: Unexpected end of template"),
        ("{{ 1 | nonesuch }}", "line 1: No filter named 'nonesuch'"),
        ("\n{% endif %}", "line 2: "),
        ("{% generation %}x", "line 1: "),
        ("x" + "{% if 1 %}" * 400 + "{% endif %}" * 400, "too many|Recursion|Memory|indentation"),
    ],
)
def test_a_template_that_does_not_parse(source: str, says: str) -> None:
    with pytest.raises(TemplateUnfit, match=says):
        ChatTemplate(source, {})


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(FieldInvalid, match="rejects messages: After the optional system message") as caught:
        written(template_of("mistral"), [*said("Hi!"), {"role": "user", "content": "?"}])
    assert caught.value.field == "messages"
    with pytest.raises(FieldInvalid, match="Only user and assistant roles"):
        written(template_of("mistral"), [*said("Hi!"), {"role": "tool", "content": ""}])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nobody.home }}", "UndefinedError: 'nobody' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.__init__.__globals__ }}", "SecurityError"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_what_fails_while_it_is_written_is_an_error_of_the_field(source: str, says: str) -> None:
    with pytest.raises(FieldInvalid, match=f"fails on messages: {says}") as caught:
        written(source)
    assert caught.value.field == "messages"


# --- bounds -----------------------------------------------------------------------------------------------------------

NESTED = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}"
FILTERED = "{% for a in range(10000) %}{% for b in range(10000) if b < 0 %}{% endfor %}{% endfor %}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("source", [NESTED, FILTERED, TWICE])
def test_an_endless_template_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 2000)
    with pytest.raises(FieldInvalid, match="exceeds a limit: it takes more than 2012 steps"):
        written(source)


def test_a_slow_template_ends() -> None:
    ticks = itertools.count(0, 3)
    template = ChatTemplate("{% for a in range(9999) %}.{% endfor %}", {}, clock=lambda: next(ticks))
    with pytest.raises(FieldInvalid, match="it takes longer than 10 s"):
        template.render(said("Hi!"), size=SIZE)


DOUBLED = "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = "


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{{ 'x' }}{{ 'y' ~ a }}{% endfor %}",
        "{% for a in range(1000) %}text{% endfor %}",
        DOUBLED + "ns.x + ns.x %}{% endfor %}",
        DOUBLED + "ns.x ~ ns.x %}{% endfor %}",
        DOUBLED + "ns.x * 2 %}{% endfor %}",
        DOUBLED + "[ns.x] + [ns.x, ns.x] * 600 %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ ('x' * 900).replace('x', 'y' * 900) }}",
        "{{ range(900) | join('y' * 900) }}",
        "{% set x %}{% for a in range(1000) %}{{ 'x' * 900 }}{% endfor %}{% endset %}",
    ],
)
def test_a_template_that_makes_too_much_ends(source: str) -> None:
    with pytest.raises(PromptTooLong) as caught:
        written(source, size=1000)
    assert caught.value.field == "messages" and caught.value.metadata == {"limit": "1000"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 10 ** (10 ** 10) }}", "bits"),
        ("{% set ns = namespace(x=3) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "bits"),
        ("{{ 'x'.ljust(10000000) }}", "number 10000000"),
        ("{{ '%99999999d' % 1 }}", "width"),
        ("{{ '%*d' | format(99999999, 1) }}", "width"),
        ("{{ range(1000000) | list }}", "number 1000000"),
        ("{{ 'x' | center(10000000) }}", "number 10000000"),
        ("{{ 'x\ny' | indent(width=10000000) }}", "number 10000000"),
        ("{{ [1] | tojson(indent=10000000) }}", "number 10000000"),
        ("{{ [] | slice(10000000) | list }}", "number 10000000"),
    ],
)
def test_a_number_that_makes_too_much_is_refused(source: str, says: str) -> None:
    with pytest.raises(FieldInvalid, match=says):
        written(source, size=1000)


def test_arithmetic_and_operators_do_what_they_do() -> None:
    assert written("{{ 2 ** 10 }} {{ 7 * 3 - 1 }} {{ 7 % 4 }} {{ -1 * 2 }}") == "1024 20 3 -2"
    assert written("{{ 'ab' * 2 }} {{ [1] + [2] }} {{ '%s-%d' % ('a', 7) }}") == "abab [1, 2] a-7"
    assert written("{{ [1, 2] | join('-') }} {{ 'x' | center(3) }} {{ 'a\nb' | indent(2) }}") == "1-2  x  a\n  b"
    assert written("{{ '%s|%s' | format('a', 2) }} {{ 'a' ~ 1 ~ true ~ missing }}!") == "a|2 a1True!"


def test_the_bounds_are_beyond_a_long_conversation() -> None:
    messages = said(*("x" * 10,) * 10_001)
    assert written(template_of("qwen3"), messages, size=1 << 20).count("<|im_start|>") == 10_002
    long = "x" * (MAX_STEPS + 1)  # which this template goes through, character by character
    assert long in written(template_of("llama3"), said(long), size=1 << 20)
