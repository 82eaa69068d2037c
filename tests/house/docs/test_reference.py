"""The generated pages are what the protos and the declared settings say now: `make reference` writes them."""

from __future__ import annotations

import os
import socket

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from scripts import reference
from scripts.protos_bundle import describe
from services.engine import config as engine

ROOT = reference.ROOT


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login session has a runtime directory of its own, on which a default depends."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_the_pages_are_current() -> None:
    pages = reference.pages()
    assert set(pages) == {"settings.md", "reference/engine.md", "reference/kvcache.md"}
    stale = [name for name, text in pages.items() if (ROOT / "docs" / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run `make reference`"


def engine_file() -> FileDescriptorProto:
    [found] = [one for one in FileDescriptorSet.FromString(describe()).file if one.package == "rocmforge.engine.v1"]
    return found


def test_every_call_field_and_value_is_there() -> None:
    file = engine_file()
    page = reference.Proto(file).page("x", "y")
    for service in file.service:
        for method in service.method:
            assert f"\n### {method.name}\n" in page
    for message in file.message_type:
        section = page.split(f"\n### {message.name}\n")[1].split("\n### ")[0]
        for field in message.field:
            assert f"| `{field.name}` |" in section, message.name
    for enum in file.enum_type:
        assert all(f"| `{value.name}` |" in page for value in enum.value)
    assert page.count("\nReasons: ") == sum(len(service.method) for service in file.service)


def test_a_comment_that_changes_changes_the_page() -> None:
    file = engine_file()
    [place] = [one for one in file.source_code_info.location if tuple(one.path) == (6, 0, 2, 0)]
    before = reference.Proto(file).page("x", "y")
    place.leading_comments = " Something | else, at most <3>.\n Reasons: NOT_READY.\n"
    after = reference.Proto(file).page("x", "y")
    assert before != after
    assert "Something | else, at most &lt;3>.\n\nReasons: NOT_READY.\n" in after


def test_a_declaration_that_changes_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.settings_page().splitlines()
    monkeypatch.setattr(engine.Config, "LIVE", engine.Config.LIVE | {"max_batch"})
    [changed] = [new for new, old in zip(reference.settings_page().splitlines(), before, strict=True) if new != old]
    assert changed.startswith("| `--max-batch` |") and "while it runs" in changed


def test_nothing_of_this_machine_is_in_them() -> None:
    names = (str(ROOT), f"`{socket.gethostname()}`", f"rocmforge-{os.getuid()}/")
    assert not [name for name, text in reference.pages().items() if any(one in text for one in names)]
