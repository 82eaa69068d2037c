"""gRPC options that notice a peer which has gone without a word: its host is down, a firewall forgot the connection.

A connection to such a peer looks open, and every call on it is unanswered until its deadline, or for ever without one.
Pings show it. Without ``ping_timeout_ms``, gRPC waits a minute for an answer whatever ``keepalive_timeout_ms`` says.
"""

from __future__ import annotations

#: Seconds without a word after which a client pings, and seconds that the answer may take.
CLIENT_PING_S, CLIENT_PATIENCE_S = 2.0, 2.0

Options = list[tuple[str, int]]


def pings(every_s: float, patience_s: float) -> Options:
    """Ping after ``every_s`` seconds of silence, and give up ``patience_s`` seconds later."""
    return [
        ("grpc.keepalive_time_ms", round(1000 * every_s)),
        ("grpc.keepalive_timeout_ms", round(1000 * patience_s)),
        ("grpc.http2.ping_timeout_ms", round(1000 * patience_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


#: For channels: a call or stream of a silent server fails with UNAVAILABLE within the sum of the two.
CLIENT: Options = pings(CLIENT_PING_S, CLIENT_PATIENCE_S)
