"""The one place where a refusal becomes a gRPC status.

Must not know: why requests are refused.
"""

from dataclasses import asdict
from typing import Any, NoReturn

import grpc

from service_runtime import statuses
from tokenizer_service.engines.messages import Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenwire.common.v1 import outcome_pb2

_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def status_code(code: RefusalCode) -> grpc.StatusCode:
    return _STATUS_BY_NUMBER[code.value]


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal, delivered: Usage | None = None
) -> NoReturn:
    """Ends the call with the refusal's status, BadRequest, RetryInfo and QuotaFailure details.

    `delivered`: what the client had got by then, as a detail too.
    """
    quota = refusal.quota
    used = () if delivered is None else (outcome_pb2.Usage(**asdict(delivered)),)
    await statuses.abort(
        context,
        status_code(refusal.code),
        refusal.message,
        field_violations=[(item.field, item.description) for item in refusal.violations],
        retry_after_s=refusal.retry_after_s,
        quota=None if quota is None else (quota.subject, f"{quota.limit}: {quota.description}"),
        more=used,
    )
