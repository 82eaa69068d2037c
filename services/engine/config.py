"""The engine's settings: flags, environment, file, limits; and what names a model's pages."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import settings
from services.common.errors import InvalidConfiguration, ModelInvalid
from services.common.listening import Listening, file_path, listen, runtime_dir
from services.common.serving import Listener
from services.common.settings import Program, setting
from services.common.values import Kind, byte_size, one_of, seconds, whole
from services.engine.checkpoint.gguf.model import is_gguf
from services.engine.checkpoint.gguf.shards import files_of, name_of
from services.engine.delivery.registry import RegistryLimits
from services.engine.model.backend import CPU, DEVICES, DTYPES, KV_DTYPES, REPLAYS
from services.engine.scheduling.admission import Limits

PORT = 50051
LOCAL = "local"
BUNDLED_MODEL = Path(__file__).parents[2] / "models" / "shakespeare"

#: What K and V in a page mean: the layout and the arithmetic that made them. A change of either is a new number, so
#: that engines of two versions never read each other's pages.
KV_FORMAT = 1

_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 64


PROGRAM = Program(
    "python -m services.engine [serve]",
    "The inference engine: text in, text out, its K and V in pages of the KV-cache daemon.\n"
    "`python -m services.engine doctor` checks whether this machine can run it.",
    "ROCMFORGE_ENGINE",
)


def kvcache_target(text: str) -> str:
    """A daemon's address, or ``local``. Raises ValueError."""
    if text == LOCAL:
        return text
    try:
        listener = Listener.parse(text)
    except InvalidConfiguration as error:
        raise ValueError("want local, unix:/absolute/path or host:port") from error
    if not listener.local_only:
        raise ValueError("the daemon's memory is shared by mapping it, so it must be on this host")
    return str(listener)


def _pool_id(text: str) -> str:
    if not 1 <= len(text) <= 128:
        raise ValueError("want 1 to 128 characters")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Listening):
    """Everything that can be set. Times in seconds; ``kvcache`` is ``local`` or the daemon's address; ``echo`` is all
    of it for a log event.
    """

    listeners: list[Listener] = listen("engine.sock", PORT)
    model: Path = setting(
        file_path,
        BUNDLED_MODEL,
        "folder of a Hugging Face checkpoint, or a GGUF file, of several the first",
        metavar="PATH",
    )
    max_context: int | None = setting(
        whole(1, 1 << 24),
        None,
        "tokens of a request, prompt and completion together, at most; default: what the model was trained for",
        metavar="N",
    )
    kvcache: str = setting(
        Kind(kvcache_target, "local, unix:/path or host:port"),
        lambda: f"unix:{runtime_dir() / 'kvcache.sock'}",
        "the KV-cache daemon, on this host: unix:/path, host:port, or `local` for pages of the engine's own",
        metavar="ADDR",
    )
    patience_s: float = setting(
        seconds(0, 86400),
        60.0,
        "seconds that requests wait for a daemon that is gone before they fail",
        name="kvcache-patience",
        metavar="S",
    )
    pool_id: str | None = setting(
        Kind(_pool_id, "1 to 128 characters"),
        None,
        "engines that name the same pool share cached pages, and must have the same weights; "
        "default: the model's name and a hash of its files",
        metavar="ID",
    )
    # BLAS's threads spin while they wait for each other: a small model loses by a second one, several times over on
    # busy cores. And with some kernels the bits of a product depend on their number.
    cpu_threads: int = setting(
        whole(1, 1024),
        1,
        "threads of the linear algebra library; more are worth it from about 100 M parameters on",
        metavar="N",
    )
    device: str = setting(
        one_of(*DEVICES), CPU, "what computes: `cpu` or `gpu`; the daemon's must be the same", metavar="D"
    )
    gpu: int = setting(whole(0, 255), 0, "which GPU, as the runtime numbers them", metavar="N")
    dtype: str | None = setting(
        one_of(*DTYPES),
        None,
        f"weights and activations: {', '.join(DTYPES)}; default: f32 on a CPU, on a GPU as the checkpoint is",
        metavar="T",
    )
    kv_dtype: str | None = setting(
        one_of(*KV_DTYPES), None, f"K and V in pages: {', '.join(KV_DTYPES)}; default: as --dtype", metavar="T"
    )
    replay: str | None = setting(
        one_of(*REPLAYS),
        None,
        f"how a GPU's steps that come again are queued, {', '.join(REPLAYS)}: less work for the host, which bounds "
        "small models; graphs are for NVIDIA's alone; default: tapes, off for int8 pages",
        metavar="HOW",
    )
    page_size: int = setting(whole(1, 4096), 16, "tokens in a page", metavar="N")
    max_batch: int = setting(whole(1, 1024), 32, "requests that run at a time", metavar="N")
    max_step_tokens: int = setting(whole(1, 1 << 20), 512, "tokens computed in one step", metavar="N")
    max_queue: int = setting(whole(0, 1 << 20), 1024, "requests that may wait beyond those running", metavar="N")
    max_queue_tokens: int = setting(whole(1, 1 << 40), 1 << 20, "tokens that these may have together", metavar="N")
    priority_step_s: float = setting(
        seconds(0, 86400),
        1.0,
        "seconds of having come earlier that a point of priority is worth: so much later may come who overtakes, "
        "for each point that it is above; 0 ignores priorities",
        name="priority-step",
        metavar="S",
    )
    messages_per_s: int = setting(
        whole(1, 1 << 20),
        4000,
        "streamed responses a second, over all streams: beyond, several tokens of a stream share one; none waits "
        "for more than 0.1 s, first tokens and ends for nothing",
        metavar="N",
    )
    generation_ttl_s: float = setting(
        seconds(1, 30 * 86400),
        3600.0,
        "seconds that a submitted generation is kept when it is over",
        name="generation-ttl",
        metavar="S",
    )
    generation_count: int = setting(whole(1, 1 << 20), 1024, "such generations kept, the newest", metavar="N")
    generation_memory: int = setting(
        byte_size,
        "64MiB",
        "what the output of submitted generations may take, live ones included; the oldest go first",
        metavar="SIZE",
    )
    pool_pages: int | None = setting(
        whole(1, 1 << 24),
        None,
        "pages of the daemon's pool, if this engine is the first to name it; default: what the daemon says",
        metavar="N",
    )
    local_pages: int = setting(whole(1, 1 << 24), 512, "pages of an engine with --kvcache local", metavar="N")
    echo: dict[str, Any]

    @classmethod
    def read(cls, arguments: list[str] | None, environ: Mapping[str, str], more_help: str = "") -> Config:
        """Flags over environment over file over defaults; ``more_help`` ends what --help says of the engine.

        Raises InvalidConfiguration.
        """
        program = dataclasses.replace(PROGRAM, description=PROGRAM.description + more_help)
        values = settings.read(cls, program, arguments, environ)
        config = cls(**values.fields, echo=values.echo())
        _check_budget(config.max_batch, config.max_step_tokens)
        config.check_exposure()
        return config

    @property
    def limits(self) -> Limits:
        """What of these the scheduler goes by."""
        return Limits(
            max_batch=self.max_batch,
            max_step_tokens=self.max_step_tokens,
            max_queue=self.max_queue,
            max_queue_tokens=self.max_queue_tokens,
            priority_step_s=self.priority_step_s,
        )

    @property
    def retention(self) -> RegistryLimits:
        """What of these submitted generations are kept by."""
        return RegistryLimits(self.generation_ttl_s, self.generation_count, self.generation_memory)


