"""The terminal's commands against an engine: what they print, how they fail, and a batch that can resume."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine import cli
from services.engine.cli.progress import Progress
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import FinishReason, Outcome, Sequence
from tests.engine.fakes import Clock, make_request
from tests.engine.running import RunningEngine
from tests.generation import collect, request
from tests.polling import until
from tests.processes import ROOT

Engine = RunningEngine
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    limits = ["--max-batch", "4", "--max-queue", "4", "--local-pages", "256"]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits)
    yield one.start()
    one.close()


def run(engine: Engine, command: str, *arguments: str) -> int:
    return cli.run(command, [*arguments, "--target", engine.address])


GREEDY = ["--temperature", "0", "--max-tokens", "12"]


def expected(engine: Engine, prompt: str = "ROMEO:", max_tokens: int = 12) -> str:
    return collect(engine.stub.Generate(request(prompt, max_tokens, stopping={"ignore_eos": False})))[0]


def printed(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


# --- one generation ---------------------------------------------------------------------------------------------------


def test_submit_watch_get_status_and_cancel(engine: Engine, capsys: Captured) -> None:
    text = printed(expected(engine))
    assert run(engine, "submit", "ROMEO:", *GREEDY) == 0
    name = capsys.readouterr().out.strip()
    assert run(engine, "watch", name, "--show-usage") == 0
    shown = capsys.readouterr()
    assert shown.out == text and shown.err.startswith("length; prompt 2 tokens") and "seed" in shown.err
    assert run(engine, "get", name) == 0
    assert capsys.readouterr().out == text
    assert run(engine, "get", name, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert printed(whole["text"]) == text and len(whole["token_ids"]) == 12
    assert run(engine, "watch", name, "--from-token", "12") == 0
    assert capsys.readouterr().out == ""
    assert run(engine, "status", name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{name}: done (length)" and "completion 12 tokens" in lines[1]
    assert lines[2].startswith("kept for 3") and lines[2].endswith(" s more")
    assert run(engine, "cancel", name) == 0
    assert capsys.readouterr() == ("", "")


def test_the_same_submission_again_and_another(engine: Engine, capsys: Captured) -> None:
    again = ["submit", "ROMEO:", *GREEDY, "--id", "mine", "--timeout", "60", "--retention", "100"]
    assert run(engine, *again) == run(engine, *again) == 0
    assert capsys.readouterr().out == "mine\nmine\n"
    assert run(engine, *again, "--seed", "5") == 1
    assert capsys.readouterr().err.startswith("rocmforge submit: REQUEST_EXISTS: ")
    engine.idle()
    kept = engine.stub.GetGeneration(pb.GetGenerationRequest(request_id="mine")).generation
    assert kept.finish.reason == pb.FINISH_REASON_LENGTH


SAMPLING = ["--temperature", "1", "--seed", "9", "--max-tokens", "6", "--repetition-penalty", "1.3"]
SAMPLING += [
    "--presence-penalty",
    "0.1",
    "--frequency-penalty",
    "0.2",
    "--logit-bias",
    "199=-3",
    "--logit-bias",
    "33=2",
]


def sampled(n: int = 0) -> pb.GenerateRequest:
    sampling = pb.Sampling(
        temperature=1, seed=9, repetition_penalty=1.3, presence_penalty=0.1, frequency_penalty=0.2,
        logit_bias={199: -3.0, 33: 2.0},
    )  # fmt: skip
    return pb.GenerateRequest(
        prompt=pb.Prompt(text="ROMEO:"), sampling=sampling, stopping=pb.Stopping(max_tokens=6), n=n
    )


def test_flags_of_sampling_are_the_requests(engine: Engine, capsys: Captured) -> None:
    text, tokens, _ = collect(engine.stub.Generate(sampled()))
    assert run(engine, "generate", "ROMEO:", *SAMPLING, "--logprobs", "1", "--prompt-logprobs", "0") == 0
    shown = capsys.readouterr()
    assert shown.out == printed(text)
    lines = shown.err.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("sample 0 token ")] == [str(token) for token in tokens]
    assert sum(line.startswith("prompt token ") for line in lines) == 1
    assert all(line.split()[6] == "rank" or line.startswith("prompt") for line in lines)
    with pytest.raises(SystemExit, match=r"^2$"):
        run(engine, "generate", "x", "--logit-bias", "7")
    assert "argument --logit-bias: 7: expected ID=X" in capsys.readouterr().err


def test_samples_are_printed_whole(engine: Engine, capsys: Captured) -> None:
    whole = dict.fromkeys(range(3), "")
    for response in engine.stub.Generate(sampled(3)):
        whole[response.sample] += response.text
    assert run(engine, "generate", "ROMEO:", *SAMPLING, "--n", "3", "--show-usage") == 0
    shown = capsys.readouterr()
    assert all(f"--- {at}\n{printed(text)}" in shown.out for at, text in whole.items())
    assert sorted(line.rsplit(" ", 1)[1] for line in shown.err.splitlines()) == ["10", "11", "9"]


def test_lines_with_samples_and_log_probabilities(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        {"prompt": "ROMEO:", "n": 2, "logprobs": 1, "max_tokens": 3, "seed": 4, "logit_bias": {"33": 2}},
        {"prompt": "ROMEO:", "logprobs": 0, "prompt_logprobs": 2, "max_tokens": 3},
        {"prompt": "ROMEO:", "logit_bias": {"x": 2}},
        {"prompt": "ROMEO:", "n": 99},
    )
    done = tmp_path / "out"
    assert run(engine, "batch", str(source), "--output", str(done), "--token-ids", "--temperature", "0.5") == 1
    found = records(done.read_text())
    first, second = found[0]["samples"]
    assert (first["seed"], second["seed"]) == (4, 5) and "text" not in found[0]
    for one in (first, second):
        assert [told["token_id"] for told in one["logprobs"]] == one["token_ids"] and len(one["token_ids"]) == 3
        assert all(len(told["top"]) == 1 for told in one["logprobs"])
    assert len(found[1]["logprobs"]) == 3 and len(found[1]["prompt_logprobs"]) == 1
    assert len(found[1]["prompt_logprobs"][0]["top"]) == 2
    assert found[2]["error"]["message"].startswith("logit_bias cannot be")
    assert found[3]["error"]["field"] == "n"
    again = run(engine, "batch", str(source), "--output", str(done), "--resume", "--token-ids")
    assert again == 1 and len(done.read_text().splitlines()) == 4
    capsys.readouterr()


def test_a_submission_with_samples(engine: Engine, capsys: Captured) -> None:
    whole = dict.fromkeys(range(3), "")
    for response in engine.stub.Generate(sampled(3)):
        whole[response.sample] += response.text
    assert run(engine, "submit", "ROMEO:", *SAMPLING, "--n", "3", "--id", "three") == 0
    assert run(engine, "watch", "three", "--show-usage") == 0
    shown = capsys.readouterr()
    assert all(f"--- {at}\n{printed(text)}" in shown.out for at, text in whole.items())
    assert sorted(line.rsplit(" ", 1)[1] for line in shown.err.splitlines()) == ["10", "11", "9"]
    assert run(engine, "get", "three") == 0
    assert capsys.readouterr() == ("".join(f"--- {at}\n{printed(text)}" for at, text in whole.items()), "")
    assert run(engine, "get", "three", "--json") == 0
    assert [one["text"] for one in json.loads(capsys.readouterr().out)["samples"]] == list(whole.values())
    places = [word for place in ("6", "0", "6") for word in ("--from-token", place)]
    assert run(engine, "watch", *places, "three", "--without-sample", "2") == 0
    assert sorted(capsys.readouterr().out.split("--- ")) == sorted(["", "0\n\n", f"1\n{printed(whole[1])}"])
    assert run(engine, "status", "three") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "three: done"
    assert [line[: len("sample 0 (length): prompt 2")] for line in lines[1:4]] == [
        f"sample {at} (length): prompt 2" for at in range(3)
    ]
    for arguments, said in (
        (["--from-token", "6"], "from_token is 6; with 3 samples, use from_tokens"),
        (["--from-token", "6", "--from-token", "7"], "from_tokens[1] is 7; there are 6 tokens so far"),
        (["--without-sample", "3"], "without_samples[0] is 3; it must be at most 2"),
    ):
        assert run(engine, "watch", "three", *arguments) == 1
        assert capsys.readouterr().err == f"rocmforge watch: FIELD_INVALID: {said}\n"


def test_samples_of_one_that_is_not_done_and_fails(engine: Engine, capsys: Captured) -> None:
    over = threading.Event()

    def linger(step: Any) -> None:
        for chunk in step:
            if chunk.sequence.num_generated_tokens == 5:
                over.wait(60)
                chunk.sequence.tokens[-1] = 10**9  # out of the vocabulary: the model itself raises

    engine.steps.fault = linger
    assert run(engine, "submit", "x", "--n", "2", "--max-tokens", "900", "--id", "two") == 0
    asked = pb.GetGenerationRequest(request_id="two")
    until(lambda: sum(len(one.token_ids) for one in engine.stub.GetGeneration(asked).generation.samples) >= 10)
    capsys.readouterr()
    assert run(engine, "get", "two") == 0
    shown = capsys.readouterr()
    assert "--- 0\n" in shown.out and "--- 1\n" in shown.out
    assert shown.err == "rocmforge get: not done: 10 tokens so far\n"
    over.set()
    for command in ("watch", "get"):
        assert run(engine, command, "two") == 1
        failed = capsys.readouterr()
        assert f"rocmforge {command}: FORWARD_FAILED: " in failed.err
        assert failed.out == shown.out
    assert run(engine, "status", "two") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("two: failed (FORWARD_FAILED") and lines[2].startswith("sample 1: prompt 1 tokens")


def test_one_that_is_larger_than_grpc_takes_by_itself(engine: Engine, capsys: Captured) -> None:
    async def keep() -> None:
        generation = engine.engine.generations.open("large", b"", 1, samples=2)
        sequence = Sequence(make_request("large", n=2), 1)
        for sample in range(2):
            generation.push(Event("large", "x" * (3 << 20), (1,), sample=sample))
            generation.push(Event("large", outcome=Outcome(FinishReason.LENGTH), sequence=sequence, sample=sample))

    engine.call(keep())
    assert run(engine, "get", "large") == 0
    assert len(capsys.readouterr().out) > 6 << 20


def test_one_that_runs_and_is_cancelled(engine: Engine, capsys: Captured) -> None:
    engine.steps.hold()
    assert run(engine, "submit", "x", "--max-tokens", "900", "--id", "long") == 0
    assert run(engine, "get", "long") == 0
    assert "rocmforge get: not done: 0 tokens so far" in capsys.readouterr().err
    assert run(engine, "cancel", "nobody", "long") == 1
    assert capsys.readouterr().err.startswith("rocmforge cancel: REQUEST_UNKNOWN: ")
    engine.steps.release()
    assert run(engine, "watch", "long") == 0
    assert run(engine, "status", "long") == 0
    assert "long: done (cancelled)\n" in capsys.readouterr().out


def test_one_that_fails(engine: Engine, capsys: Captured) -> None:
    engine.steps.hold()
    assert run(engine, "submit", "x", "--max-tokens", "900", "--timeout", "0.05", "--id", "late") == 0
    threading.Event().wait(0.1)
    engine.steps.release()
    capsys.readouterr()
    for command in ("watch", "get"):
        assert run(engine, command, "late") == 1
        assert f"rocmforge {command}: DEADLINE_EXCEEDED: deadline exceeded" in capsys.readouterr().err
    assert run(engine, "status", "late") == 0
    assert capsys.readouterr().out.startswith("late: failed (DEADLINE_EXCEEDED: deadline exceeded")


def test_the_status_of_the_engine(engine: Engine, capsys: Captured) -> None:
    assert run(engine, "status") == 0
    lines = capsys.readouterr().out.splitlines()
    words = {line.split()[0]: line for line in lines}
    assert "shakespeare (LlamaForCausalLM, 3.7 M parameters)" in words["model"]
    assert words["state"].split() == ["state", "serving"]
    assert "0 running, 0 of 4 queued" in words["requests"] and "of 67108864 bytes" in words["generations"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["submit", "x", "--timeout", "nan"], 2, "rocmforge submit: --timeout nan: out of range"),
        (["submit", "x", "--retention", "1e30"], 2, "rocmforge submit: --retention 1e+30: out of range"),
        (["submit", "x", "--timeout", "-1"], 1, "rocmforge submit: FIELD_INVALID: timeout is -1 s"),
        (["submit", "x", "--max-tokens", "-1"], 2, "rocmforge submit: --max-tokens -1: out of range"),
        (["submit", "x", "--id", "\udcff"], 2, "rocmforge submit: --id must be UTF-8"),
        (["submit", "x", "--id", "y" * 129], 1, "rocmforge submit: FIELD_INVALID: request_id has 129 characters"),
        (["submit", "x", "--priority", "2147483648"], 2, "rocmforge submit: --priority 2147483648: out of range"),
        (
            ["submit", "x", "--priority", "-101"],
            1,
            "rocmforge submit: FIELD_INVALID: priority is -101; it must be -100",
        ),
        (["batch", "--priority", "4294967296"], 2, "rocmforge batch: priority cannot be 4294967296"),
        (["submit", "\udcff"], 2, "rocmforge submit: PROMPT must be UTF-8"),
        (["submit", "x", "--cache-salt", "\udcff"], 2, "rocmforge submit: --cache-salt must be UTF-8"),
        (["submit", "x", "--cache-ttl", "5", "--cache-priority", "0"], 1, "rocmforge submit: FIELD_INVALID: cache_"),
        (["watch", "nobody"], 1, "rocmforge watch: REQUEST_UNKNOWN: no submitted generation 'nobody'"),
        (["watch", "x", "--from-token", "-1"], 2, "rocmforge watch: --from-token -1: out of range"),
        (["watch", "x", "--from-token", "0", "--from-token", "-1"], 2, "rocmforge watch: --from-token 0 -1: out of"),
        (["watch", "x", "--without-sample", "-1"], 2, "rocmforge watch: --without-sample -1: out of range"),
        (["submit", "x", "--n", "64"], 1, "rocmforge submit: FIELD_INVALID: n is 64; it must be at most 16"),
        (["submit", "x", "--n", "-1"], 2, "rocmforge submit: --n -1: out of range"),
        (["watch", "\udcff"], 2, "rocmforge watch: ID must be UTF-8"),
        (["get", "nobody"], 1, "rocmforge get: REQUEST_UNKNOWN"),
        (["get", "\udcff"], 2, "rocmforge get: ID must be UTF-8"),
        (["status", "nobody"], 1, "rocmforge status: REQUEST_UNKNOWN"),
        (["cancel", "\udcff"], 2, "rocmforge cancel: ID must be UTF-8"),
        (["batch", "--concurrency", "0"], 2, "rocmforge batch: --concurrency 0: expected 1 to 1024"),
        (["batch", "--retries", "-1"], 2, "rocmforge batch: --retries -1: expected 0 or more"),
        (["batch", "--resume"], 2, "rocmforge batch: --resume requires --output FILE"),
        (["batch", "--top-k", "-1"], 2, "rocmforge batch: top_k cannot be -1"),
        (["batch", "/proc/none"], 2, "rocmforge batch: /proc/none: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    engine: Engine, capsys: Captured, arguments: list[str], status: int, says: str
) -> None:
    assert run(engine, *arguments) == status
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(says) and shown.err.count("\n") == 1


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_and_says_when_nobody_is_there(
    command: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(command, ["--help"])
    assert ended.value.code == 0 and f"services.engine {command}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n')))
    alone: dict[str, list[str]] = {name: [] for name in ("status", "chat", "models", "purge", "bench", "drain")}
    more = {**alone, "batch": ["--retries", "0"]}.get(command, ["x"])
    target = f"unix:{tmp_path}/none.sock"
    assert cli.run(command, [*more, "--target", target]) == 1
    assert capsys.readouterr().err.startswith(f"rocmforge {command}: UNAVAILABLE: no engine at {target}: ")


# --- a batch ----------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def records(text: str) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert len({record["index"] for record in found}) == len(found)
    return {record["index"]: record for record in found}


def test_a_line_has_its_own_priority_or_the_flags(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    lines = ({"prompt": "x", "priority": 100}, {"prompt": "x", "priority": 101}, {"prompt": "x"})
    source = write(tmp_path / "in", *lines)
    assert run(engine, "batch", str(source), *GREEDY, "--priority", "-101", "--retries", "0") == 1
    found = records(capsys.readouterr().out)
    assert "error" not in found[0]
    for index, told in ((1, "priority is 101"), (2, "priority is -101")):
        error = found[index]["error"]
        assert (error["reason"], error["field"]) == ("FIELD_INVALID", "priority") and told in error["message"]


def test_a_line_for_each_line(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        {"prompt": "ROMEO:", "id": "first"},
        "",
        "nonsense",
        [1],
        {"prompt": "x", "top_p": 7},
        {"prompt": [1, 2, 3], "max_tokens": 2, "seed": 3, "temperature": 1.0},
        {"prompt": "x", "bogus": 7},
        '{"prompt": "\\ud800", "id": "half"}',
        {"prompt": "x", "max_tokens": True},
        {"prompt": "x", "stop": 7},
        {"id": "empty"},
        {"prompt": "JULIET:", "stop": "\n", "stop_token_ids": [5], "include_stop": True, "cache_salt": "s"},
    )
    assert run(engine, "batch", str(source), *GREEDY) == 1
    shown = capsys.readouterr()
    assert shown.err == ""  # no bar where there is no terminal
    found = records(shown.out)
    assert set(found) == set(range(12)) - {1}
    assert found[0]["text"] == expected(engine) and found[0]["id"] == "first" and found[0]["finish"] == "length"
    assert found[0]["usage"] == {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 12}
    assert found[5]["seed"] == 3 and found[5]["usage"]["completion_tokens"] == 2
    assert found[11]["finish"] in ("stop", "length") and "error" not in found[11]
    said = {index: record["error"]["message"] for index, record in found.items() if "error" in record}
    assert set(said) == {2, 3, 4, 6, 7, 8, 9, 10}
    assert said[2].startswith("the line is not valid JSON") and "object such as" in said[3]
    assert found[4]["error"] == {
        "code": "INVALID_ARGUMENT",
        "reason": "FIELD_INVALID",
        "message": "top_p is 7.0; it must be more than 0 and at most 1",
        "field": "sampling.top_p",
    }
    assert "unknown field 'bogus'; expected one of id, prompt, messages, chat" in said[6]
    assert said[7] == "prompt is not valid UTF-8" and found[7]["id"] == "half"
    assert said[8] == "max_tokens cannot be True" and said[9] == "stop cannot be 7"
    assert found[10]["error"]["field"] == "prompt"


def test_a_batch_larger_than_the_queue_gets_through(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    lines = [{"prompt": [1, at + 2], "max_tokens": 3, "seed": at, "temperature": 1} for at in range(60)]
    lines += [{"prompt": [1, 2], "max_tokens": 3, "min_tokens": 5}]
    source = write(tmp_path / "in", *lines)
    refusals = engine.stub.GetStats(pb.GetStatsRequest()).queue_limit
    assert refusals < 32  # so that some are refused, and tried again
    assert run(engine, "batch", str(source), "--token-ids", "--retries", "1000") == 1
    found = records(capsys.readouterr().out)
    assert len(found) == 61 and [index for index, one in found.items() if "error" in one] == [60]
    for at in (0, 31, 59):
        alone = request([1, at + 2], 3, sampling={"seed": at, "temperature": 1.0}, stopping={"ignore_eos": False})
        assert found[at]["token_ids"] == collect(engine.stub.Generate(alone))[1]


def test_without_retries_the_refusal_is_the_answer(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *({"prompt": [1, at + 2], "max_tokens": 3} for at in range(40)))
    engine.steps.hold()
    blocker = engine.stub.Generate(request(max_tokens=2))
    assert engine.steps.reached.wait(30)
    answers: list[int] = []
    batch = threading.Thread(target=lambda: answers.append(run(engine, "batch", str(source), "--retries", "0")))
    batch.start()
    engine.until_live(33)
    engine.steps.release()
    batch.join(60)
    collect(blocker)
    assert answers == [1]
    reasons = {one["error"]["reason"] for one in records(capsys.readouterr().out).values() if "error" in one}
    assert reasons == {"QUEUE_FULL"}


def test_going_on_where_it_stopped(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    good = [{"prompt": [1, at + 2], "max_tokens": 2} for at in range(6)]
    source, output = write(tmp_path / "in", *good[:3], "nonsense", *good[4:]), tmp_path / "out"
    assert run(engine, "batch", str(source), "--output", str(output)) == 1
    assert run(engine, "batch", str(source), "--output", str(output)) == 2
    assert f"{output} already exists; use --resume to continue it" in capsys.readouterr().err
    before = records(output.read_text())
    kept = [line for line in output.read_text().splitlines() if json.loads(line)["index"] in (1, 3, 4)]
    output.write_text("".join(f"{line}\n" for line in kept) + '{"index": 5, "tex')  # as after a kill
    write(source, *good)
    done = engine.stub.GetStats(pb.GetStatsRequest()).finished_requests
    assert run(engine, "batch", str(source), "--output", str(output), "--resume") == 0
    after = records(output.read_text())
    assert sorted(after) == list(range(6)) and all("finish" in one for one in after.values())
    assert [after[at] for at in (1, 4)] == [before[at] for at in (1, 4)]
    assert engine.stub.GetStats(pb.GetStatsRequest()).finished_requests - done == 4
    assert run(engine, "batch", str(source), "--output", str(output), "--resume") == 0
    assert records(output.read_text()) == after
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_a_file_that_is_something_else_is_left_alone(engine: Engine, capsys: Captured, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", {"prompt": "x"}), tmp_path / "out"
    output.write_text("dear diary\n")
    assert run(engine, "batch", str(source), "--output", str(output), "--resume") == 2
    assert "line 1: not a line of this command's output" in capsys.readouterr().err
    assert output.read_text() == "dear diary\n"


def test_a_reader_that_leaves(
    engine: Engine, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch ends at once, with what is begun cancelled, and says nothing."""
    written: list[str] = []
    dropped: list[bool] = []

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    # The short one is in the first call, which the engine has room for; the last long one is refused, and waits.
    long = ({"prompt": [1, at + 2], "max_tokens": 900, "ignore_eos": True} for at in range(8))
    source = write(tmp_path / "in", {"prompt": "x"}, *long)
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr("services.engine.cli.client.drop_output", lambda: dropped.append(True))
    assert run(engine, "batch", str(source), "--max-tokens", "2", "--retries", "1000") == 1
    assert len(written) == 1 and '"finish"' in written[0] and dropped == [True]
    assert capsys.readouterr().err == ""
    engine.idle()


