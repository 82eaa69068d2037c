"""A model that is not there: the error says what is found in its place, and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import ModelInvalid
from services.engine.model.checkpoint import Checkpoint
from services.engine.text import chat_files
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.gguf_files import write_gguf

BUNDLED = Path(__file__).parents[3] / "models/shakespeare"
CONFIG = llama_config(vocab=1024)

POINTER = (
    b"version https://git-lfs.example/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 988097824\n"
)
PAGES = [
    b"<!doctype html>\n<html><head><title>Sign in</title>",
    b"\xef\xbb\xbf\n  <!DOCTYPE HTML PUBLIC>" + b" " * 5000,
    b"<html>\n",
]
FILES: dict[str, Callable[[Checkpoint], object]] = {
    "config.json": lambda checkpoint: None,
    "generation_config.json": lambda checkpoint: None,
    "tokenizer.json": Checkpoint.tokenizer,
    "model.safetensors": Checkpoint.weights,
    "model-00001-of-00002.safetensors": Checkpoint.weights,
    "model.safetensors.index.json": Checkpoint.weights,
    "chat_template.jinja": lambda checkpoint: chat_files.of_folder(checkpoint.path),
    "tokenizer_config.json": lambda checkpoint: chat_files.of_folder(checkpoint.path),
}


@pytest.fixture
def folder(tmp_path: Path, file: str) -> Path:
    """A valid model, in several files if its tensors say so."""
    shards = 2 if "model-" in file or "index" in file else 1
    folder = write_checkpoint(tmp_path / "model", CONFIG, random_tensors(CONFIG), shards=shards)
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    FILES[file](Checkpoint.open(folder))
    return folder


def message(file: str, folder: Path) -> str:
    with pytest.raises(ModelInvalid) as caught:
        FILES[file](Checkpoint.open(folder))
    return caught.value.message


@pytest.mark.parametrize("file", FILES)
def test_a_git_lfs_pointer(file: str, folder: Path) -> None:
    (folder / file).write_bytes(POINTER)
    assert message(file, folder) == (
        f"{folder / file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder, or "
        "download the file separately"
    )


@pytest.mark.parametrize("page", PAGES, ids=range(len(PAGES)))
@pytest.mark.parametrize("file", FILES)
def test_an_html_page(file: str, folder: Path, page: bytes) -> None:
    (folder / file).write_bytes(page)
    found = message(file, folder)
    assert found.startswith(f"{folder / file} is an HTML page: ") and "`hf download`" in found and "/resolve/" in found


@pytest.mark.parametrize(("content", "said"), [(POINTER, "is a git-lfs pointer"), (PAGES[0], "is an HTML page")])
@pytest.mark.parametrize("name", ["it.gguf", "it-00002-of-00002.gguf"])
def test_in_the_place_of_a_gguf_file(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    first = tmp_path / name.replace("00002-of", "00001-of")
    split = {"split.count": 2, "split.no": 0} if first.name != name else {}
    write_gguf(first, CONFIG, random_tensors(CONFIG), metadata=split)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelInvalid, match=said) as caught:
        Checkpoint.open(first)
    assert caught.value.message.startswith(str(tmp_path / name))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b"])
def test_the_name_of_a_model_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelInvalid) as caught:
        Checkpoint.open(name)
    folder = name.split("/")[1]
    assert caught.value.message == (
        f"--model {name}: there is no such folder or file, and models are not downloaded automatically; for a "
        f"model on the Hugging Face Hub, run `hf download {name} --local-dir {folder}` and give --model {folder}"
    )
    (tmp_path / folder).mkdir()  # and --model is that from then on, not the name
    with pytest.raises(ModelInvalid, match=r"config\.json cannot be read"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["models/mine", "mine", "./a/b/c", "a/b.gguf", "~/b", "/usr/b", "a/b c"])
def test_a_path_is_no_name_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelInvalid) as caught:
        Checkpoint.open(name)
    assert caught.value.message == f"--model {Path(name)}: there is no such folder or file"


def test_one_file_of_a_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG))
    with pytest.raises(
        ModelInvalid, match=r"model\.safetensors is not GGUF: give a GGUF file, or the folder of a model"
    ):
        Checkpoint.open(folder / "model.safetensors")


def test_a_key_that_is_absent_is_not_called_null(tmp_path: Path) -> None:
    for value, said in (({}, "is missing: it must"), ({"vocab_size": None}, "is null: it must")):
        config = {key: of for key, of in CONFIG.items() if key != "vocab_size"} | value
        write_checkpoint(tmp_path, config, {})
        with pytest.raises(ModelInvalid, match=rf"config\.json: vocab_size {said}"):
            Checkpoint.open(tmp_path)
