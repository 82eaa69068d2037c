"""A view as lines of text, styled; every state has a character of its own, so that colours only repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.text import Text

from services.top.view import EngineView, PoolView, SequenceView, SessionView, TierView, View

#: The states of a page: its character in the map, its name, its style.
STATES = (
    ("#", "held", "bold green"),
    ("=", "cached", "cyan"),
    ("+", "retained", "blue"),
    ("!", "quarantined", "bold red"),
    ("~", "filling", "magenta"),
    (".", "free", "dim"),
)

#: Orders of sequences by key: what is shown, and the value they are sorted by, largest first.
ORDERS: dict[str, tuple[str, Callable[[SequenceView], float | str]]] = {
    "a": ("age", lambda one: one.age_s),
    "i": ("idle", lambda one: one.idle_s),
    "p": ("pages", lambda one: one.pages),
    "t": ("tokens", lambda one: one.tokens),
    "o": ("owner", lambda one: one.session),
}

EXPLANATION = """\
POOLS   The map has a pool's pages by state; each character is a share of them.
  #  held         in use by a sequence: never evicted
  =  cached       complete, in no sequence: found by prompts with the same
                  prefix, evicted when others need pages
  +  retained     cached, and evicted after the others, as a request asked for
  !  quarantined  a lost engine may still write it: see fence in docs/daemon.md
  ~  filling      on its way from a lower tier             .  free
  hit   prompt tokens found in the cache, since the last look and (ever)
  new/s and out/s   pages granted and evicted or expired per second
TIERS   in/s, out/s: MB that are stored and fetched. found: of pages looked up.
ENGINES run: requests that hold pages. wait: of the queue's limit. ttft: mean
        time to the first token since the last look. pre: preemptions. rec:
        sessions lost and opened again.
SESSIONS An engine's lease on a pool. lease: seconds left of its ttl; a call
        renews it. lost: the engine went silent; fence says what is known of it.
SEQUENCES A request's tokens and pages. idle: since its engine last named it.
        hit: tokens that were cached when it began.
