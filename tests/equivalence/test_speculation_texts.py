"""300 prompts to the default model, greedy and seeded: the same texts with drafts and without, token by token."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from benchmarks.serving.quoting import inventing, quoting
from engine_service.core.sampling import SamplingParams
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.engine_run import EngineRun, EngineSize

PROMPTS = 300
SIZE = EngineSize(num_blocks=2000, max_num_requests=16, budget=256, chunk=256, joining=4)
GREEDY = SamplingParams(max_tokens=32, seed=0, temperature=0.0)
DRAWN = SamplingParams(max_tokens=32, seed=0, temperature=0.8, top_p=0.95)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_300_prompts_greedy_and_seeded() -> None:
    """In bf16, as it is served: two of three quote their prompt."""
    folder = resolve_model_folder(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = []
    for place in range(PROMPTS):
        text = (inventing(place) if place % 3 == 2 else quoting(place, sentences=1 + place % 5)).text
        message = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        requests += [(prompt, replace(params, seed=place)) for params in (GREEDY, DRAWN)]
    texts = []
    for most in (0, 8):
        run = EngineRun(replace(SIZE, max_draft_tokens=most), folder, "cpu")
        texts.append([answer.token_ids for answer in run.run(requests)])
        accepted = run.scheduler.stats().accepted_tokens
        run.close()
    assert texts[0] == texts[1]
    assert accepted > 1000
