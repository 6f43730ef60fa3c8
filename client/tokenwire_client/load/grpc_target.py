"""A Tokenwire tokenizer service over gRPC as a target.

Must not know: schedules, statistics.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import TokenwireError
from tokenwire_client.load.outcomes import Part, RequestFailed
from tokenwire_client.load.workload import LoadRequest
from tokenwire_client.retry import NO_RETRIES
from tokenwire_client.tls import Tls
from tokenwire_client.types import FinishReason, Message, Sampling


class GrpcTarget:
    """One client for each tenant's key; nothing is tried again, so that every refusal is seen."""

    def __init__(
        self,
        address: str,
        keys: Sequence[str | None],
        *,
        model: str = "",
        tls: Tls | None = None,
        chat: bool = False,
        ignore_eos: bool = True,
    ) -> None:
        addresses = address.split(",")
        self._clients = [AsyncClient(addresses, tls=tls, api_key=key, retry=NO_RETRIES) for key in keys]
        self._model = model
        self._chat = chat
        self._ignore_eos = ignore_eos

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
        sampling = Sampling(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=self._ignore_eos)
        client = self._clients[request.tenant]
        try:
            if self._chat:
                answer = client.chat([Message("user", request.text)], sampling, model=self._model)
            else:
                answer = client.generate(request.text, sampling, model=self._model)
            async with answer:
                async with aclosing(aiter(answer)) as deltas:
                    async for delta in deltas:
                        if delta.token_ids:
                            yield Part(len(delta.token_ids))
                completion = answer.completion
        except TokenwireError as error:
            raise RequestFailed(error.code.value, error.message) from error
        assert completion is not None, "a stream that ends without its last word raises"
        if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise RequestFailed(f"finish_{completion.finish_reason.value}", "the service ended the generation")
        usage = completion.usage
        yield Part(0, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
