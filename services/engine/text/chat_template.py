"""Renders a model's chat template: messages to text, like Hugging Face's ``apply_chat_template``.

A template is a Jinja program that ships with the model. It runs in Jinja's sandbox, in the environment that
``transformers`` provides (``utils/chat_template_utils.py``), within resource limits: see `ChatTemplate.render`.
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

#: Most loop iterations and macro calls in a rendering: a base, plus an allowance per character of the messages, because
#: some templates iterate over characters.
MAX_STEPS = 200_000
STEPS_A_CHARACTER = 4
_LOOKS = 256  # steps between clock checks
MAX_SECONDS = 10.0
#: Most bits of an integer.
MAX_BITS = 4096

#: Marks the end of the message to continue. If the template trims the message, the space disappears.
_OPEN_END = "\ufdd2"
_OPEN_TAG = f"{_OPEN_END} "


class TemplateUnfit(ValueError):
    """The template cannot be used; the message says why."""


class _Refused(jinja2.TemplateError):
    """The template's own ``raise_exception``."""


class _Spent(Exception):
    """A rendering exceeded a limit; the message says which."""


class _TooLong(_Spent):
    """The text exceeded its limit."""


@dataclass(slots=True)
class _Budget:
    """The limits and counters of a rendering. Sizes are in characters, or in list items."""

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
            raise _TooLong(f"it builds more than {self.size} characters")

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and value > max(self.size, MAX_RANGE):
                raise _Spent(f"it calls something with the number {value}")


_budget: ContextVar[_Budget] = ContextVar("budget")


class _Generator(CodeGenerator):
    """Routes ``~`` through the environment, like the operators that Jinja itself can intercept."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """``{% generation %}``, which marks assistant text for training: its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with accounting."""

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
        """Counts a loop iteration or macro call. A property, because the sandbox makes calls expensive."""
        _budget.get().step()
        return True

    @staticmethod
    def joined(parts: tuple[Any, ...]) -> str:
        """Evaluates ``~``."""
        texts = [str(part) for part in parts]
        _budget.get().hold(sum(map(len, texts)))
        return str_join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluates an intercepted operator if its result is within the limits."""
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
                raise _Spent(f"it computes a number of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call if its arguments and result are within the limits."""
        budget = _budget.get()
        budget.take(args, kwargs)
        made = super().call(context, callee, *args, **kwargs)
        if isinstance(made, str):
            budget.hold(len(made))
        return made


def _step() -> nodes.Expr:
    return nodes.EnvironmentAttribute("step")


def _finalized(value: Any) -> Any:
    """Counts all output, including output captured in a variable."""
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
    """Like Jinja's ``tojson``, without HTML escaping."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # except the guard, which must stay removable
        text = re.sub(rf"[^\x00-\x7f{GUARD}]+", lambda match: json.dumps(match[0])[1:-1], text)
    return text


#: Filters whose output can be much larger than their input.
_SIZED = ("batch", "center", "indent", "join", "replace", "slice", "tojson", "wordwrap")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter with limits on its arguments and its result."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get(None)
        if budget is None:
            raise nodes.Impossible  # defer constant folding to the rendering
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
    del made.globals["lipsum"]  # random text
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: today().strftime(form[:100])
    return made


class ChatTemplate:
    """A parsed template. Immutable, so thread-safe.

    ``special`` maps names of special tokens to their texts (``bos_token``: ``<s>``), as template variables. ``clock``
    is monotonic, in seconds; ``today`` returns the date and time for ``strftime_now``.
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
        except Exception as error:  # compiling evaluates constant expressions
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
        """Render messages (objects with ``role``, ``content`` and any other keys) to text.

        Limits: MAX_STEPS loop iterations and macro calls plus STEPS_A_CHARACTER per character, MAX_SECONDS, and
        ``size`` characters for the text and for the result of any operator or call. It may block for that long, so do
        not call it on the event loop.

        Raises PromptTooLong when the text is too long, and FieldInvalid when the template rejects the messages, fails,
        or exceeds another limit. Both name the field ``messages``.
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
                f"the text rendered by the chat template is too long: {spent}", field="messages", limit=size
            ) from None
        except _Spent as spent:
            raise FieldInvalid(f"the chat template exceeds a limit: {spent}", field="messages") from None
        except _Refused as refused:
            reason = str(refused).replace(GUARD, "")[:500]
            raise FieldInvalid(f"the chat template rejects messages: {reason}", field="messages") from None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".replace(GUARD, "")[:500]
            raise FieldInvalid(f"the chat template fails on messages: {reason}", field="messages") from None
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
    text.encode()  # raises for a lone surrogate
    return text


def _left_open(text: str) -> str:
    """Returns the text up to the end of the final message, trimmed if the template trims it."""
    end = text.rfind(_OPEN_END)
    if end < 0:
        raise FieldInvalid(
            "the chat template does not render the final message, which cannot be continued", field="messages"
        )
    before = text[:end] if text.startswith(_OPEN_TAG, end) else text[:end].rstrip()
    return before.replace(_OPEN_TAG, "").replace(_OPEN_END, "")  # a template may write a message more than once
