"""The engine's settings from flags, environment and file, and the default pool id."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pwd
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rocmforge.client.demands import MAX_FILL_WAIT_S
from rocmforge.client.transport.tls import ClientTls, client_tls
from services.common import settings
from services.common.access.identity import Identity
from services.common.access.policy import Allowance, Policy
from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration, ModelInvalid
from services.common.listening import LIVE, Listening, file_path, listen, runtime_dir
from services.common.settings import Program, setting
from services.common.values import Kind, byte_size, one_of, seconds, whole
from services.engine.api.roles import INCLUDES, role_allowance
from services.engine.checkpoint.gguf.model import is_gguf
from services.engine.checkpoint.gguf.shards import files_of, name_of
from services.engine.delivery.registry import RegistryLimits
from services.engine.model.backend import ASYNC_STEPS, AUTO, CPU, DEVICES, DTYPES, KV_DTYPES, OFF, ON, REPLAYS
from services.engine.scheduling.queue.admission import Limits
from services.launch import typed

PORT = 50051
LOCAL = "local"
ROCMFORGE, VLLM = "rocmforge", "vllm"
BUNDLED_MODEL = Path(__file__).parents[2] / "models" / "shakespeare"

#: The format of K and V in a page: their layout and arithmetic. Change it with either, so that engines of different
#: versions never share pages.
KV_FORMAT = 1

_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 64


PROGRAM = Program(
    f"{typed('services.engine')} [serve]",
    "The inference engine: generates text with K and V in pages of the KV-cache daemon.\n"
    f"`{typed('services.engine')} doctor` checks whether this machine can run the engine.",
    "ROCMFORGE_ENGINE",
)


def kvcache_target(text: str) -> str:
    """A daemon's address, or ``local``. Raises ValueError."""
    if text == LOCAL:
        return text
    try:
        listener = Listener.parse(text)
    except InvalidConfiguration as error:
        raise ValueError("expected local, unix:/absolute/path or host:port") from error
    if not listener.local_only:
        raise ValueError("the daemon must be on this host, because the engine maps its memory")
    return str(listener)


def _uid(text: str) -> int:
    """A user's number, from it or from the name. Raises ValueError."""
    if text.isascii() and text.isdigit() and len(text) <= 10:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise ValueError("expected the name or the number of a user") from None


def _engine_name(text: str) -> str:
    if not 1 <= len(text) <= 128:
        raise ValueError("expected 1 to 128 characters")
    return text