def test_an_interrupt_keeps_what_is_done(engine: Engine, tmp_path: Path) -> None:
    long = ({"prompt": [1, at + 2], "max_tokens": 900, "ignore_eos": True} for at in range(30))
    source, output = write(tmp_path / "in", {"prompt": "x", "max_tokens": 1}, *long), tmp_path / "out"
    # No more at a time than run at a time: where long ones fill the queue first, the short one waits for minutes.
    command = ["batch", str(source), "--output", str(output), "--target", engine.address, "--concurrency", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.engine", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not (output.exists() and output.read_bytes().endswith(b"\n")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=60)
    assert (process.returncode, *shown) == (130, b"", b"")
    done = records(output.read_text())
    assert 0 < len(done) < 31 and all("finish" in one for one in done.values())
    engine.idle()


def test_an_interrupt_before_all_threads_run(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run end, and what they were about is neither done nor failed."""
    begun: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            if begun:
                assert engine.steps.reached.wait(30)
                raise KeyboardInterrupt
            begun.append(self)
            super().start()

    source, output = write(tmp_path / "in", *({"prompt": [1, at + 2]} for at in range(30))), tmp_path / "out"
    engine.steps.hold()
    theirs = {name: getattr(threading, name) for name in ("Lock", "Event")}
    monkeypatch.setattr("services.engine.cli.batch.threading", SimpleNamespace(Thread=Interrupted, **theirs))
    assert run(engine, "batch", str(source), "--output", str(output)) == 130
    assert len(begun) == 1 and not begun[0].is_alive()
    assert output.read_text() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(engine: Engine, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    source = write(tmp_path / "in", *({"prompt": [1, at + 2], "max_tokens": 2} for at in range(5)), "nonsense")
    assert run(engine, "batch", str(source)) == 1
    drawn = terminal.getvalue().removesuffix("\n").split("\r")
    assert "] 6/6  1 failed" in drawn[-1].replace("]  ", "] ") and "####" in drawn[-1] and "0:00 left" in drawn[-1]
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_the_bar_shows_life_before_the_first_item_ends(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    source = write(tmp_path / "in", *({"prompt": [1, at + 2], "max_tokens": 6, "ignore_eos": True} for at in range(3)))
    engine.steps.hold()
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(run(engine, "batch", str(source))))
    thread.start()

    def until(words: str) -> None:
        while not re.search(words, terminal.getvalue()):
            assert thread.is_alive(), terminal.getvalue()[-200:]

    until(r"0/3  3 running  0 tokens  \d:\d\d")
    engine.until_live(3)
    for _ in range(2):  # each request has four more to go
        engine.steps.step()
    until(r"0/3  3 running  [1-6] tokens  \d:\d\d")
    engine.steps.release()
    thread.join(60)
    assert status == [0]
    last = terminal.getvalue().removesuffix("\n").split("\r")[-1]
    assert "3/3" in last and "running" not in last


def test_tokens_of_an_attempt_that_came_to_nothing_are_taken_back() -> None:
    clock = Clock()
    progress = Progress(Terminal(), 2, clock)
    progress.begin(2)
    progress.more(5)
    progress.more(-3)
    clock.now += 60
    assert progress.line().endswith("0/2  2 running  2 tokens  1:00")


def test_the_line_of_the_bar_fits_and_tells_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    progress = Progress(Terminal(), 200, clock)
    for _ in range(50):
        clock.now += 0.5
        progress.add(failed=False, tokens=10)
    for columns in (10, 40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert len(progress.line()) < columns
    assert progress.line() == f"[{'#' * 10}{'.' * 30}]  50/200  20 tokens/s  1:15 left"
    progress.begin(3)
    progress.add(failed=False, tokens=10, running=True)
    assert progress.line().endswith("51/200  2 running  20 tokens/s  1:13 left")
    unknown = Progress(Terminal(), None, clock)
    clock.now += 1
    unknown.add(failed=True, tokens=7)
    assert unknown.line() == "1  1 failed  7 tokens/s"
