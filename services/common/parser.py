"""A command line that cannot be: one line that says what is wrong and where to read on, not the whole usage."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line on standard error, with exit status 2.

    Flags have to be spelt out: what `--me` means today must not be another flag's to take tomorrow.
    """

    def __init__(self, *, prog: str, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """End the process with status 2, and a line."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")
