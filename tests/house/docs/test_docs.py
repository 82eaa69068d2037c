"""Docs that state facts about the code are held to them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import errors
from services.engine.scheduling.queue.retry_after import LEAST_S, MOST_S
from services.version import VERSION

ROOT = Path(__file__).parents[3]


def table(page: str) -> set[tuple[str, str, str, str]]:
    """Reason, status, retry and meaning of each row of a page's table of errors."""
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    return {(reason, code, retry.strip(), meaning) for reason, code, retry, meaning in rows}


def rows(names: list[str]) -> set[tuple[str, str, str, str]]:
    """What a table has to say of these errors."""
    expected = set()
    for kind in (getattr(errors, name) for name in names):
        retry = f"after {kind.retry_after_s:g} s" if kind.retry_after_s else ""
        if kind is errors.QueueFull:
            retry = f"{LEAST_S:g} to {MOST_S:g} s, estimated"
        expected.add((kind.reason, kind.code, retry, kind.__doc__.strip().splitlines()[0]))
    return expected


def classes(text: str) -> list[str]:
    return re.findall(r"^class (\w+)", text, re.MULTILINE)


def test_the_daemons_error_table_is_the_codes() -> None:
    table_of = ROOT / "clients" / "python" / "rocmforge" / "client" / "errors.py"
    own = classes(table_of.read_text().split("# --- the KV-cache daemon")[1])
    names = ["FieldInvalid", "Internal", "RoleMissing", "TooManyCalls", *own]
    assert table((ROOT / "docs" / "daemon.md").read_text()) == rows(names)


def test_the_engines_error_table_is_the_codes() -> None:
    own = set(classes((ROOT / "services" / "common" / "errors.py").read_text())) - {"ModelInvalid"}  # it ends the start
    both = [
        "FieldInvalid",
        "Internal",
        "RoleMissing",
        "ExceedsPool",
        "Unauthenticated",
        "Draining",
        "NotReady",
        "KvCacheDown",
    ]
    assert table((ROOT / "docs" / "api.md").read_text()) == rows([*both, *own])


def test_every_rpc_of_the_engine_has_an_example() -> None:
    proto = (ROOT / "protos" / "rocmforge" / "engine" / "v1" / "engine.proto").read_text()
    page = (ROOT / "docs" / "api.md").read_text()
    methods = re.findall(r"^  rpc (\w+)\(", proto, re.MULTILINE)
    assert methods
    assert [name for name in methods if f"rocmforge.engine.v1.EngineService/{name}\n" not in page] == []


def test_structures_names_every_module() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    for top in ("services", "kernels", "clients/python/rocmforge"):
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            if not path.name.startswith("__"):
                rows = text.split(f"| `{folder}/` |")[-1]
                assert f"`{path.name}`" in rows, f"docs/structures.md does not say what {folder}/{path.name} is"


def test_alerts_are_on_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    tables, alerts = page.split("## What to alert on")
    told = dict(re.findall(r"^\| `(rocmforge_\w+)` \| (\w+) \|", tables, re.MULTILINE))
    asked = re.findall(r"rocmforge_\w+", alerts)
    assert told and asked
    for name in asked:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in told or told.get(family) == "histogram", f"an alert is on {name}"
    short = re.findall(r"`(\w+(?:_seconds|_total))`", alerts)
    assert all(any(name.endswith(one) for name in told) for one in short)


