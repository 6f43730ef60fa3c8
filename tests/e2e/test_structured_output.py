"""Acceptance: 200 JSON-schema requests at temperature 1 on the default model are all valid against their schemas."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import jsonschema
import pytest
from tokenizers import Tokenizer

from service_runtime.grpc_server import channel_options
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.grammars import as_json, schema_of
from tokenwire.common.v1 import outcome_pb2, sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 200
CONCURRENCY = 16


@pytest.fixture(scope="module")
def engine(default_folder: Path) -> Iterator[EngineProcess]:
    with started_engine(default_folder, "--max-num-requests=16") as engine:
        yield engine


async def test_200_requests_with_schemas_are_all_valid(engine: EngineProcess, default_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    turn = asyncio.Semaphore(CONCURRENCY)
    async with grpc.aio.insecure_channel(engine.address, options=channel_options()) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)

        async def text_for(place: int) -> str:
            prompt = f"Write JSON that fits this schema: {as_json(schema_of(place))}\nJSON: "
            sampling = sampling_pb2.SamplingParams(
                max_tokens=768,
                temperature=1.0,
                seed=place,
                structured_output=sampling_pb2.StructuredOutput(json_schema=as_json(schema_of(place))),
            )
            token_ids: list[int] = []
            async with turn:
                request = engine_pb2.TokenRequest(prompt_token_ids=tokenizer.encode(prompt).ids, sampling=sampling)
                async for response in stub.Generate(engine_pb2.GenerateRequest(request=request)):
                    token_ids += response.token_ids
                    finish = response.finish
            assert finish.reason == outcome_pb2.FINISH_REASON_STOP, (place, tokenizer.decode(token_ids))
            return tokenizer.decode(token_ids[:-1], skip_special_tokens=False)

        texts = await asyncio.gather(*(text_for(place) for place in range(COUNT)))
    for place, text in enumerate(texts):
        jsonschema.validate(json.loads(text), schema_of(place))
    assert len(set(texts)) > COUNT // 4