KEYS    a i p t o  sort sequences by age, idle, pages, tokens, owner
        r  reverse     e  this page     space  pause     q  quit"""


def render(
    view: View, width: int, height: int, order: str = "a", *, reverse: bool = False, paused: bool = False
) -> Text:
    """The screen, at most ``width`` by ``height``: sequences have the lines that the others leave."""
    lines = [_head(view, paused)]
    if view.trouble:
        lines.append(Text(f"the daemon does not answer: {view.trouble}", style="bold red"))
    for pool in view.pools:
        lines += _pool(pool, width)
    lines += map(_tier, view.tiers)
    if view.engines:
        lines += [_title("ENGINE", "model            run  wait/limit   ttft  tokens/s  pre  rec")]
        lines += [_engine(one) for one in _most(view.engines, 4)]
    if view.sessions:
        lines += [_title("SESSION", "handle        pool                  seqs  pages     lease")]
        lines += [_session(one) for one in _most(view.sessions, 4)]
    shown, value = ORDERS[order]
    arrow = "^" if reverse else "v"
    columns = f"owner               age    idle  tokens  pages     hit {shown} {arrow}"
    lines.append(_title(f"SEQUENCE {view.all_sequences}", columns))
    room = max(0, height - len(lines) - 1)
    ordered = sorted(view.sequences, key=lambda one: one.id)
    ordered.sort(key=value, reverse=(order == "o") == reverse)
    lines += [_sequence(one) for one in ordered[:room]]
    lines += [Text()] * (height - 1 - len(lines))
    keys = Text("a age  i idle  p pages  t tokens  o owner  r reverse  e explain  q quit", style="reverse")
    lines = [*lines[: height - 1], keys]
    for line in lines:
        # Names are what engines and their callers say: nothing of them is a command to the terminal, or another line.
        line.plain = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line.plain)
        line.truncate(width)
    return Text("\n").join(lines)


def _most(rows: list[EngineView] | list[SessionView], most: int) -> Iterable:
    return rows[:most]


def _head(view: View, paused: bool) -> Text:
    text = Text()
    text.append("rocmforge top  ", style="bold")
    if paused:
        text.append("paused  ", style="bold yellow")
    if not view.trouble:
        text.append(f"up {_span(view.uptime_s)}  epoch {view.epoch:016x}  ")
    text.append(_tail(view.target, 28))
    return text


def _title(name: str, rest: str) -> Text:
    return Text(f"{name:<17}{rest}", style="bold underline")


def _pool(pool: PoolView, width: int) -> list[Text]:
    counts = (pool.held, pool.cached, pool.retained, pool.quarantined, pool.filling, pool.free)
    hit = f"hit {_percent(pool.hit_rate)} ({_percent(pool.hit_rate_ever)})"
    said = f"{pool.total} pages  {hit}  new/s {pool.granted_s:.0f} out/s {pool.evicted_s:.0f}"
    first = Text()
    first.append(f"{pool.id[: max(12, width - len(said) - 2)]}  ", style="bold")
    first.append(said)
    second = Text()
    for (mark, _, style), cells in zip(STATES, shares(counts, width), strict=True):
        second.append(mark * cells, style=style)
    third = Text("  ")
    for (mark, name, style), count in zip(STATES, counts, strict=True):
        if count or name != "filling":
            third.append(f"{mark} {name} {count}   ", style=style)
    return [first, second, third]


def _tier(tier: TierView) -> Text:
    text = Text()
    text.append(f"tier {tier.name:<7}", style="bold")
    if tier.capacity_bytes:
        text.append(f"{tier.pages} pages, {tier.used_bytes / 2**20:.0f} of {tier.capacity_bytes / 2**20:.0f} MiB  ")
    text.append(f"found {_percent(tier.found)}  in/s {tier.stored_s / 1e6:.1f} out/s {tier.fetched_s / 1e6:.1f}  ")
    if tier.failed:
        text.append(f"failed {tier.failed}  ", style="yellow")
    if tier.trouble:
        text.append(tier.trouble, style="bold red")
    return text


def shares(counts: tuple[int, ...], cells: int) -> list[int]:
    """``cells`` divided as ``counts`` are; what is there at all has one cell at least, if there are enough."""
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    given = [max(1, count * cells // total) if count else 0 for count in counts]
    while (over := sum(given) - cells) != 0:
        largest = max(range(len(counts)), key=lambda at: given[at])
        given[largest] -= 1 if over > 0 else over
    return given


def _engine(one: EngineView) -> Text:
    name = _tail(one.target, 16)
    if one.trouble:
        return Text(f"{name:<17}{one.trouble}", style="red")
    first = f"{1000 * one.first_token_s:.0f}ms" if one.first_token_s is not None else "-"
    wait = f"{one.queued}/{one.queue_limit}"
    line = (
        f"{name:<17}{one.model[:15]:<16}{one.running:>4}{wait:>12}{first:>7}{one.tokens_s:>10.0f}"
        f"{one.preemptions:>5}{one.recoveries:>5}{'  draining' if one.draining else ''}"
    )
    return Text(line, style="yellow" if one.draining or one.queued >= one.queue_limit > 0 else "none")


def _session(one: SessionView) -> Text:
    lease = one.lost or f"{one.lease_s:.0f}/{one.ttl_s:.0f}s"
    line = f"{_tail(one.name, 16):<17}{one.handle:<14}{one.pool_id[:21]:<22}{one.sequences:>4}{one.pages:>7}{lease:>10}"
    return Text(line, style="red" if one.lost.startswith("lost") else "none")


def _sequence(one: SequenceView) -> Text:
    line = (
        f"{_tail(one.id, 16):<17}{_tail(one.session, 16):<16}{_span(one.age_s):>7}{_span(one.idle_s):>8}"
        f"{one.tokens:>8}{one.pages:>7}{one.cached_tokens:>8}"
    )
    return Text(line)


def _tail(text: str, most: int) -> str:
    """The end of a text: what names and ids differ by."""
    return text if len(text) <= most else f"~{text[1 - most :]}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h"
