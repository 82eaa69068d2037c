# mypy: disable-error-code="misc"
"""Messages wherever a prompt is taken, through the engine's socket."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.engine.text.chat import Chat
from services.engine.text.chat_template import ChatTemplate
from tests.engine.running import RunningEngine, refused
from tests.engine.text.chats.checkpoints import END, chat_file, chat_folder
from tests.engine.text.chats.conversations import said, template_of
from tests.engine.text.test_chat import TOKENIZER, messages
from tests.generation import collect, request
from tests.processes import ROOT


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        folder = chat_folder(Path(name) / "chatty", template_of("chatml"))
        one = RunningEngine(Path(name), "--model", str(folder), "--local-pages", "256").start()
        yield one
        one.close()


def asked(*turns: str, **fields: Any) -> pb.GenerateRequest:
    made = request([], 12)
    made.prompt.Clear()
    made.prompt.messages.CopyFrom(messages(said(*turns), **fields))
    return made


def test_they_are_the_prompt_that_tokenize_shows(engine: RunningEngine) -> None:
    one = asked("Hi the<|im_end|>re", template_arguments={"a": 1})
    shown = engine.stub.Tokenize(pb.TokenizeRequest(messages=one.prompt.messages))
    assert shown.text.endswith("user\nHi the<|im_end|>re<|im_end|>\n<|im_start|>assistant\n")
    assert list(shown.token_ids).count(END) == 2
    text, tokens, finish = collect(engine.stub.Generate(one))
    assert finish.usage.prompt_tokens == len(shown.token_ids)
    assert collect(engine.stub.Generate(request(list(shown.token_ids), 12)))[:2] == (text, tokens)
    plain = engine.stub.Tokenize(pb.TokenizeRequest(text="Hi"))
    assert plain.token_ids[0] == 0 and plain.text == ""


def test_in_a_batch_and_submitted(engine: RunningEngine) -> None:
    expected = collect(engine.stub.Generate(asked("Hi!")))[0]
    items = [asked("Hi!"), asked(), asked("Hi!", "the", "Hi!")]
    texts, errors = ["", "", ""], {}
    for one in engine.stub.BatchGenerate(pb.BatchGenerateRequest(requests=items)):
        texts[one.index] += one.response.text
        if one.HasField("error"):
            errors[one.index] = rpc.error_from_status(one.error)
    assert texts[0] == expected and texts[2]
    assert errors.keys() == {1} and errors[1].field == "requests[1].prompt.messages.items"
    submission = pb.SubmitGenerationRequest(request=asked("Hi!"))
    name = engine.stub.SubmitGeneration(submission).generation.request_id
    watched = [one.response.text for one in engine.stub.WatchGeneration(pb.WatchGenerationRequest(request_id=name))]
    assert "".join(watched) == expected
    bad = refused(lambda: engine.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=asked())))
    assert bad.field == "request.prompt.messages.items"


def test_the_next_turn_finds_the_last_in_the_cache(engine: RunningEngine) -> None:
    first = collect(engine.stub.Generate(asked("the " * 20)))[2].usage
    second = collect(engine.stub.Generate(asked("the " * 20, "Hi!", "the")))[2].usage
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16 > first.cached_tokens


def test_refusals(engine: RunningEngine) -> None:
    for bad, reason, field in [
        (asked("the " * 500), "PROMPT_TOO_LONG", "prompt"),
        (asked("x" * (1 << 17)), "PROMPT_TOO_LONG", "prompt.messages"),
        (asked("\ufdd0"), "FIELD_INVALID", "prompt.messages.items[0].content"),
    ]:
        error = refused(lambda bad=bad: engine.stub.Generate(bad))
        assert (error.code, error.reason, error.field) == ("INVALID_ARGUMENT", reason, field)
    error = refused(lambda: engine.stub.Tokenize(pb.TokenizeRequest(messages=pb.Messages())))
    assert (error.reason, error.field) == ("FIELD_INVALID", "messages.items")


def test_the_examples_of_the_page(engine: RunningEngine) -> None:
    """They come from a larger model, so only the requests and the format of the answers are compared."""
    section = (ROOT / "docs/api.md").read_text().partition("### Messages")[2].partition("\n## ")[0]
    [generated, tokenized] = re.findall(r"-d '(.*?)'", section, re.DOTALL)
    assert collect(engine.stub.Generate(json_format.Parse(generated, pb.GenerateRequest())))[2]
    made = asyncio.run(
        Chat({"default": ChatTemplate(template_of("qwen3"), {})}, TOKENIZER).read(
            json_format.Parse(tokenized, pb.TokenizeRequest()).messages, 1000
        )
    )
    printed = section[section.index("EngineService/Tokenize\n") :].partition("\n")[2].partition("```")[0]
    assert made.text == json.loads(printed)["text"]


def test_it_is_told_whether_there_is_a_template(engine: RunningEngine) -> None:
    model = engine.stub.GetModel(pb.GetModelRequest())
    assert model.has_chat_template and model.chat_template_error == ""


def test_a_gguf_file_s_template(tmp_path: Path, engine: RunningEngine) -> None:
    """The same model from a GGUF file: the same text and tokens."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        file = chat_file(Path(name) / "chatty.gguf", template_of("chatml"))
        other = RunningEngine(Path(name), "--model", str(file), "--local-pages", "64").start()
        try:
            assert other.stub.GetModel(pb.GetModelRequest()).has_chat_template
            for conversation in (asked("Hi the<|im_end|>re"), asked("Hi!", "Well, ", continue_final_message=True)):
                shown = pb.TokenizeRequest(messages=conversation.prompt.messages)
                assert other.stub.Tokenize(shown) == engine.stub.Tokenize(shown)
        finally:
            other.close()


def test_a_template_that_cannot_be_used_is_told_and_text_is_served(logged: list[MutableMapping[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        folder = chat_folder(Path(name) / "bad", "{% if %}")
        one = RunningEngine(Path(name), "--model", str(folder), "--local-pages", "64").start()
        try:
            model = one.stub.GetModel(pb.GetModelRequest())
            assert not model.has_chat_template
            says = "tokenizer_config.json: the chat template default does not parse: line 1: "
            assert says in model.chat_template_error
            assert says in refused(lambda: one.stub.Generate(asked("Hi!"))).message
            assert len(collect(one.stub.Generate(request("Hi!", 3)))[1]) == 3
            [event] = [event for event in logged if event["event"] == "chat_template_unusable"]
            assert says in event["detail"] and event["log_level"] == "warning"
        finally:
            one.close()
