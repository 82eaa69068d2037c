"""Builds requests from flags and from JSON fields."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from google.protobuf import duration_pb2

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli import messages

#: name -> the submessage of GenerateRequest that holds the field.
_PLACES = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed"), "sampling"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"), "sampling"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "sampling"),
    **dict.fromkeys(("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop"), "stopping"),
    **dict.fromkeys(("cache_salt", "n", "priority"), ""),
    **dict.fromkeys(("cache_ttl", "cache_priority"), "cache_retention"),
    **dict.fromkeys(("category", "turn", "tool_call_pending", "expected_return"), "reuse_hint"),
}
_LISTS = ("stop", "stop_token_ids")
_SWITCHES = ("ignore_eos", "include_stop", "tool_call_pending")
_MAPS = ("logit_bias",)
_SPANS = ("cache_ttl", "expected_return")
#: Names whose protobuf field is named differently.
_FIELDS = {"cache_ttl": "ttl", "cache_priority": "priority"}
_FLAGS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "priority"),
    *("ignore_eos", "include_stop", "cache_salt", "cache_ttl", "cache_priority"),
    *("category", "turn", "tool_call_pending", "expected_return"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs", "n"),
)
_CHAT_FLAGS = ("chat", "system", "template_arguments")
#: Flags whose text becomes part of the prompt.
_FIELDS_OF = {"--system": "system", "--template-argument": "template_arguments"}
#: The JSON fields that give the prompt.
_PROMPT = ("prompt", *messages.NAMES)


class Unfit(ValueError):
    """A value is invalid for its field; the message names the field."""


def add_flags(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Add the generation flags; ``max_tokens`` is the command's own default."""
    default = "the engine's" if max_tokens is None else max_tokens
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"maximum number of tokens (default: {default})"
    )
    parser.add_argument(
        "--min-tokens", type=int, metavar="N", help="minimum number of tokens before generation may stop (default: 0)"
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="X", help="sample from the likeliest tokens whose probabilities sum to X"
    )
    parser.add_argument(
        "--min-p", type=float, metavar="X", help="drop tokens below X times the top token's probability"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: random)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before TEXT; repeatable")
    # None if the flag is absent, so that a JSON line can set the field.
    parser.add_argument("--include-stop", action="store_const", const=True, help="include the stop text in the output")
    parser.add_argument("--ignore-eos", action="store_const", const=True, help="continue past end-of-sequence")
    parser.add_argument(
        "--cache-salt", metavar="TEXT", help="share cached pages only with requests that have this salt"
    )
    parser.add_argument(
        "--cache-ttl", type=float, metavar="S", help="prefer to keep this request's cached pages for S seconds"
    )
    parser.add_argument(
        "--cache-priority",
        type=int,
        metavar="N",
        help="with --cache-ttl: 1 to 100; lower is evicted first (default: 50)",
    )
    parser.add_argument(
        "--category", metavar="NAME", help="the kind of traffic, from which the daemon learns what comes back"
    )
    parser.add_argument("--turn", type=int, metavar="N", help="the turn of the conversation, from 1")
    parser.add_argument(
        "--tool-call-pending",
        action="store_const",
        const=True,
        help="a tool call is expected, whose result comes as the next turn",
    )
    parser.add_argument(
        "--expected-return", type=float, metavar="S", help="the next turn is expected S seconds from now"
    )
    parser.add_argument("--priority", type=int, metavar="N", help="-100 to 100, higher is scheduled first (default: 0)")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="X > 1 makes tokens that already occurred less likely"
    )
    parser.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtract X from the logits of generated tokens"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="subtract X for each time a token was generated"
    )
    parser.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="add X to a token's logit; repeatable"
    )
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="print each token's logprob and the N likeliest tokens"
    )
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for prompt tokens")


