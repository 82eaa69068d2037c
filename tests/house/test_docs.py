"""Docs that state facts about the code are held to them."""

from __future__ import annotations

import re
from pathlib import Path

from services import errors

ROOT = Path(__file__).parents[2]


def test_the_daemons_error_table_is_the_codes() -> None:
    source = (ROOT / "services" / "errors.py").read_text()
    section = source.split("# --- the KV-cache daemon")[1].split("# --- the engine")[0]
    names = ["FieldInvalid", "Internal", *re.findall(r"^class (\w+)", section, re.MULTILINE)]
    text = (ROOT / "docs" / "daemon.md").read_text()
    documented = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    told = {(reason, code, retry.strip(), meaning) for reason, code, retry, meaning in documented}
    expected = set()
    for kind in (getattr(errors, name) for name in names):
        retry = f"after {kind.retry_after_s:g} s" if kind.retry_after_s else ""
        expected.add((kind.reason, kind.code, retry, kind.__doc__.strip().splitlines()[0]))
    assert told == expected


def test_structures_names_every_module() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    for package in ("services", "services/kvcache", "services/engine"):
        modules = [path.name for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")]
        missing = [name for name in modules if f"`{name}`" not in text and f"/{name}`" not in text]
        assert not missing, f"docs/structures.md does not tell what {missing} of {package} are"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
