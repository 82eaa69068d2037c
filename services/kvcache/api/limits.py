"""The limits on what each method of the daemon is sent."""

from __future__ import annotations

from services.common.edge.message_limit import STEP_BYTES, MessageLimit, MessageLimits
from services.kvcache.api.requests import MAX_ITEMS

#: An opening with all that it may say is 12 fields.
_STEP = MessageLimit(STEP_BYTES, 16 * MAX_ITEMS)

LIMITS = MessageLimits(
    {
        "AllocatePages": _STEP,
        "AppendTokens": _STEP,
        "RemoveSequences": MessageLimit(STEP_BYTES, 2 * MAX_ITEMS),
        "ExplainPrefix": _STEP,
    }
)
