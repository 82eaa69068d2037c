"""A model on disk: a Hugging Face folder, or a GGUF file."""

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
    """A model's metadata, before any tensor is read."""

    path: Path
    config: ModelConfig
    gguf: GgufFile | None

    @classmethod
    def open(cls, path: Path | str, max_context: int | None = None) -> Checkpoint:
        """Read a model's configuration; ``max_context`` lowers its context. Raises ``ModelInvalid``.

        Logs a warning for each sampling setting in the model's files that is not supported.
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
        """Locate every tensor of the model. Raises ``ModelInvalid``."""
        found = read_headers(self.path) if self.gguf is None else tensors_of(self.gguf, self.config)
        return Weights(self.path, self.config, found)

    def tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer. If a GGUF file's own cannot be built, load the tokenizer.json next to the file.

        Raises ``ModelInvalid`` when there is none, it is damaged, or it has ids outside the model's vocabulary.
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
        """Load the model's chat template. For a GGUF file without one, load the template next to it, provided that a
        tokenizer.json is there, too.

        Raises ``ModelInvalid`` for a template that is damaged or does not parse.
        """
        if self.gguf is None:
            return Chat.of(chat_files.of_folder(self.path), tokenizer)
        source = chat_files.of_gguf(self.gguf)
        beside = self.path.parent
        if source is None and (beside / TOKENIZER_FILE).exists():
            source = chat_files.of_folder(beside)
        return Chat.of(source, tokenizer)
