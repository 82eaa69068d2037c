"""Tests with the real vLLM, which `make test-vllm` runs: ROCMFORGE_VLLM names the Python of an environment that has it.
Without that nothing here is collected.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ROCMFORGE_VLLM") else ["test_*.py"]
