"""What the daemon and its mover say to each other, as structs in msgpack; ``frames.py`` is how they travel.

Pages and slots are numbers: the mover knows nothing of generations, and the daemon decides with each reply whether its
page is still the one it meant.

Jobs are numbered by the daemon, each number once. How a job goes:

- ``Read``: ``ReadDone``; nothing reads the page or writes the slot any more. If it was for the outer tier too and is
  ``ok``, the mover keeps a private copy until ``Commit``, which ends in ``Stored``, or ``Abandon``, which ends the job.
- ``Lookup``: ``Found``.
- ``FillFromHost``, ``FillFromOuter``: ``Filled``; nothing writes the page or reads the slot any more.

The socket keeps the order of messages, but jobs end in any order.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from services.kvcache.outer.page_chain import Chain as Chain
from services.kvcache.outer.page_chain import Digest
from services.kvcache.outer.settings import OuterTier as OuterTier

#: Keys in one lookup or ``Forget``.
MOST_KEYS: Final = 4096

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0)]
Digests = Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MOST_KEYS)]
Detail = Annotated[str, Meta(max_length=1000)]

#: How a fill ended. ``MISSING``: the outer tier has no such value. ``REFUSED``: what it has failed a check, and was
#: deleted. ``FAILED``: an error of the memory, or of the outer tier.
FILLED, MISSING, REFUSED, FAILED = "filled", "missing", "refused", "failed"


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Each message is an array that begins with its name."""


class Setup(_Message, frozen=True, tag="setup"):
    """The first message to a mover. It keeps at most ``staging_bytes`` of private copies and of values in flight."""

    outer: OuterTier | None
    staging_bytes: Positive
    job_seconds: Annotated[float, Meta(gt=0)]


class AttachFile(_Message, frozen=True, tag="attach_file"):
    """Map a file of ``pages`` pages (or slots) of ``page_bytes``. ``pin_for``: the GPU that copies to and from it.

    Answered with ``Attached``.
    """

    memory: Number
    path: str
    page_bytes: Positive
    pages: Positive
    pin_for: Number | None = None


class AttachGpu(_Message, frozen=True, tag="attach_gpu"):
    """Open an allocation of a GPU, ``device_id`` its PCI bus id, by its IPC handle. Answered with ``Attached``."""

    memory: Number
    handle: bytes
    device: Number
    device_id: str
    page_bytes: Positive
    pages: Positive


class Detach(_Message, frozen=True, tag="detach"):
    """Unmap a memory, after the jobs that use it. Answered with ``Detached``, when it may be freed."""

    memory: Number


class Read(_Message, frozen=True, tag="read"):
    """Copy a page out of its arena: into a slot, or into a private copy for the outer tier, or both.

    ``checksum``: say in ``ReadDone`` the CRC-32C of what is in the slot.
    """

    job: Number
    memory: Number
    page: Number
    slot_memory: Number | None = None
    slot: Number = 0
    outer: Chain | None = None
    checksum: bool = False


class Commit(_Message, frozen=True, tag="commit"):
    """The page that was read was still the one that was meant: store the private copy in the outer tier."""

    job: Number


class Abandon(_Message, frozen=True, tag="abandon"):
    """Drop the private copy. Not answered."""

    job: Number


class Lookup(_Message, frozen=True, tag="lookup"):
    """How many of ``keys``, from the first, are in the outer tier without a gap."""

    job: Number
    keys: Digests


class FillFromHost(_Message, frozen=True, tag="fill_from_host"):
    """Copy a slot into a page. With ``checksum``, its CRC-32C, bytes that differ are ``REFUSED``."""

    job: Number
    memory: Number
    page: Number
    slot_memory: Number
    slot: Number
    checksum: Number | None = None


class FillFromOuter(_Message, frozen=True, tag="fill_from_outer"):
    """Fetch a value, check it, then copy it into a page."""

    job: Number
    memory: Number
    page: Number
    chain: Chain


class Forget(_Message, frozen=True, tag="forget"):
    """Delete values from the outer tier, if it can be reached. Not answered."""

    digests: Digests


class Ping(_Message, frozen=True, tag="ping"):
    """Answered with ``Pong`` once everything before it was taken up."""

    number: Number


Order = (
    Setup
    | AttachFile
    | AttachGpu
    | Detach
    | Read
    | Commit
    | Abandon
    | Lookup
    | FillFromHost
    | FillFromOuter
    | Forget
    | Ping
)


class Attached(_Message, frozen=True, tag="attached"):
    """A memory can be used, with ``detail`` if it could not be pinned; unless ``ok``, all jobs with it will fail."""

    memory: Number
    ok: bool
    detail: Detail = ""


class Detached(_Message, frozen=True, tag="detached"):
    """The mover has no mapping of that memory any more."""

    memory: Number


class ReadDone(_Message, frozen=True, tag="read_done"):
    """``seconds`` is what the copy took."""

    job: Number
    ok: bool
    seconds: Seconds
    checksum: Number | None = None
    detail: Detail = ""


class Stored(_Message, frozen=True, tag="stored"):
    """``bytes`` were written to the outer tier, none unless ``ok``; ``seconds`` since ``Commit``."""

    job: Number
    ok: bool
    bytes: Number
    seconds: Seconds
    detail: Detail = ""


class Found(_Message, frozen=True, tag="found"):
    """``count`` keys are there; 0 if the outer tier cannot be reached. ``seconds`` since ``Lookup``."""

    job: Number
    count: Number
    seconds: Seconds
    detail: Detail = ""


class Filled(_Message, frozen=True, tag="filled"):
    """``outcome`` is ``FILLED``, ``MISSING``, ``REFUSED`` or ``FAILED``; ``bytes`` were moved, ``seconds`` since the
    order.
    """

    job: Number
    outcome: str
    bytes: Number
    seconds: Seconds
    detail: Detail = ""


class Health(_Message, frozen=True, tag="health"):
    """Whether the outer tier is reached, sent when that changes."""

    outer_up: bool
    detail: Detail = ""


class Pong(_Message, frozen=True, tag="pong"):
    """The mover is alive."""

    number: Number


Reply = Attached | Detached | ReadDone | Stored | Found | Filled | Health | Pong
