"""One-line errors for invalid command lines, instead of argparse's full usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from services.version import VERSION


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports errors as one line on standard error and exits with status 2.

    Flags cannot be abbreviated: `--me` must not change its meaning when a flag is added.
    """

    def __init__(self, *, prog: str, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=f"rocmforge {VERSION}")

    def error(self, message: str) -> NoReturn:
        """Print a one-line error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")
