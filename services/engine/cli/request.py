"""The flags that make a request, and the names that one has in a line of JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb

#: name -> the message of a GenerateRequest that has it.
_PLACES = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed"), "sampling"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"), "sampling"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "sampling"),
    **dict.fromkeys(("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop"), "stopping"),
    **dict.fromkeys(("cache_salt", "n"), ""),
}
_LISTS = ("stop", "stop_token_ids")
_SWITCHES = ("ignore_eos", "include_stop")
_MAPS = ("logit_bias",)
_FLAGS = (
    *("max_tokens", "temperature", "top_k", "top_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs", "n"),
)


class Unfit(ValueError):
    """A value that its field cannot hold; says which."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say how to generate."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens at most (default: the engine's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-k", type=int, metavar="N", help="only the N likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="X", help="only the likeliest tokens that together have X")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: random)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT; repeatable")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="make tokens that are there already less likely by X > 1"
    )
    parser.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtracted from logits of generated tokens"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="the same, for each time one was generated"
    )
    parser.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="add X to a token's logit; repeatable"
    )
    parser.add_argument("--logprobs", type=int, metavar="N", help="tell how likely tokens were, and the N likeliest")
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens")


def add_samples(parser: argparse.ArgumentParser) -> None:
    """How many answers, where there may be several."""
    parser.add_argument("--n", type=int, metavar="N", help="samples of the one prompt (default: 1)")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The prompt, as the words left over."""
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="words of the prompt; - reads standard input")


def given(flags: argparse.Namespace) -> dict[str, Any]:
    """The values of ``add_flags`` that were given, by name."""
    return {name: value for name in _FLAGS if (value := getattr(flags, name, None)) is not None}


def from_flags(flags: argparse.Namespace) -> pb.GenerateRequest:
    """The request that flags make. Raises Unfit, naming the flag."""
    try:
        prompt = " ".join(flags.prompt) if flags.prompt != ["-"] else sys.stdin.read()
        request = pb.GenerateRequest(prompt=pb.Prompt(text=prompt))
    except UnicodeError as error:
        raise Unfit("PROMPT and --stop must be UTF-8") from error
    for name, value in given(flags).items():
        try:
            put(request, name, value)
        except UnicodeError as error:
            raise Unfit("PROMPT and --stop must be UTF-8") from error
        except (TypeError, ValueError) as error:
            raise Unfit(f"--{name.replace('_', '-')} {value}: out of range") from error
    return request


def from_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> pb.GenerateRequest:
    """The request of an object with ``prompt``, text or a list of token ids, and any of the other names.

    Raises Unfit, naming what is at fault.
    """
    request = pb.GenerateRequest()
    for name, value in {**defaults, **fields}.items():
        if name not in _PLACES and name not in ("id", "prompt"):
            raise Unfit(f"there is no {name!r}; there are id, prompt, {', '.join(_PLACES)}")
        try:
            if name == "id":
                request.request_id = value
            elif name == "prompt" and isinstance(value, list):
                request.prompt.tokens.ids.extend(value)
            elif name == "prompt":
                request.prompt.text = value
            else:
                put(request, name, value)
        except UnicodeError as error:
            raise Unfit(f"{name} is not UTF-8") from error
        except (TypeError, ValueError) as error:
            raise Unfit(f"{name} cannot be {value!r}"[:200]) from error
    return request


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
    else:
        setattr(place, name, value)
