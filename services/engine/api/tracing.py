"""What a sampled request's span says: OpenTelemetry's names for generative AI; no prompt, no text, no tokens."""

from __future__ import annotations

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.tracing.span import SPAN, Value
from services.engine.delivery.streams import Listener
from services.engine.delivery.traces import traced
from services.engine.scheduling.sequence import Request


def traced_request(
    model: str, message: pb.GenerateRequest, request: Request, listener: Listener
) -> tuple[Request, Listener]:
    """The request and its listener as they are, or in the trace of the call being served if that is sampled."""
    call = SPAN.get()
    if call is None:
        return request, listener
    operation = "chat" if message.prompt.WhichOneof("input") == "messages" else "text_completion"
    drawn = request.sampling
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "rocmforge",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.stopping.max_tokens,
        "gen_ai.request.temperature": drawn.temperature,
        "gen_ai.request.top_p": drawn.top_p,
        "gen_ai.request.top_k": drawn.top_k,
        "gen_ai.response.id": request.request_id,
    }
    if request.others:
        attributes["gen_ai.request.choice.count"] = 1 + len(request.others)
    return traced(request, listener, call, f"{operation} {model}", attributes)
