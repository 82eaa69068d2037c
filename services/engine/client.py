"""``python -m services.engine generate``: stream a completion to the terminal."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services import rpc
from services.flags import runtime_dir


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when the engine refused or failed, 2 for bad flags, 130 when interrupted.

    An interrupt cancels the request, and so does a reader of standard output that leaves.
    """
    flags = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? for it
    try:
        prompt = " ".join(flags.prompt) if flags.prompt != ["-"] else sys.stdin.read()
        request = _request(flags, prompt)
    except UnicodeError:
        print("rocmforge generate: PROMPT and --stop must be UTF-8", file=sys.stderr)
        return 2
    except ValueError as unfit:
        print(f"rocmforge generate: {unfit}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    with grpc.insecure_channel(flags.target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = engine_pb2_grpc.EngineServiceStub(channel).Generate(request, timeout=flags.timeout)
        try:
            finish = _print(call)
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            reason = error.reason if error.reason != "UNKNOWN" else failure.code().name
            lost = f"no engine at {flags.target}: " if reason == "UNAVAILABLE" else ""
            print(f"rocmforge generate: {reason}: {lost}{error.message}", file=sys.stderr)
            return 1
        except BrokenPipeError:
            call.cancel()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at the interpreter's end
            return 1
        except KeyboardInterrupt:
            call.cancel()
            print(file=sys.stderr)
            return 130
    if flags.show_usage:
        print(_usage(finish), file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.engine generate", description="Stream a completion of PROMPT to standard output."
    )
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="words of the prompt; - reads standard input")
    parser.add_argument(
        "--target",
        default=f"unix:{runtime_dir() / 'engine.sock'}",
        metavar="ADDR",
        help="the engine: unix:/path or host:port (default %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens at most (default: the engine's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-k", type=int, metavar="N", help="only the N likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="X", help="only the likeliest tokens that together have X")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: random)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds the whole call may take (default: no end)")
    parser.add_argument("--show-usage", action="store_true", help="tell counts, times and the seed on standard error")
    return parser


def _request(flags: argparse.Namespace, prompt: str) -> pb.GenerateRequest:
    """Raises ValueError, naming the flag whose value its field cannot hold."""
    if flags.timeout is not None and not 0 < flags.timeout < math.inf:
        raise ValueError(f"--timeout {flags.timeout:g}: want more than 0 seconds")
    request = pb.GenerateRequest(prompt=pb.Prompt(text=prompt), stopping=pb.Stopping(stop=flags.stop))
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        value = getattr(flags, name)
        if value is None:
            continue
        try:
            setattr(request.stopping if name == "max_tokens" else request.sampling, name, value)
        except ValueError as unfit:
            raise ValueError(f"--{name.replace('_', '-')} {value}: out of range") from unfit
    return request


def _print(call: Any) -> pb.Finish:
    finish = pb.Finish()
    ends_line = True
    try:
        for response in call:
            if response.text:
                print(response.text, end="", flush=True)
                ends_line = response.text.endswith("\n")
            if response.HasField("finish"):
                finish = response.finish
    finally:
        if not ends_line:
            print()
    return finish


def _usage(finish: pb.Finish) -> str:
    usage = finish.usage
    total = usage.total_time.ToNanoseconds() / 1e9
    rate = usage.completion_tokens / total if total else 0.0
    return (
        f"{pb.FinishReason.Name(finish.reason).removeprefix('FINISH_REASON_').lower()}; "
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"completion {usage.completion_tokens} tokens in {total:.2f} s ({rate:.0f}/s), "
        f"first after {usage.time_to_first_token.ToNanoseconds() / 1e6:.0f} ms; seed {finish.seed}"
    )
