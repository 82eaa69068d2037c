"""``python -m services.engine doctor``: checks whether this machine can run the configured engine, and what to fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.common.edge.listener import Listener
from services.common.errors import ModelInvalid
from services.doctor import addresses, command, devices, namespaces, resources, roundtrip, stack
from services.doctor.check import Check, Finding, failed, ok, skipped
from services.doctor.machine import Machine
from services.engine.api.servicer import SERVICE
from services.engine.config import LOCAL, Config
from services.engine.metrics import PREFIX
from services.engine.model.backend import GPU
from services.engine.model.checkpoint import Checkpoint
from services.launch import typed


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 if no check failed, 1 if one did. Raises InvalidConfiguration for invalid flags."""
    options = command.options("services.engine", "KV-cache daemon", words)
    config = Config.read(options.rest, environ)
    machine = Machine(environ)
    title = f"The engine with --device {config.device} --model {config.model} --kvcache {config.kvcache}:"
    return command.report(machine, title, checks(machine, config, options.peer), options.json)


def checks(machine: Machine, config: Config, peer: int | None) -> list[Check]:
    """Returns the checks for an engine with these settings."""
    needed = config.device == GPU
    only = config.gpu if needed else None
    found = stack.ask(machine) if needed or devices.has_nodes(machine) else stack.NOT_ASKED
    requests = config.limits.max_batch + config.limits.max_queue
    own = addresses.Running("engine", SERVICE, PREFIX, config.tls)
    metrics: list[Check] = []
    if (bound := config.metrics) is not None:
        metrics = [Check("metrics", lambda: addresses.metrics(machine, bound, own))]
    return [
        *(Check("listen", lambda at=at: addresses.listen(machine, at, own)) for at in config.listeners),  # type: ignore[misc]
        *metrics,
        Check("open files", lambda: resources.open_files(machine, requests)),
        Check("model", lambda: _model(config)),
        Check("KV-cache daemon", lambda: _daemon(machine, config)),
        Check("namespaces", lambda: namespaces.namespaces(machine, peer, needed)),
        Check("GPU device nodes", lambda: devices.device_nodes(machine, found, needed)),
        Check("GPUs that are visible", lambda: devices.visible_devices(machine, needed, peer)),
        Check("CuPy", lambda: stack.cupy(found, needed)),
        Check("GPU runtime", lambda: stack.runtime(found, needed, only)),
        Check("kernel compiler", lambda: stack.compiler(machine, found, needed)),
        Check("kernel cache", lambda: stack.kernel_cache(machine, found, needed)),
        Check("GPU memory", lambda: stack.device_memory(found, None, needed)),
        Check("sharing of GPU memory", lambda: devices.ipc_mode(machine, found, needed)),
        Check("GPU memory, for real", lambda: roundtrip.gpu_round_trip(machine, found, needed, only)),
    ]


def _model(config: Config) -> Finding:
    try:
        checkpoint = Checkpoint.open(config.model, config.max_context)
        tokenizer = checkpoint.tokenizer()
        size, model = checkpoint.weights().stored_bytes, checkpoint.config
    except ModelInvalid as error:
        return failed(error.message, "give a Hugging Face folder or a GGUF file with --model: docs/models.md")
    shape = f"{model.layers} layers, {model.kv_heads} KV heads of {model.head_dim}"
    try:
        chat = "a chat template" if checkpoint.chat(tokenizer).has_template else "no chat template"
    except ModelInvalid as error:
        chat = f"an unusable chat template ({error.message})"
    return ok(f"{config.model}: {shape}, {size} bytes of weights, {chat}")


def _daemon(machine: Machine, config: Config) -> Finding:
    if config.kvcache == LOCAL:
        return skipped("--kvcache local: the pages are the engine's own")
    return addresses.call(
        machine, Listener.parse(config.kvcache), "--kvcache", f"start the daemon ({typed('services.kvcache')})"
    )
