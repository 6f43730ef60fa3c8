"""No prompt, no generated text and no key gets into a log, at any level, whatever goes wrong with a request."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import SCRIPT_S1, SCRIPT_S1_TEXT, write_succ
from tests.fixtures.http_calls import CHAT, COMPLETIONS, RESPONSES
from tests.fixtures.http_stack import HttpStack, http_stack
from tokenwire_client import Client, JsonSchema, Message, Regex, Sampling, Tool
from tokenwire_client.errors import TokenwireError, Unauthenticated

KEY, WRONG_KEY = "sk-quetzalcoatl", "sk-huitzilopochtli"
PROMPT = "xylophonic zugzwang"
SALT = "ornithorhynchus"
GENERATED = SCRIPT_S1_TEXT.split()[2]
SECRETS = (KEY, WRONG_KEY, SALT, GENERATED, "pepper", *PROMPT.split())

RAISING = f"{{{{ raise_exception('{PROMPT}') }}}}"
FAILING = f"{{{{ '{PROMPT}'.nothing.at }}}}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    """Both services at the most talkative level, for clients with a key; every request is slow."""
    folder = write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))
    debug = ("--log-level", "debug", "--slow-request-seconds", "0.000001")
    tokenizer = (*debug, "--api-key", KEY, "--allow-chat-template-override")
    engine = (*debug, "--num-blocks", "256")
    with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=engine, tokenizer_flags=tokenizer) as made:
        made.client.headers["authorization"] = f"Bearer {KEY}"
        yield made


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hello", "temperature": 0}),
    (COMPLETIONS, {"prompt": "Hello", "temperature": 0, "stream": True, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "stop": [PROMPT], "cache_salt": SALT}),
    (COMPLETIONS, {"prompt": PROMPT, "temperature": PROMPT}),
    (COMPLETIONS, {"prompt": PROMPT, "stop": [PROMPT * 400]}),
    (COMPLETIONS, {"prompt": PROMPT * 20_000}),
    (COMPLETIONS, {"prompt": {PROMPT: PROMPT}}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, PROMPT: PROMPT}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "response_format": {"type": PROMPT}}),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}),
    (CHAT, {"messages": [{"role": PROMPT, "content": PROMPT}], "max_tokens": 4}),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "chat_template": "{{ " + PROMPT, "max_tokens": 4}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": PROMPT}], "chat_template": f"{{{{ raise_exception('{PROMPT}') }}}}"},
    ),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "chat_template": FAILING}),
    (RESPONSES, {"input": PROMPT, "instructions": PROMPT, "max_output_tokens": 4}),
    ("/tokenize", {"prompt": PROMPT}),
]


def over_http(stack: HttpStack) -> set[int]:
    codes = {stack.post(path, body).status_code for path, body in BODIES}
    codes.add(stack.client.post(CHAT, content=b'{"messages": "' + PROMPT.encode()).status_code)
    codes.add(stack.client.get(f"/v1/models/{PROMPT}").status_code)
    wrong = {"authorization": f"Bearer {WRONG_KEY}"}
    codes.add(stack.client.post(CHAT, json={"messages": PROMPT}, headers=wrong).status_code)
    return codes


def over_grpc(target: str) -> None:
    samplings = (
        Sampling(max_tokens=5),
        Sampling(max_tokens=5, structured_output=Regex(f"({PROMPT}")),
        Sampling(max_tokens=5, structured_output=Regex(PROMPT)),
        Sampling(max_tokens=5, structured_output=JsonSchema({"type": PROMPT})),
        Sampling(max_tokens=5, stop=(PROMPT,), logprobs=3, prompt_logprobs=1),
    )
    with Client(target, timeout=20, api_key=WRONG_KEY) as stranger, pytest.raises(Unauthenticated):
        stranger.tokenize(PROMPT)
    with Client(target, timeout=20, api_key=KEY) as client:
        for sampling in samplings:
            try_to(lambda sampling=sampling: client.generate(PROMPT, sampling, cache_salt=SALT).result())
            try_to(lambda sampling=sampling: client.chat([Message("user", PROMPT)], sampling).result())
        tool = Tool(name="zugzwang", description=PROMPT, parameters={"type": "object"})
        try_to(lambda: client.chat([Message("user", PROMPT)], samplings[0], tools=[tool]).result())
        with client.generate("Hello", Sampling(temperature=0)) as left:
            next(iter(left))
        assert client.generate("Hello", Sampling(temperature=0), timeout=20).result().text == SCRIPT_S1_TEXT


def try_to(call: Any) -> None:
    try:
        call()
    except TokenwireError:
        return


def test_no_text_and_no_key_is_logged(stack: HttpStack) -> None:
    assert over_http(stack) >= {200, 400, 401, 404}
    (listening,) = stack.tokenizer.events("listening")
    over_grpc(f"127.0.0.1:{listening['grpc_port']}")
    stack.until_idle()
    logs = {service.log.name: service.log.read_text(errors="replace") for service in (stack.engine, stack.tokenizer)}
    ids = json.dumps(SCRIPT_S1[1:4])[1:-1]
    for name, text in logs.items():
        assert '"level": "debug"' in text or '"level": "info"' in text
        assert "Traceback" not in text, text[text.index("Traceback") - 500 :]
        for secret in (*SECRETS, ids):
            found = [line for line in text.splitlines() if secret.lower() in line.lower()]
            assert found == [], f"{secret!r} in {name}"
    assert_some_requests_were_logged(logs)


def assert_some_requests_were_logged(logs: dict[str, str]) -> None:
    """Otherwise nothing was shown."""
    assert logs["engine.log"].count("request finished") > 10
    assert logs["tokenizer.log"].count("request_end") > 10
    assert all("slow_request" in text for text in logs.values())
