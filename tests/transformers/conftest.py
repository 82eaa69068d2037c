"""Tests with the real transformers, which `make test-transformers` runs: ROCMFORGE_TRANSFORMERS names the Python of an
environment that has it, and torch. Without that nothing here is collected.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ROCMFORGE_TRANSFORMERS") else ["test_*.py"]
