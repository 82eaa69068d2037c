"""The two services and what they share."""

import os

# Before gRPC is imported, which reads it once: nothing older than TLS 1.3 (services/common/edge/tls.py).
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-PSK-CHACHA20-POLY1305")
