"""Templates that compute too long are ended; those that do not are not slowed down for others."""

import sys
import time

import pytest

from tokenizer_service.text import template_time
from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import Message
from tokenizer_service.text.template_time import CpuBudget, TookTooLong

HI = [Message("user", "Hi")]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
ENDLESS = (
    LOOP.replace("BODY", ""),
    LOOP.replace("BODY", "{% set x = i * j %}"),
    LOOP.replace("BODY", "{{ '' }}"),
    "{% macro m(n) %}" + LOOP.replace("BODY", "") + "{% endmacro %}{{ m(1) }}",
    "{% block b %}" + LOOP.replace("BODY", "") + "{% endblock %}",
)


@pytest.fixture(autouse=True)
def _short_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBudget.__init__, "__defaults__", (0.05, time.thread_time))


@pytest.mark.parametrize("source", ENDLESS)
def test_a_clients_template_that_loops_is_ended_in_time(source: str) -> None:
    template = ChatTemplate(source, {}, field="chat_template")
    began = time.thread_time()
    with pytest.raises(TextError, match="the request's chat template computes for more than 2 s"):
        template.render(HI, True, max_chars=1000)
    assert time.thread_time() - began < 2.0
    assert sys.gettrace() is None or "template_time" not in repr(sys.gettrace())


def test_the_models_own_is_ended_between_its_parts() -> None:
    with pytest.raises(TextError, match="the model's chat template computes for more than"):
        ChatTemplate(ENDLESS[2], {}).render(HI, True, max_chars=1000)


def test_a_good_template_renders_the_same_watched_or_not() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content|trim }}{{ loop.index }}{% endfor %}"
    plain, watched = ChatTemplate(source, {}), ChatTemplate(source, {}, field="chat_template")
    assert plain.render(HI, True, max_chars=99) == watched.render(HI, True, max_chars=99) == "user: Hi1"


def test_a_budget_is_spent_by_the_clock_that_it_is_given() -> None:
    now = [5.0]
    budget = CpuBudget(2.0, lambda: now[0])
    now[0] = 7.0
    budget.check()
    now[0] = 7.1
    with pytest.raises(TookTooLong):
        budget.check()
    assert template_time.MAX_CPU_S == 2.0
