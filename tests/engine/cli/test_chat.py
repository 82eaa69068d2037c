"""A chat in a terminal, and conversations for the other commands."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine import cli
from services.engine.cli.chat import Conversation
from tests.engine.running import RunningEngine
from tests.engine.text.chats.checkpoints import chat_folder
from tests.engine.text.chats.conversations import said, template_of
from tests.engine.text.test_chat import messages
from tests.generation import collect
from tests.processes import ROOT

Captured = pytest.CaptureFixture[str]
GREEDY = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningEngine]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        folder = chat_folder(Path(name) / "chatty", template_of("qwen3"))
        one = RunningEngine(Path(name), "--model", str(folder), "--local-pages", "256").start()
        yield one
        one.close()


def run(engine: RunningEngine, command: str, *arguments: str) -> int:
    return cli.run(command, [*arguments, "--target", engine.address])


def answer(engine: RunningEngine, *turns: str, system: str = "", **fields: Any) -> str:
    """What the engine says to a conversation."""
    before = [{"role": "system", "content": system}] if system else []
    prompt = pb.Prompt(messages=messages([*before, *said(*turns)], **fields))
    sampling, stopping = pb.Sampling(temperature=0), pb.Stopping(max_tokens=6)
    return collect(engine.stub.Generate(pb.GenerateRequest(prompt=prompt, sampling=sampling, stopping=stopping)))[0]


def printed(*texts: str) -> str:
    return "".join(text if not text or text.endswith("\n") else f"{text}\n" for text in texts)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    given = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_remembers(engine: RunningEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answer(engine, "Hi!")
    second = answer(engine, "Hi!", first, "the")
    assert first and second and answer(engine, "the") != second
    typed(monkeypatch, "Hi!", "", "the", "/reset", "the", "//reset")
    assert run(engine, "chat", *GREEDY) == 0
    shown = capsys.readouterr()
    alone = answer(engine, "the")
    assert shown.out == printed(first, second, alone, answer(engine, "the", alone, "/reset")) and shown.err == ""


def test_a_system_s_message(engine: RunningEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "Hi!", "/system Rage, the", "Hi!", "/reset", "Hi!", "/system", "Hi!")
    assert run(engine, "chat", "--system", "Be brief", *GREEDY) == 0
    brief, rage = (answer(engine, "Hi!", system=system) for system in ("Be brief", "Rage, the"))
    assert len({brief, rage, answer(engine, "Hi!")}) == 3
    assert capsys.readouterr().out == printed(brief, rage, rage, answer(engine, "Hi!"))


def test_a_system_s_message_that_cannot_be_sent_changes_nothing() -> None:
    talk = Conversation(pb.GenerateRequest(), "Be brief")
    talk.ask("Hi!")
    before = pb.GenerateRequest.FromString(talk.request.SerializeToString())
    with pytest.raises(UnicodeError):
        talk.reset("\udcff")
    assert talk.request == before
    talk.reset(talk.system)
    assert [one.content for one in talk.request.prompt.messages.items] == ["Be brief"]


def test_arguments_of_the_template(engine: RunningEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "Hi!")
    assert run(engine, "chat", "--template-argument", "enable_thinking=false", *GREEDY) == 0
    expected = answer(engine, "Hi!", template_arguments={"enable_thinking": False})
    assert capsys.readouterr().out == printed(expected) != printed(answer(engine, "Hi!"))


def test_each_turn_is_warm_from_the_last(
    engine: RunningEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, *(f"{word}, the the the the the the" for word in ("Once", "again", "more")))
    assert run(engine, "chat", "--stats", *GREEDY) == 0
    told = [line.split("; prompt ")[1] for line in capsys.readouterr().err.splitlines()]
    prompts = [int(line.split()[0]) for line in told]
    cached = [int(line.split("(")[1].split()[0]) for line in told]
    assert len(told) == 3 and all("/s)" in line for line in told)
    for before, after in ((0, 1), (1, 2)):
        assert cached[after] >= prompts[before] // 16 * 16 > 0


def test_what_is_wrong_ends_a_chat_without_a_terminal(
    engine: RunningEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, says in (
        ("the " * 5000, "PROMPT_TOO_LONG: the prompt has"),
        ("\ufdd0", "FIELD_INVALID: messages.items[0].content contains the noncharacter U+FDD0"),
        ("\udcff", "messages must be UTF-8"),
    ):
        typed(monkeypatch, line, "never asked")
        assert run(engine, "chat", *GREEDY) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith(f"rocmforge chat: {says}") and shown.err.count("\n") == 1
    typed(monkeypatch, "/nonsense", "/help")
    assert run(engine, "chat") == 0
    assert "unknown command /nonsense. /reset starts a new" in capsys.readouterr().err


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.engine", *command],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = b""

    def until(self, text: str, nudge: Callable[[], None] = lambda: None) -> str:
        """Read until a text is there; what came, with it. ``nudge`` is called when nothing comes, and then whenever
        nothing came for long.
        """
        quiet_s = 0.2
        while text.encode() not in self.shown:
            if not select.select([self._master], [], [], quiet_s)[0]:
                quiet_s = 2.0
                nudge()
                continue
            self.shown += os.read(self._master, 4096)
        end = self.shown.index(text.encode()) + len(text.encode())
        came, self.shown = self.shown[:end], self.shown[end:]
        return came.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self._master)


def test_an_interrupt_ends_the_answer_and_not_the_chat(engine: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests
    loop, cancelled = engine.engine.loop, threading.Event()
    cancel = loop.cancel

    def noted(request_id: str) -> None:
        cancel(request_id)
        cancelled.set()

    monkeypatch.setattr(loop, "cancel", noted)
    terminal = Terminal("chat", "--target", engine.address, "--stats", *GREEDY)
    try:
        terminal.until("Ctrl-D ends the chat.")
        terminal.until("> ")
        terminal.type("half a lin")
        terminal.until("half a lin")
        # One that comes while a key is taken in does not wake readline: it is told again.
        terminal.until("> ", terminal.interrupt)
        terminal.type("/help\n")
        # One told again may have been taken in after all, and end the line just typed, too.
        terminal.until("Ctrl-D ends the chat.", lambda: terminal.type("/help\n"))
        terminal.until("> ")
        engine.steps.hold()
        terminal.type("Hi!\n")
        assert engine.steps.reached.wait(60)
        terminal.interrupt()
        terminal.until("> ")
        assert cancelled.wait(60)
        engine.steps.release()
        engine.idle()
        assert engine.stub.GetStats(pb.GetStatsRequest()).cancelled_requests == before + 1
        terminal.type("/reset\nthe\n")
        assert "cached), completion" in terminal.until("; seed ")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_the_call_begins(
    engine: RunningEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch, moment: str, terminal: bool
) -> None:
    """It ends that answer, wherever gRPC is; on a terminal the chat continues as if the question had not been asked."""
    began: list[Any] = []

    class Stub:
        GetModel = engine.stub.GetModel

        def Generate(self, request: pb.GenerateRequest) -> Any:
            if began:
                assert began[0].cancelled() and len(request.prompt.messages.items) == 1
                engine.steps.release()
                return engine.stub.Generate(request)
            if moment == "before":
                signal.raise_signal(signal.SIGINT)
            engine.steps.hold()
            began.append(engine.stub.Generate(request))
            assert engine.steps.reached.wait(60)
            if moment == "after":
                signal.raise_signal(signal.SIGINT)
            return began[0]

    expected = printed(answer(engine, "the"))
    typed(monkeypatch, "Hi!", "the")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal)
    monkeypatch.setattr("services.engine.cli.client.engine_pb2_grpc.EngineServiceStub", lambda channel: Stub())
    assert run(engine, "chat", *GREEDY) == (0 if terminal else 130)
    assert len(began) == 1 and capsys.readouterr().out == (expected if terminal else "")
    assert began[0].cancelled()


# --- conversations for the other commands -----------------------------------------------------------------------------


def test_a_prompt_as_a_message(engine: RunningEngine, capsys: Captured) -> None:
    assert run(engine, "generate", "Hi!", "--chat", *GREEDY) == 0
    assert run(engine, "generate", "Hi!", "--system", "Be brief", *GREEDY) == 0
    expected = printed(answer(engine, "Hi!"), answer(engine, "Hi!", system="Be brief"))
    assert capsys.readouterr().out == expected
    assert run(engine, "submit", "Hi!", "--chat", "--id", "chatted", *GREEDY) == 0
    assert run(engine, "watch", "chatted") == 0
    assert capsys.readouterr().out == "chatted\n" + printed(answer(engine, "Hi!"))
    assert run(engine, "generate", "Hi!", *GREEDY) == 0
    assert capsys.readouterr().out != printed(answer(engine, "Hi!"))


def batch(engine: RunningEngine, capsys: Captured, tmp_path: Path, lines: list[Any], *flags: str) -> list[Any]:
    source = tmp_path / "in"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run(engine, "batch", str(source), *GREEDY, *flags)
    return sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda record: record["index"])


def test_lines_with_messages(engine: RunningEngine, capsys: Captured, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i!"}]
    records = batch(
        engine,
        capsys,
        tmp_path,
        [
            {"messages": said("Hi!")},
            {"messages": [{"role": "user", "content": parts}]},
            {"prompt": "Hi!", "system": "Be brief"},
            {"messages": said("Hi!"), "template_arguments": {"enable_thinking": False}},
            {"messages": said("Hi!", "the"), "continue_final_message": True},
            {"messages": said("Hi!"), "prompt": "Hi!"},
            {"messages": "Hi!"},
            {"messages": [{"content": "Hi!"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": []},
            {"messages": said("Hi!"), "add_generation_prompt": 1},
            {"messages": said("Hi!"), "tools": {}},
            {"messages": [{"role": "user", "content": "x", "name": 7}]},
            {"messages": [{"role": "user", "content": "\ud800"}], "id": "half"},
            {"prompt": "Hi!"},
        ],
    )
    assert [record.get("text") for record in records[:5]] == [
        answer(engine, "Hi!"),
        answer(engine, "Hi!"),
        answer(engine, "Hi!", system="Be brief"),
        answer(engine, "Hi!", template_arguments={"enable_thinking": False}),
        answer(engine, "Hi!", "the", continue_final_message=True),
    ]
    said_of = [record["error"]["message"] for record in records[5:14]]
    assert said_of == [
        "prompt and messages are mutually exclusive",
        "messages must be a list of objects with role and content",
        "messages[0] must be an object with role and content",
        "messages[0].content must be a string or a list of text parts",
        "messages is empty",
        "add_generation_prompt must be a boolean",
        "tools must be a list of objects",
        "messages[0].name must be a string",
        "messages is not valid UTF-8",
    ]
    assert "error" not in records[14]


def test_flags_hold_for_lines(engine: RunningEngine, capsys: Captured, tmp_path: Path) -> None:
    lines = [{"prompt": "Hi!"}, {"messages": said("Hi!")}, {"prompt": "Hi!", "chat": False}, {"prompt": [20, 21]}]
    records = batch(engine, capsys, tmp_path, lines, "--chat")
    assert [record["text"] == answer(engine, "Hi!") for record in records] == [True, True, False, False]
    records = batch(engine, capsys, tmp_path, lines[:2], "--system", "Be brief")
    assert [record["text"] for record in records] == [answer(engine, "Hi!", system="Be brief")] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "--template-argument", "x"], "rocmforge chat: --template-argument x: expected NAME=VALUE"),
        (["generate", "x", "--template-argument", "=1"], "rocmforge generate: --template-argument =1: expected NAME"),
        (["batch", "--template-argument", "x"], "rocmforge batch: --template-argument x: expected NAME=VALUE"),
        (["chat", "--max-tokens", "-1"], "rocmforge chat: --max-tokens -1: out of range"),
        (["chat", "--system", "\udcff"], "rocmforge chat: --system must be UTF-8"),
        (["chat", "--cache-salt", "\udcff"], "rocmforge chat: --cache-salt must be UTF-8"),
        (["chat", "--template-argument", "x=\udcff"], "rocmforge chat: --template-argument must be UTF-8"),
        (["generate", "x", "--template-argument", "x=\udcff"], "rocmforge generate: PROMPT and --template-argument"),
        (["generate", "x", "--system", "\udcff"], "rocmforge generate: PROMPT and --system must be UTF-8"),
    ],
)
def test_flags_that_cannot_be(engine: RunningEngine, capsys: Captured, arguments: list[str], says: str) -> None:
    assert run(engine, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(says) and shown.err.count("\n") == 1