def _check_budget(max_batch: int, max_step_tokens: int) -> None:
    if max_step_tokens <= max_batch:
        raise InvalidConfiguration(
            f"--max-step-tokens {max_step_tokens}: must be more than --max-batch, {max_batch}: a step has a token for "
            "each decoding request and at least one for a prompt",
            field="--max-step-tokens",
            limit=max_batch,
        )


def model_id(path: Path) -> str:
    """What the model is called: the name of its folder, or of its GGUF file."""
    return name_of(path)


def default_pool_id(path: Path, dtype: str = "f32", kv_dtype: str = "f32") -> str:
    """The model's name and a hash that two different checkpoints do not share, nor two types. Raises ModelInvalid.

    Hashed are config.json and each weights file, or each GGUF file: its name and size and all of its bytes, or, above
    64 MiB, 64 blocks of 64 KiB spread over the file, the first of which holds its header. Fine-tuning changes every
    tensor, so it changes the blocks.
    """
    digest = hashlib.blake2b(f"kv format {KV_FORMAT} {dtype} {kv_dtype}".encode(), digest_size=8)
    try:
        for part in files_of(path) if is_gguf(path) else [path / "config.json", *sorted(path.glob("*.safetensors"))]:
            size = part.stat().st_size
            digest.update(f"\0{part.name}\0{size}\0".encode())
            with part.open("rb") as file:
                for at in _hashed_blocks(size):
                    file.seek(at)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelInvalid(f"{error.filename} cannot be read: {error.strerror}") from error
    return f"{model_id(path)[:100]}@{digest.hexdigest()}"


def _hashed_blocks(size: int) -> range | list[int]:
    if size <= _WHOLE_FILE_BYTES:
        return range(0, size, _SAMPLE_BYTES)
    return [(size - _SAMPLE_BYTES) * nth // (_SAMPLES - 1) for nth in range(_SAMPLES)]
