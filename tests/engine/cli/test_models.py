"""Commands about engines and what they keep: models, delete, purge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine import cli
from services.engine.cli import models
from tests.engine.running import RunningEngine
from tests.processes import ROOT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    one = RunningEngine(tmp_path_factory.mktemp("e"), "--local-pages", "64").start()
    yield one
    one.close()


def run(engine: RunningEngine, command: str, *arguments: str) -> int:
    return cli.run(command, [*arguments, "--target", engine.address])


def test_what_engines_serve(engine: RunningEngine, capsys: Captured, tmp_path: Path) -> None:
    assert run(engine, "models") == 0
    heading, line = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:3] == ["TARGET", "MODEL", "ARCHITECTURE"] and heading[-1] == "CHAT"
    assert line[:5] == [engine.address, "shakespeare", "LlamaForCausalLM", "3.7", "M"] and line[-1] == "no"
    nobody = f"unix:{tmp_path}/none.sock"
    assert run(engine, "models", engine.address, nobody, engine.address, "--json") == 1
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert [one["target"] for one in told] == [engine.address] * 2 and told[0]["page_size"] == 16
    assert shown.err.startswith(f"rocmforge models: UNAVAILABLE: no engine at {nobody}") and shown.err.count("\n") == 1


def test_columns_are_as_wide_as_they_have_to_be() -> None:
    broken = pb.GetModelResponse(model_id="m" * 30, page_size=16, page_bytes=160, chat_template_error="bad")
    chatty = pb.GetModelResponse(model_id="m", page_size=16, page_bytes=160, has_chat_template=True)
    heading, first, second = models.table([models.row("a", broken), models.row("b", chatty)])
    assert heading.index("ARCHITECTURE") == first.index("mmm") + 32
    assert first.endswith("unusable") and second.endswith("yes") and "16 x 10 B" in first


def test_delete_and_purge(engine: RunningEngine, capsys: Captured) -> None:
    for name in ("a", "b", "c"):
        assert run(engine, "submit", "x", "--max-tokens", "1", "--id", name) == 0
    engine.idle()
    capsys.readouterr()
    assert run(engine, "delete", "a", "nobody") == 1
    assert capsys.readouterr().err.startswith("rocmforge delete: REQUEST_UNKNOWN: no submitted generation 'nobody'")
    assert run(engine, "get", "a") == 1
    assert run(engine, "purge", "--older-than", "3600") == 0
    assert run(engine, "purge") == 0
    shown = capsys.readouterr()
    assert shown.out == "0\n2\n"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["purge", "--older-than", "nan"], 2, "rocmforge purge: --older-than nan: out of range"),
        (["purge", "--older-than", "-1"], 1, "rocmforge purge: FIELD_INVALID: older_than is -1 s"),
        (["delete", "\udcff"], 2, "rocmforge delete: ID must be UTF-8"),
        (["chat"], 1, "rocmforge chat: shakespeare has no chat template; use `generate` for text"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    engine: RunningEngine, capsys: Captured, arguments: list[str], status: int, says: str
) -> None:
    assert run(engine, *arguments) == status
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(says) and shown.err.count("\n") == 1


@pytest.mark.parametrize("command", [["models"], ["status"], ["generate", "x", "--max-tokens", "4"]])
def test_a_reader_that_has_left_is_no_story(engine: RunningEngine, command: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.engine", *command, "--target", engine.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 1
    process.stderr.close()
