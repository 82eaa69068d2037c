"""The calls of docs/api.md, typed as they stand there: a fresh engine answers what is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2
from tests import tools
from tests.e2e.callers.test_grpcurl import messages
from tests.e2e.conftest import Pair
from tests.processes import ROOT

ADDRESS = "127.0.0.1:50051"
#: What differs from run to run, and from one way of being scheduled to another.
VOLATILE = {
    *("queueTime", "timeToFirstToken", "totalTime", "expireTime", "pageWait", "firstTokenTime"),
    *("kvcacheEpoch", "steps", "pageCalls"),
    "logprob",  # in its last digits, from one machine to another
}
#: Of a live generation, what does not hang on how far it is.
BEGUN = ("requestId", "state", "samples", "usage", "promptTokens")
#: Of a response, what is added to by the next.
LISTS = ("tokenIds", "logprobs", "promptLogprobs")

pytestmark = pytest.mark.needs("grpcurl")


def examples() -> list[tuple[str, str]]:
    """The commands of the page, in order, and what it says that they print."""
    blocks = re.findall(r"^```\n\$ (.*?)\n```$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL)
    found = []
    for block in blocks:
        typed = re.match(r".*?EngineService/\w+$", block, re.MULTILINE | re.DOTALL)
        assert typed is not None, block
        found.append((typed[0], block[typed.end() :]))
    return found


def steady(value: Any) -> Any:
    """A message without what differs from run to run."""
    if isinstance(value, list):
        return [steady(item) for item in value]
    if isinstance(value, dict):
        if value.get("state") in ("GENERATION_STATE_QUEUED", "GENERATION_STATE_RUNNING"):
            return begun({**value, "state": "live"})
        return {key: "*" if key in VOLATILE else steady(item) for key, item in value.items()}
    return value


def begun(value: Any) -> Any:
    """What a live generation says however far it is."""
    if isinstance(value, list):
        return [begun(item) for item in value]
    if isinstance(value, dict):
        return {key: begun(item) for key, item in value.items() if key in BEGUN}
    return value


def folded(answers: list[Any]) -> dict[Any, Any]:
    """A stream's answers by request and sample, since how much of a text comes at a time differs."""
    whole: dict[Any, Any] = {}
    for answer in answers:
        response = answer.get("response", answer)
        name = (answer.get("index"), response.get("requestId"), response.get("sample"))
        one = whole.setdefault(name, {"text": "", **{key: [] for key in LISTS}})
        one.update({key: item for key, item in {**answer, **response}.items() if key not in ("text", *LISTS)})
        one.pop("response", None)
        one["text"] += response.get("text", "")
        for key in LISTS:
            one[key] += response.get(key, [])
    return whole


def finish(pair: Pair, command: str) -> None:
    """See what a command submitted to its end, as it is by the time that a person has typed the next one."""
    submitted = re.search(r'"request_id": "(\w+)"', command)
    assert submitted is not None, command
    watch = engine_pb2.WatchGenerationRequest(request_id=submitted[1])
    *_, last = pair.stub.WatchGeneration(watch, timeout=60)
    assert last.response.HasField("finish"), last


def test_every_example_prints_what_the_page_says(pair: Pair) -> None:
    told = examples()
    assert len(told) >= 12
    for command, printed in told:
        typed = shlex.split(command.replace("\\\n", " ").replace(ADDRESS, pair.engine.tcp()))
        assert typed[0] == "grpcurl"
        done = subprocess.run([tools.path_of("grpcurl"), *typed[1:]], capture_output=True, text=True, timeout=60)
        if command.endswith("/SubmitGeneration"):
            finish(pair, command)
        if printed.lstrip().startswith("ERROR:"):
            assert done.stderr.split() == printed.split(), command  # versions differ in their spaces
            continue
        assert done.returncode == 0, done.stderr
        expected, answered = messages(printed.lstrip()), messages(done.stdout)
        if re.search(r"EngineService/(Generate|BatchGenerate|WatchGeneration)$", command):
            assert steady(folded(answered)) == steady(folded(expected)), command
        else:
            assert steady(answered) == steady(expected), command
