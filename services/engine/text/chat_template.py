"""A model's chat template: messages to text, as Hugging Face's ``apply_chat_template`` writes them.

A template is a Jinja program that came with the model. It runs in Jinja's sandbox, in the environment that
``transformers`` gives it (``utils/chat_template_utils.py``), and what it may do is bounded: see `ChatTemplate.render`.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from services.common.errors import FieldInvalid, PromptTooLong
from services.engine.text.special_tokens import GUARD

#: Turns of loops and calls of macros that a rendering may take, all of them together: so many, and so many more for
#: each character of the messages, since there are templates that go through these one by one.
MAX_STEPS = 200_000
STEPS_A_CHARACTER = 4
_LOOKS = 256  # steps between two looks at the clock
MAX_SECONDS = 10.0
#: Bits of a whole number.
MAX_BITS = 4096

#: Marks the end of a message that is to be continued. The space goes when the template trims the message.
_OPEN_END = "\ufdd2"
_OPEN_TAG = f"{_OPEN_END} "


class TemplateUnfit(ValueError):
    """A template that cannot be used; says why."""


class _Refused(jinja2.TemplateError):
    """The template's own ``raise_exception``."""


class _Spent(Exception):
    """A rendering went beyond a bound; says which."""


class _TooLong(_Spent):
    """It was that of the text."""


@dataclass(slots=True)
class _Budget:
    """What is left of a rendering's bounds. Sizes are in characters, or in items of a list."""

    size: int
    clock: Callable[[], float]
    ends_at: float
    most_steps: int
    steps: int = 0
    captured: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.most_steps:
            raise _Spent(f"it takes more than {self.most_steps} steps")
        if self.steps % _LOOKS == 1 and self.clock() > self.ends_at:
            raise _Spent(f"it takes longer than {MAX_SECONDS:g} s")

    def hold(self, size: int) -> None:
        if size > self.size:
            raise _TooLong(f"it makes more than {self.size} characters")

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and value > max(self.size, MAX_RANGE):
                raise _Spent(f"it calls something with the number {value}")


_budget: ContextVar[_Budget] = ContextVar("budget")


class _Generator(CodeGenerator):
    """Has ``~`` go through the environment, as the operators that Jinja itself can intercept do."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's words for training: what is within counts as it stands."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a count of what is done in it."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            node.body.insert(0, nodes.ExprStmt(_step(), lineno=node.lineno))  # type: ignore[attr-defined]
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(_step(), node.test)
        tree.set_environment(self)
        return tree

    @property
    def step(self) -> bool:
        """One more turn of a loop, or call of a macro; not a call itself, of which the sandbox makes much."""
        _budget.get().step()
        return True

    @staticmethod
    def joined(parts: tuple[Any, ...]) -> str:
        """What ``~`` makes."""
        texts = [str(part) for part in parts]
        _budget.get().hold(sum(map(len, texts)))
        return str_join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What the intercepted operators make, if it is of a sensible size."""
        budget = _budget.get()
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.hold(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int):
                    budget.hold(len(many) * times)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise _Spent(f"it makes a number of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call, if it asks for nothing of a senseless size."""
        budget = _budget.get()
        budget.take(args, kwargs)
        made = super().call(context, callee, *args, **kwargs)
        if isinstance(made, str):
            budget.hold(len(made))
        return made


def _step() -> nodes.Expr:
    return nodes.EnvironmentAttribute("step")


def _finalized(value: Any) -> Any:
    """Count what is written, be it into a variable."""
    if isinstance(value, str) and (budget := _budget.get(None)) is not None:
        budget.captured += len(value)
        if budget.captured > 16 * budget.size:
            raise _TooLong(f"it writes more than {16 * budget.size} characters")
    return value


def _check_widths(form: str) -> None:
    if re.search(r"\*|[0-9]{5}", form):
        raise _Spent("it formats with a width of more than 9999")


def _format(value: str, *args: Any, **kwargs: Any) -> Any:
    _check_widths(value)
    return value % (kwargs or args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that is not escaped for HTML, unlike Jinja's own."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # all but the guard, which would stay behind in the text
        text = re.sub(rf"[^\x00-\x7f{GUARD}]+", lambda match: json.dumps(match[0])[1:-1], text)
    return text


#: Filters that make much of a small value.
_SIZED = ("batch", "center", "indent", "join", "replace", "slice", "tojson", "wordwrap")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no senseless number and makes no senseless text."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get(None)
        if budget is None:
            raise nodes.Impossible  # it is constant, and is done when it is rendered
        budget.take(args, kwargs)
        made = function(*args, **kwargs)
        if isinstance(made, str):
            budget.hold(len(made))
        return made

    return bounded


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _environment(today: Callable[[], datetime]) -> _Environment:
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, LoopControlExtension],
        finalize=_finalized,
    )
    made.filters["tojson"] = _tojson
    made.filters["format"] = _format
    for name in _SIZED:
        made.filters[name] = _bounded(made.filters[name])
    del made.globals["lipsum"]  # paragraphs at random
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: today().strftime(form[:100])
    return made


