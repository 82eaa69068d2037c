"""The state that the servicer needs once the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.api.requests import read_request
from services.engine.checkpoint.config import ModelConfig
from services.engine.pages.source import PageLayout, PageSource
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import Request
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model, the loop that runs it, and the source of its pages, of which only properties are read here."""

    model_id: str
    config: ModelConfig
    parameters: int
    geometry: PageLayout
    backend: str
    matrix_units: str
    tokenizer: Tokenizer
    chat: Chat
    loop: EngineLoop
    limits: Limits
    source: PageSource

    async def read(self, message: pb.GenerateRequest, now: float, deadline: float | None) -> Request:
        """See `read_request`."""
        return await read_request(
            message, self.config, self.tokenizer, self.chat, now, deadline, retains=self.source.retains
        )
