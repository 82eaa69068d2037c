"""The channel to a daemon."""

from __future__ import annotations

import grpc

from rocmforge.client.transport import keepalive
from rocmforge.client.transport.tls import ClientTls

#: How long the other side may take to greet. It outlasts a call: one that is busy is there.
GREET_S = 4.0

_MAX_MESSAGE_BYTES = 32 << 20
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    # In fact the limit on greeting.
    ("grpc.min_reconnect_backoff_ms", round(1000 * GREET_S)),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Or a new channel would find and reuse the connection of the one before it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
]


def channel_to(target: str, tls: ClientTls | None) -> grpc.Channel:
    """A channel that shares no connection with others. Raises InvalidConfiguration, naming a file of ``tls`` that
    cannot be read or used.
    """
    options = [*_OPTIONS, *keepalive.CLIENT]
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, tls.credentials(), options=[*options, *tls.options])