def _pool_id(text: str) -> str:
    if not 1 <= len(text) <= 128:
        raise ValueError("expected 1 to 128 characters")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Listening):
    """All settings. Times in seconds; ``kvcache`` is ``local`` or the daemon's address; ``echo`` has all settings for a
    log event.
    """

    listeners: list[Listener] = listen("engine.sock", PORT)
    allow: list[Allowance] = setting(
        role_allowance,
        list,
        "a role for an identity, operator=uid:N, operator=cn:NAME or operator=token:NAME: an operator may drain the "
        "engine; repeatable; the engine's own user may",
        many=True,
        metavar="R",
    )
    lame_duck_s: float = setting(
        seconds(0, 3600),
        0.0,
        "seconds for which a drain, or SIGTERM, still accepts requests: readiness is NOT_SERVING at once, and routers "
        "need time to notice",
        name="lame-duck",
        metavar="S",
    )
    tokens: Path | None = setting(
        file_path,
        None,
        "file of hashed tokens, NAME:SHA-256 a line: callers over TCP without a client certificate must show one; "
        f"`{typed('services.engine')} token NAME` makes one",
        metavar="FILE",
    )
    model: Path = setting(
        file_path,
        BUNDLED_MODEL,
        "folder of a Hugging Face checkpoint, or a GGUF file (the first one of a sharded model)",
        metavar="PATH",
    )
    max_context: int | None = setting(
        whole(1, 1 << 24),
        None,
        "most tokens of a request, prompt plus completion; default: the model's trained context",
        metavar="N",
    )
    kvcache: str = setting(
        Kind(kvcache_target, "local, unix:/path or host:port"),
        lambda: f"unix:{runtime_dir() / 'kvcache.sock'}",
        "the KV-cache daemon, on this host: unix:/path or host:port; or `local` for private pages without a daemon",
        metavar="ADDR",
    )
    kvcache_owner: int | None = setting(
        Kind(_uid, "user or uid"),
        None,
        "user that the daemon runs as, if neither this one nor root: who else may own its socket and arenas",
        metavar="USER",
    )
    kvcache_ca: Path | None = setting(
        file_path,
        None,
        "PEM CA certificate that must have signed the daemon's: TLS over TCP",
        metavar="FILE",
    )
    kvcache_cert: Path | None = setting(
        file_path, None, "PEM certificate that the engine shows to the daemon", metavar="FILE"
    )
    kvcache_key: Path | None = setting(file_path, None, "PEM private key of --kvcache-cert", metavar="FILE")
    kvcache_name: str = setting(
        Kind(str, "host name"),
        "",
        "name that the daemon's certificate must have; default: the host in --kvcache",
        metavar="NAME",
    )
    patience_s: float = setting(
        seconds(0, 86400),
        60.0,
        "seconds that requests wait for an unavailable daemon before they fail",
        name="kvcache-patience",
        metavar="S",
    )
    unready_after_s: float = setting(
        seconds(0, 86400),
        5.0,
        "seconds without the daemon after which readiness is NOT_SERVING, so that routers send requests elsewhere; "
        "--kvcache-patience if that is shorter",
        name="unready-after",
        metavar="S",
    )
    pool_id: str | None = setting(
        Kind(_pool_id, "1 to 128 characters"),
        None,
        "engines with the same pool id share cached pages, and must have the same weights; "
        "default: the model's name and a hash of its files",
        metavar="ID",
    )
    # BLAS threads spin while they wait for each other: a second thread slows a small model down, several times on busy
    # cores. With some BLAS kernels, results also depend bitwise on the number of threads.
    cpu_threads: int = setting(
        whole(1, 1024),
        1,
        "BLAS threads; more than 1 pays off from about 100 M parameters",
        metavar="N",
    )
    device: str = setting(
        one_of(*DEVICES), CPU, "compute device, `cpu` or `gpu`; must match the daemon's --device", metavar="D"
    )
    gpu: int = setting(whole(0, 255), 0, "GPU ordinal, as numbered by the runtime", metavar="N")
    dtype: str | None = setting(
        one_of(*DTYPES),
        None,
        f"dtype of weights and activations: {', '.join(DTYPES)}; default: f32 on a CPU, the checkpoint's on a GPU",
        metavar="T",
    )
    kv_dtype: str | None = setting(
        one_of(*KV_DTYPES), None, f"dtype of K and V in pages: {', '.join(KV_DTYPES)}; default: --dtype", metavar="T"
    )
    replay: str | None = setting(
        one_of(*REPLAYS),
        None,
        f"how recurring GPU steps are launched, {', '.join(REPLAYS)}: replay reduces host time, which limits small "
        "models; default: auto, which is tapes, or off for int8 pages",
        metavar="HOW",
    )
    tuning: str = setting(
        Kind(str, "path, auto or off"),
        AUTO,
        f"the kernels measured to be best on this GPU: a file of `{typed('services.doctor')} first-light`, `{OFF}`, or "
        f"`{AUTO}`: the one that first light left in the cache directory, if it did",
        metavar="PATH",
    )
    engine_name: str = setting(
        Kind(_engine_name, "1 to 128 characters"),
        socket.gethostname,
        "name of this replica in the daemon's log, in KV events and in `rocmforge top`; default: the host's, which in "
        "Kubernetes is the pod's",
        metavar="NAME",
    )
    metrics_names: str = setting(
        one_of(ROCMFORGE, VLLM),
        ROCMFORGE,
        f"`{VLLM}` also exports metrics under vLLM's names, which routers read",
        metavar="X",
    )
    async_steps: str = setting(
        one_of(*ASYNC_STEPS),
        AUTO,
        "whether the next step is prepared and launched while the device computes one, `on` or `off`: tokens are the "
        "same, and the host's time is hidden; default: auto, which is on with a GPU",
        metavar="HOW",
    )
    page_size: int = setting(whole(1, 4096), 16, "tokens per page", metavar="N")
    max_batch: int = setting(whole(1, 1024), 32, "most requests that run at once", metavar="N")
    max_step_tokens: int = setting(whole(1, 1 << 20), 512, "most tokens computed in one step", metavar="N")
    max_queue: int = setting(whole(0, 1 << 20), 1024, "most requests that wait in addition", metavar="N")
    max_queue_tokens: int = setting(whole(1, 1 << 40), 1 << 20, "most tokens of all waiting requests", metavar="N")
    priority_step_s: float = setting(
        seconds(0, 86400),
        1.0,
        "one point of priority is worth being queued this many seconds earlier; 0 ignores priorities",
        name="priority-step",
        metavar="S",
    )
    fill_wait_s: float = setting(
        seconds(0, MAX_FILL_WAIT_S),
        10.0,
        "most seconds that a request waits for pages to be copied from the daemon's lower tiers; the daemon ends the "
        "wait as soon as computing them would have been faster. 0: requests never wait",
        name="fill-wait",
        metavar="S",
    )
    messages_per_s: int = setting(
        whole(1, 1 << 20),
        4000,
        "streamed messages per second, over all streams; above this, several tokens share a message. No message is "
        "delayed more than 0.1 s; first tokens and ends are never delayed",
        metavar="N",
    )
    generation_ttl_s: float = setting(
        seconds(1, 30 * 86400),
        3600.0,
        "seconds that a submitted generation is kept after it ends",
        name="generation-ttl",
        metavar="S",
    )
    generation_count: int = setting(
        whole(1, 1 << 20), 1024, "most finished generations kept; the oldest are dropped first", metavar="N"
    )
    generation_memory: int = setting(
        byte_size,
        "64MiB",
        "memory for the output of submitted generations, live ones included; the oldest finished are dropped first",
        metavar="SIZE",
    )
    pool_pages: int | None = setting(
        whole(1, 1 << 24),
        None,
        "pages of the daemon's pool if this engine creates it; default: the daemon's choice",
        metavar="N",
    )
    local_pages: int = setting(whole(1, 1 << 24), 512, "pages with --kvcache local", metavar="N")
    echo: dict[str, Any]

    @classmethod
    def read(cls, arguments: list[str] | None, environ: Mapping[str, str], more_help: str = "") -> Config:
        """Read the settings. Precedence: flags, environment, file, defaults. Raises InvalidConfiguration.

        ``more_help`` is appended to the description that --help prints.
        """
        program = dataclasses.replace(PROGRAM, description=PROGRAM.description + more_help)
        values = settings.read(cls, program, arguments, environ)
        config = cls(**values.fields, echo=values.echo())
        _check_budget(config.max_batch, config.max_step_tokens)
        config.check_exposure(tokens=config.tokens is not None)
        _check_tls(config.kvcache, config.kvcache_tls, config)
        return config

    @property
    def kvcache_tls(self) -> ClientTls | None:
        """How to speak TLS to the daemon, None without. Raises InvalidConfiguration if a file is missing."""
        return client_tls(
            self.kvcache_ca,
            self.kvcache_cert,
            self.kvcache_key,
            self.kvcache_name,
            flags=("--kvcache-ca", "--kvcache-cert", "--kvcache-key"),
        )

    @property
    def policy(self) -> Policy:
        """Who may drain the engine."""
        return Policy(Identity.of_uid(os.geteuid()), self.allow, INCLUDES)

    #: The fields that can change while the engine runs.
    LIVE: ClassVar[frozenset[str]] = LIVE | {
        *("allow", "lame_duck_s", "generation_ttl_s", "generation_count", "generation_memory"),
    }

    @property
    def asynchronous(self) -> bool:
        """Whether steps are asynchronous. On a CPU the host's work cannot be hidden: it is the host that computes."""
        return self.async_steps == ON or (self.async_steps == AUTO and self.device != CPU)

    @property
    def limits(self) -> Limits:
        """The scheduler's limits."""
        return Limits(
            max_batch=self.max_batch,
            max_step_tokens=self.max_step_tokens,
            max_queue=self.max_queue,
            max_queue_tokens=self.max_queue_tokens,
            priority_step_s=self.priority_step_s,
            fill_wait_s=self.fill_wait_s,
        )

    @property
    def retention(self) -> RegistryLimits:
        """The limits on kept generations."""
        return RegistryLimits(self.generation_ttl_s, self.generation_count, self.generation_memory)


