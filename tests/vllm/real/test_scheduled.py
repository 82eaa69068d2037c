"""The connector's halves under vLLM's own scheduler, as `tests/vllm/test_halves.py` has them under its double."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.processes import kvcache
from tests.vllm.real.scripts import ROOT, command, importing_tests

pytestmark = pytest.mark.timeout(600)
#: Of 32 tokens: few enough that requests wait for blocks, most often also preempt, and more than are ever needed.
FEW, MANY = 30, 200


@pytest.mark.parametrize("steps", ["sync", "ahead"])
@pytest.mark.parametrize(("page_size", "blocks"), [(32, FEW), (16, FEW), (64, MANY)])
def test_answers_are_right_and_prefixes_are_loaded(tmp_path: Path, steps: str, page_size: int, blocks: int) -> None:
    with kvcache(tmp_path) as daemon:
        given = [str(ROOT / "models" / "shakespeare"), daemon.address, steps, str(page_size), str(blocks)]
        done = subprocess.run(
            command("scheduled", *given),
            env=importing_tests(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["wrong"] == 0 and found["loaded_tokens"] and found["saved_tokens"], found
        assert not found.get("lost_sessions")
        # Users of vLLM's KV events hear of them as of vLLM's own blocks: the same hashes, parents, tokens and salts.
        assert found["events"] and found["salted_events"] and not found["other_events"], found
