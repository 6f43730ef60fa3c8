"""What is counted of a call, however it ends."""

from prometheus_client import CollectorRegistry

from tokenizer_service.api.call import Call
from tokenizer_service.api.calls import CallRunner
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.sessions.events import Completed
from tokenizer_service.tenants.gate import Gate
from tokenizer_service.tenants.quota import Quotas
from tokenizer_service.tenants.tenant import TenantTable


async def test_tokens_of_a_sample_that_did_not_end_are_counted_beside_those_of_one_that_did() -> None:
    registry = CollectorRegistry()
    gate = Gate(TenantTable, Quotas(lambda: 0.0, 1))
    runner = CallRunner(Admission(max_requests=1), TokenizerMetrics(registry), gate, lambda: "r")
    call = Call("Generate", runner.metrics, lambda: 0.0, 0.0, None)

    async def body(_request: None, call: Call) -> Refusal:
        call.prompt_tokens = 5
        call.on_tokens(3, 0)
        call.on_tokens(40, 1)
        call.on_completed(Completed(FinishReason.STOP, Usage(5, 3, 0), None, None, 7, 0))
        return Refusal(RefusalCode.CANCELLED, "the client has gone")

    await runner.serve(call, None, body)
    assert registry.get_sample_value("tokenwire_tokenizer_generated_tokens_total") == 43
    assert registry.get_sample_value("tokenwire_tokenizer_prompt_tokens_total") == 5
    assert call.fields()["completion_tokens"] == 43
