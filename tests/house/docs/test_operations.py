"""The pages for operators name flags, events, reasons, metrics and manifests that there are."""

from __future__ import annotations

import functools
import re

import pytest

from services.common.errors import BY_REASON
from services.common.settings import table
from services.engine import config as engine
from services.engine.cli import batch, bench, chat, drain, generate, status
from services.kvcache import config as kvcache
from tests.house.test_house import FILES, ROOT

PAGES = pytest.mark.parametrize("page", ["operations", "troubleshooting", "kubernetes"])

#: Of other programs.
FOREIGN_FLAGS = {"--validate", "--warnings-as-errors", "--allow-privileged", "--field-selector", "--ignore-daemonsets"}
FOREIGN_WORDS = {"too_many_pings", "stop_grace_period"}
NO_REASONS = {"NOT_SERVING", "FENCE_UNSEEN"}


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


@functools.cache
def sources() -> str:
    return "\n".join(
        (ROOT / name).read_text(encoding="utf-8")
        for name in FILES
        if name.endswith(".py") and name.startswith(("services/", "clients/"))
    )


@functools.cache
def flags() -> set[str]:
    own = {row.flag for module in (engine, kvcache) for row in table(module.Config, module.PROGRAM)}
    parsers = [module._parser() for module in (batch, bench, chat, drain, generate, status)]
    commands = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    return own | commands | {"--config"}


def unknown_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - flags() - FOREIGN_FLAGS


def unknown_words(text: str) -> set[str]:
    """Events, fields and metrics, as far as their names have underscores."""
    known = sources() + text_of("metrics")
    found = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:\{[^`]*)?`", text)) - FOREIGN_WORDS
    return {word for word in found if not re.search(rf"\b(rocmforge_)?{word}\b", known)}


def unknown_reasons(text: str) -> set[str]:
    found = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", text)) - {f"{engine.PROGRAM.prefix}_PORT"}
    return {name for name in found - set(BY_REASON) - NO_REASONS if not name.startswith("OTEL_")}


@PAGES
def test_what_a_page_names_is_there(page: str) -> None:
    text = text_of(page)
    assert (unknown_flags(text), unknown_words(text), unknown_reasons(text)) == (set(), set(), set())


def test_messages_are_quoted_as_they_are_written() -> None:
    section = text_of("troubleshooting").split("## It does not start")[1].split("\n## ")[0]
    quoted = [words for words in re.findall(r"^\| `([^`]+)`", section, re.MULTILINE) if " " in words]
    assert len(quoted) >= 4
    assert [words for words in quoted if words not in sources()] == []


def test_overlays_are_those_that_there_are() -> None:
    told = re.findall(r"^\| `([\w-]+)` \|", text_of("kubernetes").split("\n## ")[0], re.MULTILINE)
    assert sorted(told) == sorted(path.name for path in (ROOT / "deploy" / "kubernetes" / "overlays").iterdir())


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (unknown_flags, "with --max-batches 3", "with --max-batch 3, --wait 60"),
        (unknown_words, "`session_lots`", '`session_lost`, `kvcache_pages{state="cached"}`'),
        (unknown_reasons, "`QUEUE_EMPTY`", "`QUEUE_FULL`"),
    ],
)
def test_each_check_can_fail(check, bad: str, good: str) -> None:  # type: ignore[no-untyped-def]
    assert check(bad) and not check(good)
