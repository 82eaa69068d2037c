"""A model as it lies on disk: a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.fields import shortened
from services.engine.checkpoint.gguf import tokenizer as gguftokenizer
from services.engine.checkpoint.gguf.header import GgufFile
from services.engine.checkpoint.gguf.model import config_of, is_gguf, tensors_of
from services.engine.checkpoint.gguf.shards import read_parts
from services.engine.checkpoint.placeholders import missing_model
from services.engine.checkpoint.safetensors import read_headers
from services.engine.checkpoint.weights import Weights
from services.engine.text import chat_files
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import TOKENIZER_FILE, Tokenizer

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a model before a tensor is read."""

    path: Path
    config: ModelConfig
    gguf: GgufFile | None

    @classmethod
    def open(cls, path: Path | str, max_context: int | None = None) -> Checkpoint:
        """Read a model's configuration; ``max_context`` asks for less than its own. Raises ``ModelInvalid``.

        Warns of each thing that the model's files ask of sampling and that is not done here.
        """
        path = Path(path)
        if not path.exists():
            raise missing_model(path)
        gguf = read_parts(path) if is_gguf(path) else None
        config = ModelConfig.from_folder(path, max_context) if gguf is None else config_of(gguf, max_context)
        for key, value in config.unserved_sampling:
            log.warning("sampling_setting_not_served", model=str(path), field=key, value=shortened(value))
        return cls(path, config, gguf)

    def weights(self) -> Weights:
        """Find every tensor that the model needs. Raises ``ModelInvalid``."""
        found = read_headers(self.path) if self.gguf is None else tensors_of(self.gguf, self.config)
        return Weights(self.path, self.config, found)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; for a GGUF file with one that cannot be built, that beside it.

        Raises ``ModelInvalid`` when there is none, it is damaged, or has ids the model does not know.
        """
        vocab_size = self.config.vocab_size
        if self.gguf is None:
            return Tokenizer.load(self.path, vocab_size)
        try:
            return Tokenizer.of(gguftokenizer.tokenizer_of(self.gguf), vocab_size, str(self.path))
        except ModelInvalid as error:
            beside = self.path.parent
            if not (beside / TOKENIZER_FILE).exists():
                raise
            log.info("tokenizer_beside", file=str(beside / TOKENIZER_FILE), instead_of=error.message)
            return Tokenizer.load(beside, vocab_size)

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """The model's chat, by its own template or by that beside a GGUF file without, if a tokenizer is there, too.

        Raises ``ModelInvalid`` for a template that is damaged or does not parse.
        """
        if self.gguf is None:
            return Chat.of(chat_files.of_folder(self.path), tokenizer)
        source = chat_files.of_gguf(self.gguf)
        beside = self.path.parent
        if source is None and (beside / TOKENIZER_FILE).exists():
            source = chat_files.of_folder(beside)
        return Chat.of(source, tokenizer)
