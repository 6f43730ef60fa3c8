"""Templates that would use up memory or time in one operation are refused, in time."""

import subprocess
import sys

import pytest

from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import Message

HOSTILE = (
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**10 }}",
    "{{ 2**(2**40) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'|center(10**10) }}",
)
# In a process of its own, which may use half a GiB more than it has at its start.
PROBE = """
import resource, sys
from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import Message
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
for source in sys.argv[1:]:
    try:
        ChatTemplate(source, {}).render([Message("user", "Hi")], True, max_chars=10_000)
    except TextError:
        print("refused")
"""


def test_each_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *HOSTILE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.split(), done.stderr[-2000:]) == (["refused"] * len(HOSTILE), "")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 3 }}{{ 6 * 7 }}{{ 2**10 }}{{ 7 % 4 }}", "ababab421024" + "3"),
        ("{{ '%s-%03d' % ('a', 5) }}", "a-005"),
        ("{{ 'a\nb'|indent(2) }}{{ 'a-b'.replace('-', '+') }}", "a\n  ba+b"),
    ],
)
def test_the_usual_goes_on_working(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render([Message("user", "Hi")], True, max_chars=10_000) == text


def test_a_refusal_tells_no_inside() -> None:
    with pytest.raises(TextError) as caught:
        ChatTemplate("{{ 'x' * 10**10 }}", {}).render([Message("user", "Hi")], True, max_chars=100)
    assert "Error" not in caught.value.message
