"""What `make release` writes: everything under one version, checksums that hold, and an SBOM of what is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import release
from services.version import VERSION
from tests.processes import ROOT

pytestmark = [pytest.mark.needs("git"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    assert release.release(out, with_images=False) == ["no images: not asked for"]
    return out


def test_one_version_is_written_everywhere() -> None:
    assert release.differing() == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("clients/python/pyproject.toml", f'version = "{VERSION}"', 'version = "9.9.9"'),
        ("pyproject.toml", f"rocmforge-client=={VERSION}", "rocmforge-client==9.9.9"),
        ("docker-compose.yml", f"ENGINE_TAG:-{VERSION}", "ENGINE_TAG:-9.9.9"),
        ("Dockerfile", f"ARG VERSION={VERSION}", "ARG VERSION=9.9.9"),
        ("deploy/kubernetes/overlays/cpu/kustomization.yaml", f"newTag: {VERSION}", "newTag: 9.9.9"),
        ("CHANGELOG.md", f"## {VERSION} - ", "## 9.9.9 - "),
        ("CHANGELOG.md", f"## {VERSION} - ", f"## Unreleased\n\n## {VERSION} - "),
        ("CHANGELOG.md", f"## {VERSION} - ", f"## {VERSION}, soon: "),
    ],
)
def test_another_version_is_found_out(tmp_path: Path, name: str, old: str, new: str) -> None:
    overlays = [f"deploy/kubernetes/overlays/{one}/kustomization.yaml" for one in ("cpu", "rocm", "rocm-dra")]
    files = ("clients/python/pyproject.toml", "pyproject.toml", "docker-compose.yml", "Dockerfile", "CHANGELOG.md")
    for one in (*files, *overlays):
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / one, tmp_path / one)
    assert release.differing(tmp_path) == []
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    [told] = release.differing(tmp_path)
    assert told.startswith(name)


def test_it_has_every_part_and_sums_that_hold(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()}
    for project in ("rocmforge", "rocmforge_client"):
        assert {f"{project}-{VERSION}-py3-none-any.whl", f"{project}-{VERSION}.tar.gz"} <= names
    assert {f"rocmforge-{part}-{VERSION}.tar.gz" for part in ("protos", "deploy")} <= names
    done = subprocess.run(["sha256sum", "--check", "--strict", release.SUMS], cwd=dist, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(names) - 1
    with tarfile.open(dist / f"rocmforge-deploy-{VERSION}.tar.gz") as archive:
        assert f"rocmforge-deploy-{VERSION}/docker-compose.yml" in archive.getnames()


@pytest.mark.parametrize("project", ["rocmforge", "rocmforge_client"])
def test_a_source_distribution_makes_the_same_wheel(dist: Path, tmp_path: Path, project: str) -> None:
    words = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", *words, str(dist / f"{project}-{VERSION}.tar.gz")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    made, released = (folder / f"{project}-{VERSION}-py3-none-any.whl" for folder in (tmp_path, dist))
    assert set(zipfile.ZipFile(made).namelist()) == set(zipfile.ZipFile(released).namelist())


def test_the_sbom_has_what_the_wheels_install_and_nothing_of_development(dist: Path) -> None:
    bom = json.loads((dist / f"rocmforge-{VERSION}.cdx.json").read_text())
    assert bom["bomFormat"] == "CycloneDX"
    assert bom["metadata"]["component"]["purl"] == f"pkg:pypi/rocmforge@{VERSION}"
    names = {part["name"]: part["version"] for part in bom["components"]}
    assert {"grpcio", "numpy", "protobuf", "markupsafe", "rocmforge-client"} <= names.keys()
    assert not {"pytest", "mypy", "grpcio-tools", "rocmforge"} & names.keys()
    pinned = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert names["numpy"] == pinned["numpy"]
    edges = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    assert f"markupsafe@{names['markupsafe']}" in edges[f"jinja2@{names['jinja2']}"]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    with pytest.raises(release.CannotRelease, match="not empty"):
        release.release(tmp_path, with_images=False)
