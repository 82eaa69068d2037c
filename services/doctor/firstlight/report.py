"""The two files that first light ends with: a page for people, and JSON to attach to an issue.

Neither says whose machine it was: host and user names, and paths but those of devices and ROCm, are taken out of every
sentence (`private`).
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import socket
from collections.abc import Sequence
from typing import Any

from services.doctor.firstlight import figures
from services.doctor.firstlight.runner import Outcome

FORMAT = 1
ISSUES = "an issue (template: first light)"
#: Paths that are the same on every machine.
_KNOWN = ("/dev/", "/opt/rocm", "/proc/", "/sys/")
_PATH = re.compile(r"(?<![\w<])/(?:[\w.+@~-]+/)*[\w.+@~-]+")


def private(text: str, names: Sequence[str] = ()) -> str:
    """``text`` without paths and ``names``; by default this host's and this user's."""
    for name in names or _names():
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return _PATH.sub(lambda found: found[0] if found[0].startswith(_KNOWN) else "<path>", text)


def _names() -> list[str]:
    names = [socket.gethostname(), socket.getfqdn(), platform.node(), os.environ.get("USER", "")]
    with contextlib.suppress(OSError, KeyError):  # a uid without a name
        names.append(getpass.getuser())
    # A name that is no one's says nothing and may be a word of any sentence.
    return [name for name in dict.fromkeys(names) if name not in ("root", "localhost", "user")]


def facts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the steps said about the machine."""
    return {name: value for outcome in outcomes for name, value in outcome.facts.items()}


def numbers(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every measurement, with what it stands beside."""
    name = str(facts(outcomes).get("gpu", ""))
    return [
        {**number, "h200": figures.H200.get(number["key"]), "predicted": figures.predicted(name, number["key"])}
        for outcome in outcomes
        for number in outcome.numbers
    ]


def as_json(outcomes: Sequence[Outcome], size: str) -> str:
    """The file to attach to an issue."""
    document = {
        "format": FORMAT,
        "size": size,
        "machine": _each(facts(outcomes)),
        "steps": [
            {
                "step": outcome.title,
                "state": outcome.state,
                "seconds": outcome.seconds,
                "found": [{"result": kind, "sentence": private(sentence)} for kind, sentence in outcome.found],
            }
            for outcome in outcomes
        ],
        "numbers": _each(numbers(outcomes)),
    }
    return json.dumps(document, indent=1) + "\n"


def _each(value: Any) -> Any:
    """`private` of every text in ``value``."""
    if isinstance(value, dict):
        return {name: _each(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_each(one) for one in value]
    return private(value) if isinstance(value, str) else value


def as_page(outcomes: Sequence[Outcome], size: str) -> str:
    """Markdown."""
    failed = [outcome for outcome in outcomes if outcome.state != "passed"]
    lines = ["# First light", ""]
    if size == "tiny":
        lines += ["Shapes so small that a CPU can run them: nothing here says anything about speed.", ""]
    verdict = "Everything passed." if not failed else f"{len(failed)} of {len(outcomes)} steps did not pass:"
    lines.append(verdict)
    lines += [
        f"- **{outcome.title}**: {private(sentence)}"
        for outcome in failed
        for kind, sentence in outcome.found
        if kind != "passed"
    ]
    lines += ["", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {private(str(value))} |" for name, value in facts(outcomes).items()]
    lines += ["", "| step | | seconds |", "|---|---|---|"]
    lines += [f"| {outcome.title} | {outcome.state} | {outcome.seconds:g} |" for outcome in outcomes]
    measured = numbers(outcomes)
    if measured:
        lines += ["", "| measured | here | unit | predicted for this card | H200 |", "|---|---|---|---|---|"]
        for number in measured:
            beside = f"{number['h200']:g}" if number["h200"] is not None else ""
            lines.append(
                f"| {number['name']} | {number['value']:.4g} | {number['unit']} | {number['predicted']} | {beside} |"
            )
    lines.append("")
    for outcome in outcomes:
        lines += [f"## {outcome.title}", ""]
        lines += [f"- {'' if kind == 'passed' else f'**{kind}**: '}{private(text)}" for kind, text in outcome.found]
        lines.append("")
    lines.append(f"Please attach the JSON file to {ISSUES}, whether or not everything passed.")
    return "\n".join(lines) + "\n"
