"""Where chat templates and their special tokens are found in a checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.gguf.header import GgufFile
from services.engine.config import BUNDLED_MODEL
from services.engine.model.checkpoint import Checkpoint
from services.engine.text import chat_files
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import Tokenizer
from tests.engine.text.chats import vocabulary

CONFIG: dict[str, Any] = {"chat_template": "of the config", "bos_token": "<s>", "eos_token": {"content": "</s>"}}


def folder(path: Path, config: Any = None, template: str | None = None, older: Any = None) -> Path:
    for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", older)):
        if value is not None:
            (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def gguf(path: Path, **metadata: Any) -> GgufFile:
    keys = {f"tokenizer.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return GgufFile(path / "it.gguf", {"tokenizer.ggml.tokens": ["<s>", "</s>", "a"], **keys}, {})


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert chat_files.of_folder(tmp_path) is None
    assert chat_files.of_folder(folder(tmp_path, {"bos_token": "<s>", "chat_template": None})) is None


def test_the_configuration_s_and_its_tokens(tmp_path: Path) -> None:
    source = chat_files.of_folder(folder(tmp_path, CONFIG | {"pad_token": None}, older={"pad_token": "</s>"}))
    assert source is not None and source.file == str(tmp_path / "tokenizer_config.json")
    assert source.templates == {"default": "of the config"}
    assert source.special == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


def test_the_file_of_its_own_comes_first(tmp_path: Path) -> None:
    source = chat_files.of_folder(folder(tmp_path, CONFIG, "of the file\n"))
    assert source is not None and source.file.endswith("chat_template.jinja")
    assert source.templates == {"default": "of the file\n"} and source.special["bos_token"] == "<s>"


def test_named_ones(tmp_path: Path) -> None:
    named = [{"name": name, "template": name.upper()} for name in ("default", "tool_use", "rag")]
    source = chat_files.of_folder(folder(tmp_path, {"chat_template": named}))
    assert source is not None and source.templates == {"default": "DEFAULT", "tool_use": "TOOL_USE"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 7}, "chat_template is 7: it must be a string, or a list of named templates"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "with one named default"),
        (CONFIG | {"bos_token": 7}, "bos_token is 7: it must be a string, or"),
        ("{", "is not JSON"),
    ],
)
def test_a_folder_with_something_else(tmp_path: Path, config: Any, says: str) -> None:
    with pytest.raises(ModelInvalid, match=says) as caught:
        chat_files.of_folder(folder(tmp_path, config))
    assert "tokenizer_config.json" in caught.value.message


def test_a_template_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelInvalid, match=r"chat_template\.jinja is not UTF-8"):
        chat_files.of_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (chat_files.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ModelInvalid, match=r"chat_template\.jinja is larger than 1048576 bytes"):
        chat_files.of_folder(tmp_path)


def test_a_gguf_file_s(tmp_path: Path) -> None:
    assert chat_files.of_gguf(gguf(tmp_path)) is None
    source = chat_files.of_gguf(
        gguf(tmp_path, chat_template="x", ggml__bos_token_id=0, ggml__eos_token_id=1, ggml__padding_token_id=9)
    )
    assert source is not None and source.templates == {"default": "x"}
    assert source.special == {"bos_token": "<s>", "eos_token": "</s>"}
    unsaid = chat_files.of_gguf(gguf(tmp_path, chat_template="x", ggml__model="llama", ggml__eos_token_id=0))
    assert unsaid is not None and unsaid.special == {"bos_token": "</s>", "eos_token": "<s>"}
    both = chat_files.of_gguf(gguf(tmp_path, chat_template="x", chat_template__tool_use="y"))
    assert both is not None and both.templates == {"default": "x", "tool_use": "y"}
    with pytest.raises(ModelInvalid, match=r"it\.gguf: tokenizer\.chat_template is 7"):
        chat_files.of_gguf(gguf(tmp_path, chat_template=7))


def test_what_lies_beside_a_gguf_file_with_its_tokenizer(tmp_path: Path) -> None:
    folder(tmp_path, template="beside")
    tokenizer = Tokenizer(vocabulary.tokenizer(), 400)

    def chat(**metadata: Any) -> Chat:
        file = gguf(tmp_path, **metadata)
        return Checkpoint(file.path, ModelConfig.from_folder(BUNDLED_MODEL), file).chat(tokenizer)

    def writes(one: Chat) -> str:
        prompt = pb.Messages(items=[pb.Message(role="user", content="x")])
        return asyncio.run(one.read(prompt, 100)).text

    assert not chat(ggml__model="llama").has_template  # what is there is of something else
    tokenizer.inner.save(str(tmp_path / "tokenizer.json"))
    for model in ("llama", "gpt2"):
        assert writes(chat(ggml__model=model)) == "beside"
        assert writes(chat(ggml__model=model, chat_template="within")) == "within"


def test_one_that_does_not_parse_names_its_file(tmp_path: Path) -> None:
    source = chat_files.of_folder(folder(tmp_path, template="\n{% bad %}"))
    with pytest.raises(ModelInvalid, match=r"chat_template\.jinja: the chat template default does not parse: line 2: "):
        Chat.of(source, Tokenizer(vocabulary.tokenizer(), 400))