def add_samples(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the number of samples."""
    parser.add_argument("--n", type=int, metavar="N", help="number of samples of the prompt, at most 16 (default: 1)")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        found = int(token), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: expected ID=X, a token's id and a number") from error
    if not 0 <= found[0] < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text}: token id {token} is out of range")
    return found


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the prompt, as positional words."""
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="the prompt's words; - reads standard input")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the flags that turn a prompt into a conversation."""
    parser.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="send a text prompt as a user message through the model's chat template",
    )
    add_system(parser, "prepend a system message; implies --chat, as does --template-argument")


def add_system(parser: argparse.ArgumentParser, help_system: str) -> None:
    """Add the flags common to all conversations."""
    parser.add_argument("--system", metavar="TEXT", help=help_system)
    parser.add_argument(
        "--template-argument",
        action="append",
        dest="template_arguments",
        metavar="NAME=VALUE",
        help="set a variable of the chat template, such as enable_thinking=false; VALUE is JSON, or else a string; "
        "repeatable",
    )


def given(flags: argparse.Namespace) -> dict[str, Any]:
    """The flags of ``add_flags`` and ``add_chat`` that were given, by name. Raises Unfit."""
    found = {name: value for name in (*_FLAGS, *_CHAT_FLAGS) if (value := getattr(flags, name, None)) is not None}
    if "template_arguments" in found:
        try:
            found["template_arguments"] = messages.arguments_of(found["template_arguments"])
        except ValueError as error:
            raise Unfit(f"--template-argument {error}") from error
    return found


def from_flags(flags: argparse.Namespace) -> pb.GenerateRequest:
    """Build the request from flags. Raises Unfit, naming the flag."""
    try:
        prompt = " ".join(flags.prompt) if flags.prompt != ["-"] else sys.stdin.read()
        values = given(flags)
        request = pb.GenerateRequest()
        _put_prompt(request.prompt, {"prompt": prompt, **values})
    except UnicodeError as error:
        also = [flag for flag, field in _FIELDS_OF.items() if getattr(flags, field, None)]
        raise Unfit(f"{' and '.join(['PROMPT', *also])} must be UTF-8") from error
    for name, value in values.items():
        if name in _CHAT_FLAGS:
            continue
        try:
            put(request, name, value)
        except UnicodeError as error:
            raise Unfit(f"--{name.replace('_', '-')} must be UTF-8") from error
        except (TypeError, ValueError) as error:
            raise Unfit(f"--{name.replace('_', '-')} {value}: out of range") from error
    return request


def from_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> pb.GenerateRequest:
    """Build the request from a JSON object with a prompt and any other fields; None counts as absent.

    The prompt is ``prompt``, a string or a list of token ids, or ``messages``. Raises Unfit, naming the field at fault.
    """
    request = pb.GenerateRequest()
    values = {**defaults, **fields}
    for name, value in values.items():
        if name not in _PLACES and name not in ("id", *_PROMPT):
            raise Unfit(f"unknown field {name!r}; expected one of id, {', '.join((*_PROMPT, *_PLACES))}")
        try:
            if name == "id":
                request.request_id = value
            elif name in _PLACES and value is not None:
                put(request, name, value)
        except UnicodeError as error:
            raise Unfit(f"{name} is not valid UTF-8") from error
        except (TypeError, ValueError) as error:
            raise Unfit(f"{name} cannot be {value!r}"[:200]) from error
    said = next((name for name in messages.NAMES if fields.get(name) is not None), None)
    if said is not None and isinstance(fields.get("prompt"), list):
        raise Unfit(f"{said} requires a text prompt or messages, but prompt is a list of token ids")
    try:
        _put_prompt(request.prompt, values)
    except UnicodeError as error:
        raise Unfit(f"{'messages' if 'messages' in values else 'prompt'} is not valid UTF-8") from error
    return request


def _put_prompt(prompt: pb.Prompt, values: Mapping[str, Any]) -> None:
    """Set the prompt, if the values have one. Raises Unfit and UnicodeError."""
    said: Any = values.get("prompt")
    talks = values.get("chat") is not False and any(values.get(name) for name in messages.NAMES)
    try:
        if "messages" in values or (talks and isinstance(said, str)):
            prompt.messages.CopyFrom(messages.of(values))
        elif isinstance(said, list):
            prompt.tokens.ids.extend(said)
        elif "prompt" in values:
            prompt.text = said
    except UnicodeError:
        raise
    except messages.Unheard as error:
        raise Unfit(str(error)) from error
    except (TypeError, ValueError) as error:
        raise Unfit(f"prompt cannot be {said!r}"[:200]) from error


def put(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Set one field of a request. Raises TypeError or ValueError."""
    if isinstance(value, bool) != (name in _SWITCHES):
        raise TypeError(f"{name}: {value}")
    place: Any = getattr(request, _PLACES[name]) if _PLACES[name] else request
    if name in _MAPS:
        pairs = value.items() if isinstance(value, Mapping) else value
        for token, bias in pairs:
            if isinstance(token, bool) or isinstance(bias, bool):
                raise TypeError(f"{name}: {value}")
            getattr(place, name)[int(token)] = bias
    elif name in _LISTS:
        getattr(place, name).extend([value] if isinstance(value, str) else value)
    elif name in _SPANS:
        getattr(place, _FIELDS.get(name, name)).CopyFrom(_span(value))
    else:
        setattr(place, _FIELDS.get(name, name), value)


def span_of(name: str, seconds: float) -> duration_pb2.Duration:
    """The Duration of a flag. Raises Unfit, naming the flag."""
    try:
        return _span(seconds)
    except ValueError as error:
        raise Unfit(f"--{name} {seconds:g}: out of range") from error


def _span(seconds: float) -> duration_pb2.Duration:
    """Raises ValueError."""
    span = duration_pb2.Duration()
    try:
        span.FromNanoseconds(round(seconds * 1e9))
    except OverflowError as error:  # not finite, or beyond what a Duration holds
        raise ValueError(f"{seconds:g} s") from error
    return span
