"""``python -m services.engine chat``: chat with the model."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import client, messages
from services.engine.cli.printing import print_text, summary
from services.engine.cli.request_flags import Unfit, add_flags, add_system, given, put

NAME = "chat"

MAX_TOKENS = 1024
_HELP = (
    "/reset starts a new conversation, /system TEXT starts one with that system message (or none), /help prints "
    "this; // starts a message with a literal /. Ctrl-C stops an answer, Ctrl-D ends the chat."
)
_CHAT_FLAGS = ("system", "template_arguments")


class Conversation:
    """The conversation so far. Every request carries all of it, so its earlier turns hit the prefix cache."""

    def __init__(self, request: pb.GenerateRequest, system: str | None) -> None:
        self.request = request
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Start over with this system message. Raises UnicodeError, leaving the conversation unchanged."""
        first = [pb.Message(role="system", content=system)] if system else []
        items = self.request.prompt.messages.items
        del items[:]
        items.extend(first)
        self.system = system

    def ask(self, text: str) -> None:
        """Append a user message."""
        self.request.prompt.messages.items.add(role="user", content=text)

    def answered(self, text: str) -> None:
        """Append the model's answer, complete or partial; if it is empty, drop the user message it was for."""
        items = self.request.prompt.messages.items
        if text:
            items.add(role="assistant", content=text)
        else:
            del items[-1]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 at the end of input. When input is not a terminal, the first failure exits with 1 and
    an interrupt with 130.
    """
    flags = _parser().parse_args(arguments)
    try:
        values = given(flags)
        request = pb.GenerateRequest()
        _put_all(request, values)
        talk = Conversation(request, flags.system)
    except Unfit as unfit:
        client.say(NAME, str(unfit))
        return 2
    except UnicodeError:
        client.say(NAME, "--system must be UTF-8")
        return 2

    def body(stub: Any) -> int:
        model = stub.GetModel(pb.GetModelRequest())
        if not model.has_chat_template:
            why = f": {model.chat_template_error}" if model.chat_template_error else ""
            client.say(NAME, f"{model.model_id} has no chat template{why}; use `generate` for text")
            return 1
        terminal = sys.stdin.isatty()
        if terminal:
            print(f"{model.model_id}. {_HELP}", file=sys.stderr)
        return _talk(stub, talk, terminal, flags)

    return client.run(NAME, client.reached(flags), body, flags.wait)


def _put_all(request: pb.GenerateRequest, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in _CHAT_FLAGS:
            continue
        try:
            put(request, name, value)
        except UnicodeError as error:
            raise Unfit(f"--{name.replace('_', '-')} must be UTF-8") from error
        except (TypeError, ValueError) as error:
            raise Unfit(f"--{name.replace('_', '-')} {value}: out of range") from error
    try:
        begun = messages.of({"prompt": "", "template_arguments": values.get("template_arguments")})
    except messages.Unheard as error:
        raise Unfit(f"--template-argument: {error}") from error
    except UnicodeError as error:
        raise Unfit("--template-argument must be UTF-8") from error
    request.prompt.messages.CopyFrom(begun)


def _talk(stub: Any, talk: Conversation, terminal: bool, flags: argparse.Namespace) -> int:
    for line in _lines(terminal):
        word, _, rest = line.strip().partition(" ")
        if not word:
            continue
        try:
            if word == "/reset":
                talk.reset(talk.system)
            elif word == "/system":
                talk.reset(rest.strip())
            elif word == "/help":
                print(_HELP, file=sys.stderr)
            elif word.startswith("/") and not word.startswith("//"):
                client.say(NAME, f"unknown command {word}. {_HELP}")
            else:
                text = line.strip().removeprefix("/") if word.startswith("//") else line
                if _answer(stub, talk, text, flags) and not terminal:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # between an answer and the next line
            if not terminal:
                raise
        except grpc.RpcError as error:
            client.say(NAME, client.describe(client.failure(error, client.reached(flags))))
            if not terminal:
                return 1
        except UnicodeError:
            client.say(NAME, "messages must be UTF-8")
            if not terminal:
                return 1
    return 0


def _answer(stub: Any, talk: Conversation, text: str, flags: argparse.Namespace) -> bool:
    """Send a message, print the answer as it streams, and record both. Returns whether an interrupt cut it short."""
    said: list[str] = []
    with _Interrupt() as interrupt:
        talk.ask(text)
        try:
            stream = stub.Generate(talk.request)
            interrupt.then(stream.cancel)

            def heard() -> Iterator[pb.GenerateResponse]:
                for response in stream:
                    said.append(response.text)
                    yield response

            try:
                finish = print_text(heard())
            except grpc.RpcError:
                if not interrupt.came:
                    raise
                return True
            finally:
                stream.cancel()
            if flags.stats and finish is not None:
                print(summary(finish), file=sys.stderr)
        finally:
            talk.answered("".join(said))
    return interrupt.came


class _Interrupt:
    """While entered, SIGINT runs an action instead of raising, so it cannot leave this module or gRPC half done.

    An interrupt that arrives before the action is set runs it as soon as it is.
    """

    def __init__(self) -> None:
        self.came = False
        self._action: Callable[[], object] | None = None
        self._before: Any = None

    def then(self, action: Callable[[], object]) -> None:
        """Set the action of an interrupt. Each interrupt calls it; one that has already arrived calls it now."""
        self._action = action
        if self.came:
            action()

    def _interrupt(self, number: int, frame: Any) -> None:
        self.came = True
        if self._action is not None:
            self._action()

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *failed: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _lines(terminal: bool) -> Iterator[str]:
    """Lines of standard input until its end. On a terminal, an interrupt only discards the current line."""
    if not terminal:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # so that invalid UTF-8 is reported for its message
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and history
    while True:
        try:
            yield input("> " if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(
        NAME,
        f"Chat with the model: each line of standard input is a message; answers go to standard output. {_HELP}",
    )
    add_system(parser, "system message that starts the conversation")
    add_flags(parser, MAX_TOKENS)
    parser.add_argument(
        "--stats", action="store_true", help="print token counts, cache hits, times and the seed to standard error"
    )
    return parser