def pages() -> list[Path]:
    """Every page but those of models, which have a licence of their own."""
    return [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "kernels" / "README.md",
        ROOT / "clients" / "python" / "README.md",
    ]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page ends in."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in pages():
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" not in target:
                there = page.parent / target if target else page
                assert there.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_every_decision_is_in_the_index_and_says_three_things() -> None:
    folder = ROOT / "docs" / "adr"
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert records
    listed = re.findall(r"^\| (\d{4}) \| \[(.*)\]\((.*)\) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert [name for _, _, name in listed] == records
    for at, (number, title, name) in enumerate(listed, 1):
        lines = (folder / name).read_text().splitlines()
        assert number == f"{at:04}" == name[:4] and lines[0] == f"# {at}. {title}", name
        assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Consequences"]
        assert len(lines) <= 40, f"{name} is long for a record"


def test_contributing_names_what_there_is() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [name for name in re.findall(r"`make ([a-z-]+)", page) if name not in targets] == []
    words = {word for quoted in re.findall(r"`([^`]+)`", page) for word in quoted.split()}
    paths = {word for word in words if "/" in word and not word.startswith(".venv/") and "NAME" not in word}
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_pages_name_the_version_that_this_is() -> None:
    """In names of files that carry it; those of other packages are pinned elsewhere."""
    told = [found for page in pages() for found in re.findall(r"rocmforge[a-z-]*-\d+(?:\.\d+)+", page.read_text())]
    assert f"rocmforge-protos-{VERSION}" in told
    assert [name for name in told if not name.endswith(f"-{VERSION}")] == []


# --- commands ---------------------------------------------------------------------------------------------------------

#: What a line of a block without prompts, or a piece of a sentence, begins with when it is to be typed.
PROGRAMS = r"(?:python -m|make|grpcurl|ghz|buf|docker|hf|pip|curl|git|cd|mount) "


def lines_of(first: str, rest: Iterator[str]) -> str:
    """A command with its continuation lines: after a backslash, or within quotes."""
    typed = first
    while typed.endswith("\\") or is_open(typed):
        following = next(rest, None)
        if following is None:
            break
        typed += f"\n{following}"
    return typed


def is_open(typed: str) -> bool:
    """Whether a quotation is still to be closed."""
    try:
        shlex.split(typed, comments=True)
    except ValueError:
        return True
    return False


def commands(page: str) -> list[str]:
    """All that a page gives its reader to type: blocks, with or without prompts, and pieces of sentences."""
    found: list[str] = []
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    for language, block in fence.findall(page):
        if language not in ("", "sh", "bash", "console"):
            continue
        begin = r"\$ " if re.search(r"^\$ ", block, re.MULTILINE) else rf"(?={PROGRAMS})"
        lines = iter(block.splitlines())
        for line in lines:
            if started := re.match(begin, line):
                found.append(lines_of(line[started.end() :], lines))
    prose = fence.sub("", page)
    return found + [one for one in re.findall(r"`([^`]+)`", prose) if re.match(PROGRAMS, one)]


def not_typable(command: str) -> str:
    """What of a command its reader would have to know better; nothing when all of it can be typed as it stands.

    Words in capitals are for the reader to replace.
    """
    if found := re.search(r"\.\.\.|…", command):
        return f"{found[0]!r} is not all of it"
    if found := re.search(r"<[a-z][\w -]*>", command):
        return f"{found[0]} is not in capitals"
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        return str(error)
    if found := re.search(r"\w\|\w", re.sub(r"'[^']*'|\"[^\"]*\"", "", command)):
        return f"a shell takes {found[0]!r} for a pipe"
    for option, value in itertools.pairwise(words):
        if option == "-d" and "grpcurl" in words:
            try:
                json.loads(value)
            except ValueError as error:
                return f"-d {value}: {error}"
    return ""


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_command_can_be_typed_as_it_stands(page: str) -> None:
    problems = {typed: problem for typed in commands((ROOT / page).read_text()) if (problem := not_typable(typed))}
    assert not problems


def test_the_pages_have_commands() -> None:
    assert len(commands((ROOT / "README.md").read_text())) > 5
    told = commands((ROOT / "docs" / "daemon.md").read_text())
    assert any(one.startswith("grpcurl") and "814, 26" in one and one.endswith("AllocatePages") for one in told)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("grpcurl -plaintext -d '{\"prompt\": [641, 418, ...]}' HOST:PORT", "not all of it"),
        ('make run PROMPT="..."', "not all of it"),
        ("python -m services.engine watch <id>", "<id> is not in capitals"),
        ("python -m services.engine get|watch ID", "pipe"),
        ("grpcurl -d '{\"a\": [1, ID]}' HOST:PORT", "-d"),
        ('grpcurl -d \'{"a"', "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_typed_is_found(command: str, words: str) -> None:
    assert words in not_typable(command)


@pytest.mark.parametrize(
    "command",
    [
        "python -m services.engine watch ID --target HOST:PORT  # from its beginning",
        "python -m services.engine generate - <LICENSE | head -3",
        'grpcurl -plaintext -d \'{"prompt": {"text": "a|b"}}\' \\\n    HOST:PORT a.B/C',
    ],
)
def test_a_command_that_can_be_typed_is_let_be(command: str) -> None:
    assert not_typable(command) == ""
