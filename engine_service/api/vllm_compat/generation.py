"""One Generate call of a gateway: from the news of its samples to its stream.

No header goes out before the first message, so that a refusal is a status and a client that leaves early ends the
call. Must not know: how a request is validated, what else the facade offers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2

from engine_service.api import errors
from engine_service.api.engine_handle import EngineHandle
from engine_service.api.live_request import LiveRequest, Submission
from engine_service.api.vllm_compat.answer import SampleAnswer
from engine_service.api.vllm_compat.stop_watch import StopWatch
from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode

CLIENT_LEFT = Refusal(RefusalCode.CANCELLED, "the client left")
_STOPPED = Refusal(RefusalCode.CANCELLED, "a stop string was found")

Context = grpc.aio.ServicerContext[Any, Any]


class Generation:
    """Serves one admitted request: build it, `run` it once. `new_watch` makes the finder of a sample's stop strings."""

    def __init__(
        self,
        request: vllm_pb2.GenerateRequest,
        submission: Submission,
        woken: "asyncio.Queue[LiveRequest]",
        handle: EngineHandle,
        context: Context,
        new_watch: Callable[[], StopWatch | None],
    ) -> None:
        self._is_stream = request.stream
        self._samples = submission.samples
        self._woken = woken
        self._handle = handle
        self._context = context
        prompt_ids = request.tokenized.input_ids
        self._answers = [SampleAnswer(sample.index, prompt_ids) for sample in self._samples]
        self._watches = [new_watch() for _ in self._samples]

    async def run(self) -> None:
        """Until all samples have ended; then the first error, if there was one, is the status of the call."""
        try:
            error = await self._tell_all()
        finally:
            # Also when the task is cancelled because the client left: the end of the call ends the request.
            self._handle.cancel(self._samples, CLIENT_LEFT)
        if error is not None:
            await errors.abort(self._context, error)

    async def _tell_all(self) -> Refusal | None:
        error: Refusal | None = None
        num_open = len(self._samples)
        while num_open:
            finish = await self._tell(await self._woken.get())
            if finish is not None:
                num_open -= 1
                error = error or _failure(finish)
        return error

    async def _tell(self, live: LiveRequest) -> Finish | None:
        """Sends the news of a sample; its finish, when that was among them."""
        answer, watch = self._answers[live.index], self._watches[live.index]
        unread = live.take()
        start = len(answer.token_ids)
        answer.add(unread)
        await answer.add_prompt_logprobs(unread.prompt_logprobs)
        if watch is not None and watch.found is None:
            self._look_for_stops(live, answer, watch, start)
        if self._is_stream and len(answer.token_ids) > start:
            await self._context.write(answer.chunk(start))
        finish = unread.finish
        if finish is not None and _failure(finish) is None:
            found = None if watch is None else watch.found
            await self._context.write(answer.complete(finish, found, is_stream=self._is_stream))
        return finish

    def _look_for_stops(self, live: LiveRequest, answer: SampleAnswer, watch: StopWatch, start: int) -> None:
        """Ends the sample with the token that completes a stop string."""
        for place in range(start, len(answer.token_ids)):
            if watch.add(answer.token_ids[place]):
                answer.cut(place + 1)
                self._handle.cancel([live], _STOPPED)
                return


def _failure(finish: Finish) -> Refusal | None:
    """Why the call fails. A sample that was ended from outside is no failure: it has the finish reason `abort`."""
    error = finish.error
    if finish.reason is FinishReason.ABORT and (error is None or error.code is RefusalCode.CANCELLED):
        return None
    return error
