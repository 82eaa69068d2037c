"""How a program of this application is started, in a checkout and installed from its wheel.

As a script it runs a module: ``python PATH/services/launch.py services.doctor.probe``. Unlike ``python -m`` this needs
no PYTHONPATH, and imports the application that the file belongs to, never what lies in the current folder.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

#: The folder of `services` and `kernels`: a checkout, or `rocmforge/_app` among the installed packages.
APP = Path(__file__).resolve().parents[1]
INSTALLED = APP.name == "_app"

#: Console scripts of the wheel, by the module that each runs.
SCRIPTS = {
    "services": "rocmforge",
    "services.doctor": "rocmforge",
    "services.engine": "rocmforge-engine",
    "services.healthcheck": "rocmforge healthcheck",
    "services.kvcache": "rocmforge-kvcache",
    "services.top": "rocmforge top",
}


def typed(module: str) -> str:
    """What a user types to run one of ``SCRIPTS``' modules."""
    return SCRIPTS[module] if INSTALLED else f"python -m {module}"


def python(module: str, *words: str) -> list[str]:
    """The command line of a child process that runs a module of this application."""
    return [sys.executable, str(Path(__file__).resolve()), module, *words]


def main() -> None:
    """Run the module that the first argument names, as ``python -m`` would."""
    del sys.argv[0]
    sys.path[0] = str(APP)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
