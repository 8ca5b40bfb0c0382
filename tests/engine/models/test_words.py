"""Words of files: there and back, whole characters only, ends, stops, and conversations."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors

from engine.http import ApiError
from engine.models.chat import ChatTemplate
from engine.models.errors import ModelError
from engine.models.loader import find
from engine.models.tokenizer import ByteTokenizer, ChatError
from engine.models.tokenizer import Tokenizer as Words
from engine.models.words import FileTokenizer
from engine.openai import Text, chat_tokens
from engine.sched.request import Finish, Request
from tests.engine.models.files import CONFIG, bpe, state, write_folder, write_gguf

CHAT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def words() -> FileTokenizer:
    return FileTokenizer(
        bpe(), where="t", decoder={"type": "ByteLevel"}, vocabulary=300, eos=[2], chat=None
    )


def asked(stop: tuple[str, ...] = ()) -> Request:
    return Request("a", np.array([1]), 9, 0.0, stop=tuple(text.encode() for text in stop))


@given(st.text())
def test_the_bytes_of_tokens_are_the_text(text: str) -> None:
    subject = words()
    assert b"".join(subject.pieces[token] for token in subject.encode(text)).decode() == text


@given(st.text(min_size=1), st.lists(st.integers(1, 4)))
def test_a_stream_never_shows_half_a_character(text: str, steps: list[int]) -> None:
    subject, whole = words(), ""
    tokens = subject.encode(text)
    out = Text(asked(), subject)
    for step in steps:
        part = out.feed(tokens[:step], False)
        tokens = tokens[step:]
        assert "\ufffd" not in part or "\ufffd" in text
        whole += part
    assert whole + out.feed(tokens, True) == text


def test_merged_and_special_tokens_are_found() -> None:
    subject = words()
    tokens = subject.encode("hello world<|im_end|>7")
    spelled = [subject.pieces[token] for token in tokens]
    assert spelled == [b"hello", b" wor", b"l", b"d", b"", b"7"]
    assert tokens[4] == 2
    assert subject.eos == {2}


def test_a_folder_and_a_gguf_have_the_same_words(tmp_path: Path) -> None:
    folder = find(str(write_folder(tmp_path / "hf", state()))).tokenizer()
    file = find(str(write_gguf(tmp_path / "tiny.gguf", state()))).tokenizer()
    for text in ("hello world, 2026! <|im_end|>", "  zwei\n\n Äpfel's 🍎", ""):
        assert folder.encode(text) == file.encode(text)
    assert folder.pieces == file.pieces
    assert folder.eos == file.eos
    turns = [("user", "hello")]
    assert folder.encode_chat(turns) == file.encode_chat(turns) == folder.encode(CHAT)


def test_a_gguf_may_ask_for_a_beginning(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", state(), tokenizer__ggml__add_bos_token=True)
    subject = find(str(path)).tokenizer()
    assert subject.encode("hello") == [1, *words().encode("hello")]
    # A template writes its own.
    assert subject.encode_chat([("user", "hello")]) == words().encode(CHAT)


def test_words_of_sentencepiece_are_spaces_and_bytes() -> None:
    backend = Tokenizer(models.BPE({"▁a": 0, "<0xF0>": 1, "<0x9F>": 2, "b": 3}, []))
    subject = FileTokenizer(
        backend,
        where="t",
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        vocabulary=5,
        eos=[],
        chat=None,
    )
    assert subject.pieces == [b" a", b"\xf0", b"\x9f", b"b", b""]


def test_words_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    backend = bpe()
    with pytest.raises(ModelError, match="token ids: got 265, allowed: up to 99"):
        FileTokenizer(
            backend, where="t", decoder={"type": "ByteLevel"}, vocabulary=100, eos=[], chat=None
        )
    begun = bpe()
    begun.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 4000)])
    with pytest.raises(ModelError, match="token ids: got 4000, allowed: up to 299"):
        FileTokenizer(
            begun, where="t", decoder={"type": "ByteLevel"}, vocabulary=300, eos=[], chat=None
        )
    backend.decoder = decoders.WordPiece()
    folder = write_folder(tmp_path, state())
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"decoder\.type: got 'WordPiece', allowed: ByteLevel"):
        find(str(folder)).tokenizer()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        find(str(folder)).tokenizer()


def test_answers_end_at_every_token_a_file_calls_an_end(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, state(), CONFIG | {"eos_token_id": [0, 5]})
    assert find(str(folder)).tokenizer().eos == {0, 2, 5}
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    subject = find(str(folder)).tokenizer()
    assert subject.eos == {2, 7}
    # One of them is a word like others to tokenizer.json, and yet no part of the text.
    assert (subject.pieces[7], subject.pieces[8] != b"") == (b"", True)


@pytest.mark.parametrize(
    ("subject", "text", "stop", "shown"),
    [
        (words(), "say hello world", "ll", "say he"),
        (words(), "say hello world", "o w", "say hell"),
        (ByteTokenizer(), "say hello", "ll", "say he"),
    ],
)
def test_a_stop_text_in_the_middle_of_a_token_cuts_there(
    subject: Words, text: str, stop: str, shown: str
) -> None:
    request = asked((stop,))
    tokens = subject.encode(text)
    for together in (1, 3, len(tokens)):
        request.finish, out, seen = None, Text(request, subject), ""
        for at in range(0, len(tokens), together):
            part = tokens[at : at + together]
            done = stop.encode() in b"".join(subject.pieces[t] for t in tokens[: at + together])
            request.finish = Finish.STOP if done else None
            seen += out.feed(part, done)
            if done:
                break
        assert seen == shown


def test_a_template_sees_the_conversation_and_may_refuse_it() -> None:
    text = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}{{ m.role }}: {{ m | tojson }}\n"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    template = ChatTemplate(text, {"bos_token": "<s>"}, "t")
    assert template.render([("developer", "<é>")]) == (
        '<s>system: {"role": "system", "content": "<é>"}\nA:'
    )
    with pytest.raises(ChatError, match="no tools here"):
        template.render([("tool", "x")])


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(text: str) -> None:
    with pytest.raises(ChatError, match="does not take them"):
        ChatTemplate(text, {}, "t").render([("user", "x")])


def test_what_is_no_template_is_refused_and_without_one_there_is_no_chat() -> None:
    with pytest.raises(ModelError, match="t: chat_template: no template that runs"):
        ChatTemplate("{% for %}", {}, "t")
    with pytest.raises(ChatError, match="use /v1/completions"):
        words().encode_chat([("user", "x")])


def test_a_chat_of_which_the_template_makes_nothing_is_refused() -> None:
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "t")
    subject = FileTokenizer(
        bpe(), where="t", decoder={"type": "ByteLevel"}, vocabulary=300, eos=[2], chat=chat
    )
    assert chat_tokens({"messages": [{"role": "user", "content": "hello"}]}, subject)
    with pytest.raises(ApiError, match="makes no text of them"):
        chat_tokens({"messages": [{"role": "user", "content": ""}]}, subject)


def test_other_threads_run_while_a_long_text_is_cut() -> None:
    """Nothing but a release of the interpreter by `encode` itself lets the other one run."""
    subject, asked, ran = words(), threading.Event(), threading.Event()

    def other() -> None:
        asked.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        asked.set()
        subject.encode("hello world 7 " * 30_000)
        done = ran.is_set()
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert done
