"""For teams that use Locust: the prompts of `tokenwire load` from Locust's users, against any OpenAI-compatible server.

Not part of the suite, and Locust is no dependency: `pip install locust`, then see docs/load-testing.md. Locust's users
wait for their answers (a closed loop), so a server that stalls is asked less; `tokenwire load` has open loops.
"""

import itertools
import json
import time
from typing import Any

from locust import HttpUser, constant, events, task

from tokenwire_client.load.lengths import parse_lengths
from tokenwire_client.load.workload import Shape, Workload

# One for all users of a process, so that no two send the same request.
NUMBERS = itertools.count()


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    parser.add_argument("--model-name", default="", help="Unset: the first that the server lists.")
    parser.add_argument("--input-tokens", default="100", help="As `tokenwire load run --input`.")
    parser.add_argument("--output-tokens", default="64", help="As `tokenwire load run --output`.")
    parser.add_argument("--seed", type=int, default=0)


class Reader(HttpUser):
    """Asks for a completion as a stream, reads it to its end, asks again."""

    wait_time = constant(0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        shape = Shape(parse_lengths(options.input_tokens), parse_lengths(options.output_tokens))
        self.workload = Workload(shape, options.seed)
        self.model = options.model_name or self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def complete(self) -> None:
        request = self.workload.request(next(NUMBERS))
        body = {
            "model": self.model,
            "prompt": request.text,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}")
                return
            first, last, tokens, is_whole = self._read(response)
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1e3
            if not is_whole:
                response.failure("the stream ended without [DONE]")
                return
            response.success()
        if first is not None:
            self._report("TTFT", (first - began) * 1e3, tokens)
            if tokens > 1:
                self._report("TPOT", (last - first) / (tokens - 1) * 1e3, tokens)

    def _read(self, response: Any) -> tuple[float | None, float, int, bool]:
        """Moments of the first and the last token, the server's count of tokens, whether the end came."""
        first: float | None = None
        last, tokens = 0.0, 0
        for line in response.iter_lines(chunk_size=None):  # as they arrive
            line = line.decode() if isinstance(line, bytes) else line
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return first, last, tokens, True
            event = json.loads(data)
            if any(choice.get("text") for choice in event.get("choices", ())):
                last = time.perf_counter()
                first = last if first is None else first
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first, last, tokens, False

    def _report(self, name: str, milliseconds: float, tokens: int) -> None:
        self.environment.events.request.fire(
            request_type="tokens",
            name=name,
            response_time=milliseconds,
            response_length=tokens,
            exception=None,
            context={},
        )
