"""Numbers that a report sets its own beside: an NVIDIA H200's (docs/gpu.md), and those predicted for AMD's cards."""

from __future__ import annotations

from dataclasses import dataclass

#: Measured on one H200, by key of `step.Report.number`: TB/s, or TFLOP/s of prefill.
H200 = {
    "copy": 4.089,
    "read": 4.59,
    "decode-bf16-1": 4.380,
    "decode-bf16-4": 4.274,
    "decode-bf16-16": 4.149,
    "decode-int8-4": 3.822,
    "prefill-matrix": 308.4,
    "gemv": 3.82,
}

#: Predicted for an MI300X by `benchmarks.isa` (docs/gpu.md): of decode TB/s, which is the memory's peak since the
#: instructions take less time than the memory; of prefill TFLOP/s, if units wait for each other and if they do not.
MI300X = {
    "decode-bf16-1": "at most 5.3",
    "decode-bf16-4": "at most 5.3",
    "decode-bf16-8": "at most 5.3",
    "decode-bf16-16": "at most 5.3",
    "decode-int8-4": "at most 5.3",
    "decode-int8-8": "at most 5.3",
    "prefill-scalar": "20 to 30",
    "prefill-matrix": "at most 430 to 960",
}


@dataclass(frozen=True, slots=True)
class Card:
    """``tbps``: the bandwidth that its maker states; ``predicted``: what `MI300X` says, if it is of this card."""

    name: str
    tbps: float
    predicted: dict[str, str]


_CARDS = (
    Card("MI355X", 8.0, {}),
    Card("MI350X", 8.0, {}),
    Card("MI325X", 6.0, {}),
    Card("MI300X", 5.3, MI300X),
    Card("MI300A", 5.3, {}),
    Card("MI250", 1.64, {}),  # of each of its two dies, which are two GPUs
    Card("MI210", 1.64, {}),
    Card("7900 XTX", 0.96, {}),
    Card("7900 XT", 0.8, {}),
    Card("9070", 0.64, {}),
    Card("H200", 4.8, {}),
    Card("H100", 3.35, {}),
)
#: A card that reads slower than this share of what its maker states has something wrong with it.
SLOW = 0.6


def card(name: str) -> Card | None:
    """The card of a name that the runtime reports; None for one that is not listed."""
    return next((card for card in _CARDS if card.name in name), None)


def predicted(name: str, key: str) -> str:
    """What was predicted for a number on the card of this name; empty if nothing was."""
    found = card(name)
    return "" if found is None else found.predicted.get(key, "")
