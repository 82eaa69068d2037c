"""The console scripts of the wheel, installed as ``rocmforge/_launcher.py``.

The application's packages lie in ``rocmforge/_app``, where no other import finds them: ``services`` and ``kernels`` are
names that others install, too. Only these scripts put that folder on the path, and first.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def _run(module: str) -> int:
    sys.path.insert(0, str(Path(__file__).with_name("_app")))  # of an editable install it is not there
    return int(importlib.import_module(f"{module}.__main__").main())


def kvcache() -> int:
    """``rocmforge-kvcache``. Returns the exit status."""
    return _run("services.kvcache")


def engine() -> int:
    """``rocmforge-engine``. Returns the exit status."""
    return _run("services.engine")


def rocmforge() -> int:
    """``rocmforge``. Returns the exit status."""
    return _run("services")
