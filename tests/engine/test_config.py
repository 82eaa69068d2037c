"""Flags, environment, limits, and the name under which a model's pages are shared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.common.errors import InvalidConfiguration, ModelInvalid
from services.engine.config import BUNDLED_MODEL, Config, default_pool_id, kvcache_target, model_id
from services.engine.delivery.registry import RegistryLimits
from services.engine.model.backend import REPLAYS, on_host
from services.engine.scheduling.queue.admission import Limits


def test_defaults() -> None:
    config = Config.read([], {})
    assert config.limits == Limits(max_batch=32, max_step_tokens=512, max_queue=1024, fill_wait_s=10.0)
    assert (config.page_size, config.patience_s, config.pool_id, config.grace_s) == (16, 60.0, None, 25.0)
    assert config.kvcache.startswith("unix:/") and config.kvcache.endswith("kvcache.sock")
    assert [str(listener) for listener in config.listeners][1] == "127.0.0.1:50051"
    assert config.limits.max_queue_tokens == 1 << 20
    assert config.retention == RegistryLimits(ttl_s=3600.0, count=1024, memory=64 << 20)
    assert config.model == BUNDLED_MODEL and config.max_context is None
    assert Config.read(["--max-context", "4096"], {}).max_context == 4096


def test_flags_beat_the_environment() -> None:
    environ = {"ROCMFORGE_ENGINE_MAX_BATCH": "3", "ROCMFORGE_ENGINE_KVCACHE": "local"}
    config = Config.read(["--max-batch", "5"], environ)
    assert config.limits.max_batch == 5 and config.kvcache == "local"


def test_a_file_sets_what_neither_flags_nor_the_environment_do(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('max-batch = 2\nmax-queue = 2\nkvcache = "local"\npage-size = 8\nkvcache-patience = 1.5')
    environ = {"ROCMFORGE_ENGINE_CONFIG": str(file), "ROCMFORGE_ENGINE_MAX_QUEUE": "3"}
    config = Config.read(["--max-batch", "5"], environ)
    assert config.limits == Limits(max_batch=5, max_step_tokens=512, max_queue=3, fill_wait_s=10.0)
    assert (config.kvcache, config.page_size, config.patience_s) == ("local", 8, 1.5)
    assert config.echo["config"] == str(file)
    assert config.echo["origins"] == {
        "kvcache": "file",
        "kvcache-patience": "file",
        "max-batch": "flag",
        "max-queue": "environment",
        "page-size": "file",
    }
    file.write_text("max-batch = true")
    with pytest.raises(InvalidConfiguration, match=r"engine\.toml: max-batch: is a boolean; expected an integer"):
        Config.read([], environ)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--max-batch", "0", "1 to 1024"),
        ("--max-step-tokens", "0", "1 to"),
        ("--max-queue", "-1", "0 to"),
        ("--max-queue-tokens", "0", "1 to"),
        ("--generation-ttl", "0", "1 to 2.592e+06"),
        ("--generation-count", "0", "1 to"),
        ("--generation-memory", "much", "256MiB"),
        ("--max-context", "0", "1 to"),
        ("--page-size", "5000", "1 to 4096"),
        ("--local-pages", "0", "1 to"),
        ("--pool-pages", "0", "1 to"),
        ("--kvcache-patience", "-1", "0 to"),
        ("--pool-id", "x" * 129, "1 to 128"),
        ("--kvcache", "nowhere", "local, unix:"),
        ("--kvcache", "10.0.0.1:50052", "on this host"),
        ("--listen", "0.0.0.0:1", "--insecure"),
        ("--metrics", "0.0.0.0:1", "--insecure"),
        ("--otlp-endpoint", "collector:4317", "http://host:port"),
        ("--otlp-endpoint", "http://collector", "http://host:port"),
        ("--otlp-endpoint", "http://collector:4317/v1/traces", "http://host:port"),
        ("--otlp-endpoint", "http://me:secret@collector:4317", "http://host:port"),
        ("--otlp-endpoint", "http://collector:4317", "without TLS, which requires --insecure"),
        ("--trace-ratio", "1.5", "0 to 1"),
        ("--metrics", "unix:/run/m.sock", "expected host:port with a port of 0 to 65535"),
        ("--metrics", "unix:9464", "expected host:port with a port of 0 to 65535"),
        ("--metrics", ":9464", "expected host:port with a port of 0 to 65535"),
        ("--metrics", "localhost:65536", "expected host:port with a port of 0 to 65535"),
        ("--metrics", "localhost:" + "9" * 5000, "expected host:port with a port of 0 to 65535"),
        ("--max-step-tokens", "32", "more than --max-batch, 32"),
        ("--priority-step", "-1", "0 to"),
    ],
)
def test_a_bad_value_is_named_with_its_flag_and_limit(flag: str, value: str, says: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        Config.read([flag, value], {})
    assert flag in caught.value.message and says in caught.value.message


def test_metrics_are_off_or_where_they_are_told_to_be(tmp_path: Path) -> None:
    assert Config.read([], {}).metrics is None
    assert str(Config.read(["--metrics", "localhost:9464"], {}).metrics) == "localhost:9464"
    assert str(Config.read([], {"ROCMFORGE_ENGINE_METRICS": "[::1]:9464"}).metrics) == "[::1]:9464"
    file = tmp_path / "engine.toml"
    file.write_text('metrics = "127.0.0.1:9464"\npriority-step = 2.5')
    config = Config.read(["--config", str(file)], {})
    assert str(config.metrics) == "127.0.0.1:9464" and config.limits.priority_step_s == 2.5
    assert str(Config.read(["--metrics", "0.0.0.0:0", "--insecure"], {}).metrics) == "0.0.0.0:0"
    for endpoint in ("http://127.0.0.1:4317", "http://[::1]:4317", "https://collector:4317"):
        assert Config.read(["--otlp-endpoint", endpoint], {}).otlp_endpoint == endpoint


@pytest.mark.parametrize("address", ["local", "unix:/run/x.sock", "127.0.0.1:50052", "localhost:1", "[::1]:5"])
def test_addresses_of_the_daemon(address: str) -> None:
    assert kvcache_target(address) == address


def copy_of(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(BUNDLED_MODEL, folder / name))


def test_the_pool_id_names_the_model_and_follows_its_weights(tmp_path: Path) -> None:
    one, other = copy_of(tmp_path / "one", "shakespeare"), copy_of(tmp_path / "other", "shakespeare")
    assert default_pool_id(one) == default_pool_id(other) == default_pool_id(BUNDLED_MODEL)
    assert default_pool_id(one).startswith("shakespeare@")
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert default_pool_id(other) != default_pool_id(one)


def test_a_gguf_file_is_called_by_its_name_and_hashed_whole(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF and more")
    before = default_pool_id(file)
    assert model_id(file) == "tiny.Q8_0" and before.startswith("tiny.Q8_0@")
    assert default_pool_id(file, "bf16", "bf16") != before
    file.write_bytes(b"GGUF and less")
    assert default_pool_id(file) != before
    (tmp_path / "config.json").write_text("another model's")
    assert default_pool_id(file) != before
    with pytest.raises(ModelInvalid, match=r"none\.gguf cannot be read"):
        default_pool_id(tmp_path / "none.gguf")


def test_the_pool_id_follows_the_configuration(tmp_path: Path) -> None:
    one = copy_of(tmp_path, "shakespeare")
    before = default_pool_id(one)
    config = one / "config.json"
    config.write_text(config.read_text().replace("}", " }", 1))
    assert default_pool_id(one) != before


def test_large_files_are_sampled_from_their_header_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engine.config._WHOLE_FILE_BYTES", 1 << 20)
    one = copy_of(tmp_path, "shakespeare")
    weights = one / "model.safetensors"
    seen = {default_pool_id(one)}
    for at in (9, weights.stat().st_size - 1):
        data = bytearray(weights.read_bytes())
        data[at] ^= 1
        weights.write_bytes(data)
        seen.add(default_pool_id(one))
    weights.write_bytes(data + b"x")
    seen.add(default_pool_id(one))
    assert len(seen) == 4


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"config\.json cannot be read: No such file"):
        default_pool_id(tmp_path / "none")


def test_how_steps_are_replayed() -> None:
    assert Config.read([], {}).replay is None
    assert [Config.read(["--replay", how], {}).replay for how in REPLAYS] == [*REPLAYS]
    with pytest.raises(InvalidConfiguration, match="--replay yes"):
        Config.read(["--replay", "yes"], {})
    for how in ("tapes", "graphs"):
        with pytest.raises(InvalidConfiguration, match=f"--replay {how}: not available on a CPU"):
            on_host(None, None, how)
    assert {on_host(None, None, how).name for how in ("off", "auto", None)} == {"numpy"}


def test_a_tuning_file_is_for_a_gpu() -> None:
    assert (Config.read([], {}).tuning, Config.read(["--tuning", "t.json"], {}).tuning) == ("auto", "t.json")
    with pytest.raises(InvalidConfiguration, match=r"--tuning t.json: not available on a CPU"):
        on_host(None, None, None, "t.json")
    for how in ("auto", "off"):
        assert on_host(None, None, None, how).name == "numpy"
