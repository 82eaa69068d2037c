"""The limits on what each method of the engine is sent."""

from __future__ import annotations

from services.common.edge.message_limit import MessageLimit, MessageLimits
from services.common.serving import MAX_MESSAGE_BYTES

#: A conversation of 16384 messages is five fields a message; a batch of 1024 requests, a hundred fields a request.
_PROMPT = MessageLimit(MAX_MESSAGE_BYTES, 1 << 17)

LIMITS = MessageLimits(
    {
        "Generate": _PROMPT,
        "BatchGenerate": _PROMPT,
        "SubmitGeneration": _PROMPT,
        "Tokenize": _PROMPT,
        "Detokenize": MessageLimit(1 << 20),
    }
)