class ChatTemplate:
    """A template that parses. Never changed, so any thread may render it.

    ``special`` are the names of special tokens and their texts (``bos_token``: ``<s>``), which a template may use.
    ``clock`` is monotonic, in seconds; ``today`` is the time of day that a template can ask for.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises TemplateUnfit when ``source`` does not parse."""
        self._special = dict(special)
        self._clock = clock
        try:
            self._template = _environment(today).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateUnfit(f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # compiling runs what is constant in it
            raise TemplateUnfit(f"{type(error).__name__}: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        size: int,
        tools: list[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Write messages (objects with ``role``, ``content`` and what else there is of each) as text.

        It ends after MAX_STEPS and some turns of loops and calls of macros, after MAX_SECONDS, and when the text, or
        what one operator or call makes, is longer than ``size`` characters. It may take as long as that: no event
        loop's work.

        Raises PromptTooLong when the text is too long, and FieldInvalid when the template refuses the messages, fails,
        or goes beyond another bound. Both name the field ``messages``.
        """
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": f"{last['content']}{_OPEN_TAG}"}]
        names = {
            **self._special,
            "documents": None,
            **(arguments or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        steps = MAX_STEPS + STEPS_A_CHARACTER * sum(len(message["content"]) for message in messages)
        token = _budget.set(_Budget(size, self._clock, self._clock() + MAX_SECONDS, steps))
        try:
            text = _limited(self._template.generate(names), size)
        except _TooLong as spent:
            raise PromptTooLong(
                f"the chat template's text of messages is too long: {spent}", field="messages", limit=size
            ) from None
        except _Spent as spent:
            raise FieldInvalid(f"the chat template does not come to an end: {spent}", field="messages") from None
        except _Refused as refused:
            told = str(refused).replace(GUARD, "")[:500]
            raise FieldInvalid(f"the chat template refuses messages: {told}", field="messages") from None
        except Exception as error:
            told = f"{type(error).__name__}: {error}".replace(GUARD, "")[:500]
            raise FieldInvalid(f"the chat template fails on messages: {told}", field="messages") from None
        finally:
            _budget.reset(token)
        return _left_open(text) if continue_final_message else text


def _limited(pieces: Iterable[str], size: int) -> str:
    taken, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > size:
            raise _TooLong(f"it has more than {size} characters")
        taken.append(piece)
    text = "".join(taken)
    text.encode()  # a lone surrogate is no text
    return text


def _left_open(text: str) -> str:
    """The text up to the end of the final message, which is trimmed if the template trims it."""
    end = text.rfind(_OPEN_END)
    if end < 0:
        raise FieldInvalid(
            "the chat template does not write the final message, which was to be continued", field="messages"
        )
    before = text[:end] if text.startswith(_OPEN_TAG, end) else text[:end].rstrip()
    return before.replace(_OPEN_TAG, "").replace(_OPEN_END, "")  # a template may write a message more than once
