"""A registry as the page that Prometheus reads, made cheaply: it is asked for while both cores compute.

Must not know: which metrics exist, servers.
"""

import gzip
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.openmetrics import exposition as openmetrics

_OPEN_METRICS = "application/openmetrics-text"
# Names of ours need no escaping. The encoders' default looks at each character of each name: most of a page's time.
_ESCAPING = openmetrics.ALLOWUTF8
# The highest level takes four times as long for a page a tenth smaller.
_GZIP_LEVEL = 1

Headers = dict[str, str]


def render_page(
    registry: CollectorRegistry, accept: str = "", accept_encoding: str = "", names: Sequence[str] = ()
) -> tuple[Headers, bytes]:
    """Headers and body for what a reader accepts: OpenMetrics 1.0 with exemplars, else the older text; compressed where
    it can be. `names`: only these series."""
    chosen = registry.restricted_registry(names) if names else registry
    if _OPEN_METRICS in accept.lower():
        kind = openmetrics.CONTENT_TYPE_LATEST
        body = openmetrics.generate_latest(chosen, _ESCAPING)  # type: ignore[no-untyped-call]
    else:
        kind, body = exposition.CONTENT_TYPE_PLAIN_0_0_4, exposition.generate_latest(chosen, _ESCAPING)
    headers = {"content-type": kind}
    if exposition.gzip_accepted(accept_encoding):
        headers["content-encoding"] = "gzip"
        body = gzip.compress(body, _GZIP_LEVEL)
    return headers, body
