"""Sampling settings in a model's files are served, known to have no effect, or warned about: none is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.errors import ModelInvalid
from services.engine.checkpoint import sampling_defaults
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.sampling_defaults import GGUF_SERVED, INERT, NEUTRAL, SERVED
from services.engine.model.checkpoint import Checkpoint
from services.engine.sampling.params import validate
from tests.engine.checkpoint.test_config import read, write
from tests.models.checkpoints import llama_config, random_tensors
from tests.models.generationfields import FIELDS, TAKEN
from tests.models.gguf_files import write_gguf

#: A field -> what of the configuration it is, with the value in `FIELDS`.
HONOURED: dict[str, tuple[str, Any]] = {
    "temperature": ("default_temperature", 0.6),
    "top_k": ("default_top_k", 20),
    "top_p": ("default_top_p", 0.95),
    "min_p": ("default_min_p", 0.05),
    "repetition_penalty": ("default_repetition_penalty", 1.1),
    "suppress_tokens": ("suppressed_tokens", (7, 8)),
    "begin_suppress_tokens": ("begin_suppressed_tokens", (9,)),
    "eos_token_id": ("eos_token_ids", (2, 3)),
    "bos_token_id": ("bos_token_id", 1),
}


def warned(path: Path) -> dict[str, str]:
    """The warnings of opening a model: field -> value."""
    with capture_logs() as logs:
        Checkpoint.open(path)
    assert all(entry["log_level"] == "warning" and entry["model"] == str(path) for entry in logs)
    found = {entry["field"]: entry["value"] for entry in logs if entry["event"] == "sampling_setting_not_served"}
    assert len(found) == len(logs)
    return found


def test_each_field_is_of_one_kind() -> None:
    kinds = [SERVED, INERT, set(NEUTRAL)]
    assert {field: sum(field in kind for kind in kinds) for field in FIELDS} == dict.fromkeys(FIELDS, 1)
    assert {*HONOURED, "do_sample"} == SERVED


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_honoured_or_inert_or_warned_of(tmp_path: Path, field: str) -> None:
    folder = write(tmp_path, {field: FIELDS[field]})
    told = warned(folder)
    if field in NEUTRAL:
        assert list(told) == [field] and told[field]
        assert not warned(write(tmp_path, {field: None}))
        assert not warned(write(tmp_path, {field: TAKEN.get(field)}))
        for neutral in NEUTRAL[field]:
            assert not warned(write(tmp_path, {field: neutral}))
        return
    assert not told
    config, plain = read(tmp_path, {field: FIELDS[field]}), read(tmp_path, {})
    if field in HONOURED:
        name, value = HONOURED[field]
        assert getattr(config, name) == value != getattr(plain, name)
    else:
        assert config == plain


@pytest.mark.parametrize("field", FIELDS)
def test_an_older_folder_has_the_fields_in_its_config(tmp_path: Path, field: str) -> None:
    """Where there is no generation_config.json; where there is one, config.json's are ignored."""
    (older := tmp_path / "older").mkdir()
    folder = write(older, None, **{field: FIELDS[field]})
    newer = write(tmp_path, {"eos_token_id": 0, field: FIELDS[field]})
    assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(newer)
    assert warned(folder) == warned(newer)
    if field not in ("eos_token_id", "bos_token_id"):
        write(older, {}, **{field: FIELDS[field]})
        assert ModelConfig.from_folder(folder) == read(older, {}) and not warned(folder)


def test_what_else_a_config_has_is_no_sampling_setting(tmp_path: Path) -> None:
    folder = write(tmp_path, None, do_sample=False, temperature=0.9, top_q=0.3, num_beams=1, torchscript=False)
    assert not warned(folder)
    assert ModelConfig.from_folder(folder).default_temperature == 0
    with pytest.raises(ModelInvalid, match=r"\bconfig\.json: min_p is 1: it must be less than 1"):
        read(tmp_path, min_p=1)


def test_a_field_that_nobody_knows_is_warned_of(tmp_path: Path) -> None:
    folder = write(tmp_path, {"top_q": 0.3, "words": "x" * 500, "nothing": None})
    assert warned(folder) == {"top_q": "0.3", "words": ('"' + "x" * 500)[:100]}


def test_the_values_of_a_file_are_a_requests_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, {"min_p": 0.05, "suppress_tokens": [7, 8], "begin_suppress_tokens": [9]})
    drawn = validate(None, None, None, None, 1, config)
    assert drawn.min_p == 0.05
    assert (set(drawn.suppressed), set(drawn.begin_suppressed)) == ({7, 8}, {7, 8, 9})
    assert validate(None, None, None, 0.0, 1, config).min_p == 0
    assert validate(None, None, None, 0.5, 1, config).min_p == 0.5
    assert validate(None, None, None, None, 1, read(tmp_path, {})).min_p == 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("min_p", -0.1, "a number from 0 to 1"),
        ("min_p", 1, "less than 1"),
        ("min_p", "low", "a number from 0 to 1"),
        ("suppress_tokens", [128], "token ids from 0 to 127"),
        ("begin_suppress_tokens", ["a"], "token ids from 0 to 127"),
    ],
)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, field: str, value: Any, said: str) -> None:
    with pytest.raises(ModelInvalid, match=rf"generation_config\.json: {field} is .*{said}"):
        read(tmp_path, {field: value})


def gguf(folder: Path, **sampling: Any) -> Path:
    config = llama_config()
    metadata = {f"general.sampling.{name}": value for name, value in sampling.items()}
    write_gguf(folder / "it.gguf", config, random_tensors(config), metadata=metadata)
    return folder / "it.gguf"


def test_a_gguf_files_sampling(tmp_path: Path) -> None:
    file = gguf(tmp_path, temp=0.5, top_k=20, top_p=0.75, min_p=0.125, penalty_repeat=1.25)
    assert not warned(file)
    config = Checkpoint.open(file).config
    assert (config.default_temperature, config.default_top_k, config.default_top_p) == (0.5, 20, 0.75)
    assert (config.default_min_p, config.default_repetition_penalty) == (0.125, 1.25)
    assert len(GGUF_SERVED) == 5
    with pytest.raises(ModelInvalid, match=r"general\.sampling\.min_p is 1\.0: it must be less than 1"):
        Checkpoint.open(gguf(tmp_path, min_p=1.0))


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"xtc_probability": 0.5, "xtc_threshold": 0.125}, {"xtc_probability": "0.5"}),
        ({"xtc_probability": 0.0, "xtc_threshold": 0.125}, {}),
        ({"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.125}, {"mirostat": "2"}),
        ({"mirostat": 0}, {}),
        ({"penalty_last_n": 64}, {}),
        ({"penalty_last_n": 64, "penalty_repeat": 1.25}, {"penalty_last_n": "64"}),
        ({"sequence": "kpt"}, {"sequence": '"kpt"'}),
        ({"anything_new": 3}, {"anything_new": "3"}),
    ],
)
def test_what_a_gguf_file_asks_that_is_not_served(tmp_path: Path, sampling: Any, told: dict[str, str]) -> None:
    assert warned(gguf(tmp_path, **sampling)) == {f"general.sampling.{name}": value for name, value in told.items()}


def test_every_key_of_the_gguf_package_is_known() -> None:
    from gguf.constants import Keys

    keys = {value for name, value in vars(Keys.General).items() if name.startswith("SAMPLING_")}
    known = (*GGUF_SERVED, *sampling_defaults.GGUF_NEUTRAL, *sampling_defaults.GGUF_INERT, "sequence")
    assert keys == {f"general.sampling.{name}" for name in known}
