"""Pings of a server, which notice a client that has gone without a word; `rocmforge.client.transport.keepalive` has a
client's.
"""

from __future__ import annotations

from rocmforge.client.transport.keepalive import Options, pings

#: Seconds without a word after which a server pings, and seconds that the answer may take: it loses less by a silent
#: client than a client that waits for it.
SERVER_PING_S, SERVER_PATIENCE_S = 20.0, 20.0
#: Pings may come this often; who sends more is disconnected.
LEAST_PING_S = 0.5

#: For servers: calls of silent clients are cancelled, and clients with the options above are not taken for a flood.
SERVER: Options = [
    *pings(SERVER_PING_S, SERVER_PATIENCE_S),
    ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * LEAST_PING_S)),
]
