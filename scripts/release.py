"""Implements ``make release``: everything that a release consists of, in ``dist/``.

Both wheels and source distributions, the bundle of protos, the images where there is a Docker engine, the compose files
and manifests, an SBOM, and ``SHA256SUMS`` of all of it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import protos_bundle
from services.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "clients" / "python"
IMAGES = ("kvcache", "engine")
SUMS = "SHA256SUMS"


class CannotRelease(Exception):
    """Nothing was released; the message says what to change."""


def differing(root: Path = ROOT) -> list[str]:
    """Where another version is written than ``services/version.py`` has, a sentence each."""
    found = {
        "clients/python/pyproject.toml": r'^version = "([^"]+)"',
        "pyproject.toml": r'"rocmforge-client==([^"]+)"',
        "docker-compose.yml": r"_TAG:-([0-9][^}]*)\}",
        **{
            f"deploy/kubernetes/overlays/{name}/kustomization.yaml": r"newTag: ([0-9.]+)"
            for name in ("cpu", "rocm", "rocm-dra")
        },
        "Dockerfile": r"^ARG VERSION=(\S+)",
    }
    wrong = []
    for name, pattern in found.items():
        versions = set(re.findall(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE))
        if versions != {VERSION}:
            wrong.append(f"{name} has {', '.join(sorted(versions)) or 'no version'}; services/version.py has {VERSION}")
    sections = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if not re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", newest := next(iter(sections), "no section")):
        wrong.append(f"CHANGELOG.md begins with {newest}; services/version.py has {VERSION}")
    return wrong


def distributions(out: Path) -> None:
    """Build both wheels and source distributions. Raises CannotRelease."""
    for project in (ROOT, CLIENT):
        _run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], project)


def closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions of that name and all that they need, extras left out, as they are installed here.

    Raises CannotRelease for one that is not.
    """
    todo, found = list(names), dict[str, importlib.metadata.Distribution]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise CannotRelease(f"{name} is not installed; run `make setup`") from None
        todo += _needed(found[name])
    return found


def _needed(one: importlib.metadata.Distribution) -> list[str]:
    read = [Requirement(line) for line in one.requires or []]
    return [each.name for each in read if each.marker is None or each.marker.evaluate({"extra": ""})]


def sbom() -> str:
    """The software bill of materials of the wheels with all that they install, as CycloneDX 1.6 JSON."""
    found = closure(["rocmforge"])
    parts = {name: _component(name, one) for name, one in found.items()}
    bom = Bom(components=[part for name, part in parts.items() if name != "rocmforge"])
    bom.metadata.component = parts["rocmforge"]
    for name, one in found.items():
        bom.register_dependency(parts[name], [parts[canonicalize_name(needed)] for needed in _needed(one)])
    return JsonV1Dot6(bom).output_as_string(indent=2)


def _component(name: str, one: importlib.metadata.Distribution) -> Component:
    # A version of ours is that of the sources, whatever was installed here last.
    version = VERSION if name.startswith("rocmforge") else one.version
    declared = next((one.metadata[field] for field in ("License-Expression", "License") if field in one.metadata), "")
    short = declared if "\n" not in declared and 0 < len(declared) < 80 else ""
    return Component(
        name=name,
        version=version,
        type=ComponentType.APPLICATION if name == "rocmforge" else ComponentType.LIBRARY,
        purl=PackageURL("pypi", None, name, version),
        bom_ref=f"{name}@{version}",
        licenses=[DisjunctiveLicense(name=short)] if short else [],
    )


def manifests(out: Path) -> None:
    """Pack the compose files, and ``deploy/`` if there is one, as one reproducible archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "docker-compose*.yml", "deploy"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    name = f"rocmforge-deploy-{VERSION}"
    contents = {file: (ROOT / file).read_bytes() for file in listed.split("\0") if file}
    (out / f"{name}.tar.gz").write_bytes(protos_bundle.pack(name, contents))


def images(out: Path) -> str:
    """Build the images for a CPU and save them. Returns why not, if there is no Docker engine. Raises CannotRelease."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "no images: there is no Docker engine here"
    _run([str(ROOT / "scripts" / "images.sh"), "cpu"], ROOT)
    for target in IMAGES:
        saved = out / f"rocmforge-{target}-{VERSION}-cpu.tar"
        _run(["docker", "save", "--output", str(saved), f"rocmforge-{target}:{VERSION}"], ROOT)
        with saved.open("rb") as plain, gzip.open(f"{saved}.gz", "wb", compresslevel=6) as packed:
            shutil.copyfileobj(plain, packed)
        saved.unlink()
    return ""


def checksums(out: Path) -> None:
    """Write ``SHA256SUMS``, for `sha256sum -c`."""
    lines = []
    for path in sorted(out.iterdir()):
        if path.name != SUMS:
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (out / SUMS).write_text("".join(lines), encoding="ascii")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise CannotRelease(f"{' '.join(command)}\n{done.stdout}{done.stderr}".strip())


def release(out: Path, *, with_images: bool = True) -> list[str]:
    """Write everything to ``out``, which must not have anything in it. Returns what was left out, a sentence each.

    Raises CannotRelease, and OSError.
    """
    if wrong := differing():
        raise CannotRelease("\n".join(wrong))
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise CannotRelease(f"{out} is not empty; remove what is in it")
    distributions(out)
    shutil.move(protos_bundle.write(out), out / f"rocmforge-protos-{VERSION}.tar.gz")
    manifests(out)
    (out / f"rocmforge-{VERSION}.cdx.json").write_text(sbom() + "\n", encoding="utf-8")
    left_out = images(out) if with_images else "no images: not asked for"
    checksums(out)
    return [left_out] if left_out else []


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-images", action="store_true", help="build no images")
    flags = parser.parse_args()
    try:
        left_out = release(ROOT / "dist", with_images=not flags.no_images)
    except (CannotRelease, protos_bundle.CannotBundle, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in sorted((ROOT / "dist").iterdir()):
        print(f"{path.stat().st_size:>12}  dist/{path.name}")
    print(*left_out, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