def _check_tls(target: str, tls: ClientTls | None, config: Config) -> None:
    if tls is None and config.kvcache_name:
        raise InvalidConfiguration("--kvcache-name needs --kvcache-ca", field="--kvcache-name")
    if tls is not None and (target == LOCAL or target.startswith("unix:")):
        raise InvalidConfiguration(f"--kvcache-ca: --kvcache {target} is not a TCP address", field="--kvcache-ca")


def _check_budget(max_batch: int, max_step_tokens: int) -> None:
    if max_step_tokens <= max_batch:
        raise InvalidConfiguration(
            f"--max-step-tokens {max_step_tokens}: must be more than --max-batch, {max_batch}: a step needs a token "
            "for each decoding request and at least one for a prompt",
            field="--max-step-tokens",
            limit=max_batch,
        )


def model_id(path: Path) -> str:
    """Returns the model's name: that of its folder, or of its GGUF file."""
    return name_of(path)


def default_pool_id(path: Path, dtype: str = "f32", kv_dtype: str = "f32") -> str:
    """Returns the model's name and a hash that differs between checkpoints and between dtypes. Raises ModelInvalid.

    The hash covers config.json and each weights file, or each GGUF file: its name, its size, and its bytes; above
    64 MiB only 64 blocks of 64 KiB spread evenly over the file, the first of which holds its header. Fine-tuning
    changes every tensor, so it changes these blocks.
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
