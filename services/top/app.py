"""The terminal: a view every few moments, and keys."""

from __future__ import annotations

from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from services.top.looking import Looker
from services.top.screen import EXPLANATION, ORDERS, render
from services.top.view import View


class Explanation(ModalScreen[None]):
    """What the columns mean; any key closes it."""

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static(EXPLANATION, markup=False)

    def on_key(self) -> None:
        """Close."""
        self.dismiss()


class Top(App[None]):
    """Shows what ``looker`` sees, refreshed every ``interval_s`` seconds."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; } Static { width: 100%; height: 100%; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"order('{key}')", name, show=False) for key, (name, _) in ORDERS.items()),
        Binding("r", "reverse", show=False),
        Binding("e,question_mark,h", "explain", show=False),
        Binding("space", "pause", show=False),
        Binding("q", "quit", show=False),
    ]

    def __init__(self, looker: Looker, interval_s: float = 1.0) -> None:
        super().__init__(ansi_color=True)
        self._looker = looker
        self._interval_s = interval_s
        self._order = "a"
        self._reverse = False
        self._paused = False
        self.view: View | None = None

    def compose(self) -> ComposeResult:
        """One text, for all of it."""
        yield Static(id="all", markup=False)

    def on_mount(self) -> None:
        """Begin to look."""
        self.look()
        self.set_interval(self._interval_s, self.look)

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """Ask, on a thread of its own, and show."""
        if not self._paused or self.view is None:
            view = self._looker.look()
            self.call_from_thread(self._take, view)

    def _take(self, view: View) -> None:
        self.view = view
        self.show()

    def show(self) -> None:
        """Draw the last view at the terminal's size."""
        if self.view is not None:
            text = render(
                self.view, self.size.width, self.size.height, self._order, reverse=self._reverse, paused=self._paused
            )
            self.screen_stack[0].query_one("#all", Static).update(text)

    def on_resize(self) -> None:
        """Draw at the new size."""
        self.show()

    def action_order(self, key: str) -> None:
        """Sort the sequences."""
        self._order = key
        self.show()

    def action_reverse(self) -> None:
        """Sort the other way."""
        self._reverse = not self._reverse
        self.show()

    def action_pause(self) -> None:
        """Pause or resume."""
        self._paused = not self._paused
        self.show()

    def action_explain(self) -> None:
        """Say what the columns mean."""
        self.push_screen(Explanation())
