"""What is written down in English, whoever asked, and shown in the reader's language."""

from __future__ import annotations

import copy
import json

import pytest
from django.utils.translation import gettext_noop, override

from controlplane.actions.models import State
from controlplane.actions.words import Words, shown, translated
from tests.catalogues import compile_all


@pytest.fixture(scope="module", autouse=True)
def catalogues() -> None:
    compile_all()


def test_it_is_english_text_in_any_language() -> None:
    with override("zh-hans"):
        words = Words(gettext_noop("%(action)s is %(state)s"), action="a", state=State.FAILED.label)
        assert words == "a is failed"
        assert json.dumps({"sentence": words}) == '{"sentence": "a is failed"}'
        assert translated(words) == "a 的状态为失败"
    assert translated(words) == "a is failed"


def test_words_within_words_are_translated_too() -> None:
    inner = Words(gettext_noop("the tenant"))
    words = Words(
        gettext_noop("%(scope)s is frozen until it is lifted, by %(by)s: %(reason)s"),
        scope=inner, by="ada", reason="100 % sale",
    )  # fmt: skip
    assert words == "the tenant is frozen until it is lifted, by ada: 100 % sale"
    with override("zh-hans"):
        assert translated(words) == "租户已冻结，直至解除，由 ada：100 % sale"
        assert translated("plain text") == "plain text"


def test_a_copy_says_the_same() -> None:
    words = Words(gettext_noop("engine %(name)s"), name="engine-0")
    with override("zh-hans"):
        assert translated(copy.deepcopy(words)) == translated(words)


def test_what_somebody_sent_is_cut_where_it_is_long() -> None:
    assert shown("ab") == "'ab'"
    assert len(shown("x" * 1_000_000)) == 101
