"""The flags of a terminal: each is the field of its name, and what is not said is not set."""

from __future__ import annotations

import argparse
import math

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli.request_flags import (
    Unfit,
    add_chat,
    add_flags,
    add_prompt,
    add_samples,
    from_fields,
    from_flags,
    given,
)

EVERYTHING = {
    "--max-tokens 9": "stopping.max_tokens",
    "--min-tokens 2": "stopping.min_tokens",
    "--stop END": "stopping.stop",
    "--include-stop": "stopping.include_stop",
    "--ignore-eos": "stopping.ignore_eos",
    "--temperature 0.5": "sampling.temperature",
    "--top-k 7": "sampling.top_k",
    "--top-p 0.25": "sampling.top_p",
    "--min-p 0.125": "sampling.min_p",
    "--seed 3": "sampling.seed",
    "--repetition-penalty 1.5": "sampling.repetition_penalty",
    "--presence-penalty 0.5": "sampling.presence_penalty",
    "--frequency-penalty 0.25": "sampling.frequency_penalty",
    "--logit-bias 5=-2": "sampling.logit_bias",
    "--logprobs 0": "sampling.logprobs",
    "--prompt-logprobs 1": "sampling.prompt_logprobs",
    "--cache-salt mine": "cache_salt",
    "--cache-ttl 600": "cache_retention.ttl",
    "--cache-priority 9": "cache_retention.priority",
    "--category agent": "reuse_hint.category",
    "--turn 3": "reuse_hint.turn",
    "--tool-call-pending": "reuse_hint.tool_call_pending",
    "--expected-return 2.5": "reuse_hint.expected_return",
    "--priority -4": "priority",
    "--n 2": "n",
}


def parsed(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_prompt(parser)
    add_flags(parser)
    add_chat(parser)
    add_samples(parser)
    return parser.parse_args([*words.split(), "Hi"])


def paths(message: pb.GenerateRequest) -> set[str]:
    """The fields that are set, by path, but for the prompt."""
    found = set()
    for field, value in message.ListFields():
        if field.name in ("sampling", "stopping", "cache_retention", "reuse_hint"):
            found |= {f"{field.name}.{inner.name}" for inner, _ in value.ListFields()}
        elif field.name != "prompt":
            found.add(field.name)
    return found


@pytest.mark.parametrize(("words", "path"), EVERYTHING.items())
def test_a_flag_sets_its_field_and_no_other(words: str, path: str) -> None:
    request = from_flags(parsed(words))
    assert paths(request) == {path} and request.prompt.text == "Hi"
    value: object = request
    for name in path.split("."):
        value = getattr(value, name)
    said = words.partition(" ")[2]
    if isinstance(value, str | bool | int | float):
        assert str(value) == (said or "True")


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300, True, "1"])
def test_spans_that_no_field_holds(seconds: object) -> None:
    with pytest.raises(Unfit, match="cache_ttl cannot be"):
        from_fields({"prompt": "Hi", "cache_ttl": seconds}, {})
    if isinstance(seconds, float):
        with pytest.raises(Unfit, match=r"--cache-ttl .*: out of range"):
            from_flags(parsed(f"--cache-ttl {seconds}"))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("5", "5: expected ID=X"),
        ("x=1", "x=1: expected ID=X"),
        ("5=", "5=: expected ID=X"),
        ("-1=1", "token id -1"),
        ("4294967296=1", "token id 4294967296"),
    ],
)
def test_a_bias_that_is_none(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        parsed(f"--logit-bias={word}")
    assert f"argument --logit-bias: {word}: " in (shown := capsys.readouterr().err) and says in shown


def test_null_takes_a_default_back() -> None:
    """Of a batch that asks for a retention, a line that asks for what none goes with."""
    defaults = given(parsed("--cache-ttl 60 --cache-priority 9 --max-tokens 4"))
    line = {"prompt": "Hi", "prompt_logprobs": 0, "cache_ttl": None, "cache_priority": None, "stop": None}
    assert paths(from_fields(line, defaults)) == {"sampling.prompt_logprobs", "stopping.max_tokens"}
    assert paths(from_fields({"prompt": "Hi", "cache_priority": None}, defaults)) >= {"cache_retention.ttl"}
    for name in ("prompt", "id", "bogus"):
        with pytest.raises(Unfit, match=name):
            from_fields({"prompt": "Hi", name: None}, defaults)


def test_a_span_is_told_to_the_nanosecond() -> None:
    assert from_flags(parsed("--cache-ttl 1.000000001")).cache_retention.ttl.ToNanoseconds() == 1_000_000_001


def test_every_flag_is_in_the_table_and_may_be_a_default_of_lines() -> None:
    words = " ".join(EVERYTHING)
    assert paths(from_flags(parsed(words))) == set(EVERYTHING.values())
    assert paths(from_fields({"prompt": "Hi"}, given(parsed(words)))) == set(EVERYTHING.values())
    assert set(vars(parsed(""))) == {word.split()[0][2:].replace("-", "_") for word in EVERYTHING} | {
        *("prompt", "chat", "system", "template_arguments")
    }
    assert paths(from_flags(parsed(""))) == set()
    assert not from_fields({"prompt": "Hi", "ignore_eos": False}, given(parsed("--ignore-eos"))).stopping.ignore_eos
