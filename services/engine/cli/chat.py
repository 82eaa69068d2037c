"""``python -m services.engine chat``: talk with the model."""

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
    "/reset begins anew, /system TEXT does so with another system's message (or none), /help prints this; "
    "// begins a message with a /. Ctrl-C ends an answer, Ctrl-D the chat."
)
_CHAT_FLAGS = ("system", "template_arguments")


class Conversation:
    """What was said so far; each answer is asked for with all of it, so its beginning is in the cache."""

    def __init__(self, request: pb.GenerateRequest, system: str | None) -> None:
        self.request = request
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Begin anew. Raises UnicodeError, and then goes on as it was."""
        first = [pb.Message(role="system", content=system)] if system else []
        items = self.request.prompt.messages.items
        del items[:]
        items.extend(first)
        self.system = system

    def ask(self, text: str) -> None:
        """A message of the user's."""
        self.request.prompt.messages.items.add(role="user", content=text)

    def answered(self, text: str) -> None:
        """The model's answer, be it part of one; without a word of it the question counts as not asked."""
        items = self.request.prompt.messages.items
        if text:
            items.add(role="assistant", content=text)
        else:
            del items[-1]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 at the input's end. Without a terminal the first failure ends it, with 1, and so does
    an interrupt, with 130.
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
            client.say(NAME, f"{model.model_id} has no chat template{why}; `generate` takes text")
            return 1
        terminal = sys.stdin.isatty()
        if terminal:
            print(f"{model.model_id}. {_HELP}", file=sys.stderr)
        return _talk(stub, talk, terminal, flags)

    return client.run(NAME, flags.target, body, flags.wait)


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
                client.say(NAME, f"there is no {word}. {_HELP}")
            else:
                text = line.strip().removeprefix("/") if word.startswith("//") else line
                if _answer(stub, talk, text, flags) and not terminal:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # between an answer and the next line
            if not terminal:
                raise
        except grpc.RpcError as error:
            client.say(NAME, client.describe(client.failure(error, flags.target)))
            if not terminal:
                return 1
        except UnicodeError:
            client.say(NAME, "a message must be UTF-8")
            if not terminal:
                return 1
    return 0


def _answer(stub: Any, talk: Conversation, text: str, flags: argparse.Namespace) -> bool:
    """Ask, print the answer as it comes, and remember both. An interrupt ends the answer; whether one came."""
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
    """Inside it an interrupt is noted and acted on, and never raised: nothing here or in gRPC is left half done.

    One that comes before it is known what to do is acted on as soon as it is.
    """

    def __init__(self) -> None:
        self.came = False
        self._action: Callable[[], object] | None = None
        self._before: Any = None

    def then(self, action: Callable[[], object]) -> None:
        """What an interrupt does; may be called by each, and at once."""
        self._action = action
        if self.came:
            action()

    def _interrupt(self, number: int, frame: Any) -> None:
        self.came = True
        if self._action is not None:
            self._action()

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():  # no other thread hears of interrupts
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *failed: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _lines(terminal: bool) -> Iterator[str]:
    """Lines as they are typed, to the end of the input. On a terminal an interrupt only forgets the line."""
    if not terminal:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is then found in its message
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then has a line that can be edited, and those before
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
        f"Talk with the model: a line of standard input is a message, the answer goes to standard output. {_HELP}",
    )
    add_system(parser, "the system's message, that the conversation begins with")
    add_flags(parser, MAX_TOKENS)
    parser.add_argument(
        "--stats", action="store_true", help="tell tokens, how many were cached, times and the seed on standard error"
    )
    return parser
