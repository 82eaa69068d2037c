"""The real vLLM behind the protocol of `EngineService.Generate`, so that the same generator drives both engines.

Run by the Python of vLLM's environment, which has gRPC and protobuf but none of this project's dependencies:
``python vllm_engine.py ADDRESS ARGUMENTS`` with the arguments of ``AsyncEngineArgs`` as JSON. vLLM computes in a
process of its own; this one holds its ``AsyncLLM`` and answers calls, as its HTTP server would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

# vLLM reads them when it is imported.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc

#: As the engine's own.
MAX_MESSAGE_BYTES = 32 << 20


class Adapter(engine_pb2_grpc.EngineServiceServicer):
    """Generates from tokens, greedily, to a given length; other requests are refused by name."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Streams tokens as vLLM hands them out; what piled up while a message was sent comes in the next."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not request.prompt.HasField("tokens") or request.sampling.temperature or not request.stopping.ignore_eos:
            said = "prompt, sampling and stopping: only tokens, temperature 0 and ignore_eos are served"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.stopping.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt.tokens.ids)}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        # The generator ends with its call, and vLLM aborts what nobody reads.
        async for output in self._engine.generate(prompt, params, str(next(self._numbers))):
            response = pb.GenerateResponse(token_ids=output.outputs[0].token_ids)
            if output.finished:
                response.finish.usage.prompt_tokens = len(prompt["prompt_token_ids"])
                response.finish.usage.cached_tokens = output.num_cached_tokens or 0
            yield response

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """What the generator has to know of the model."""
        config = self._engine.vllm_config.model_config
        import vllm

        return pb.GetModelResponse(
            model_id=str(config.model),
            vocab_size=config.get_vocab_size(),
            max_context=config.max_model_len,
            backend=f"vLLM {vllm.__version__}",
        )


async def serve(address: str, arguments: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.aio.server(options=options)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(Adapter(engine), server)
    server.add_insecure_port(address)
    await server.start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    await over.wait()
    await server.stop(1)
    engine.shutdown()


def main() -> None:
    """Runs on uvloop where there is one, as vLLM's own server does."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(sys.argv[1], json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
