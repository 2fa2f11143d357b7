"""Chat templates: goldens written by hand from the public formats, and programs that are
refused.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from etils import epath

from specsamp import Pair, generate
from specsamp.checkpoints import chat
from specsamp.checkpoints.chat import (
    CannotRender,
    ChatTemplate,
    knows_conversations,
    read_chat_template,
)
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.decoding.request import encode
from support import extras
from support.byte_tokenizer import ByteTokenizer
from support.fakes import CountingLM
from support.refusals import refusal

pytestmark = extras.needs("jinja2")

# The formats of three families, in templates of our own.
FOLDER = pathlib.Path(__file__).with_name("templates")
LLAMA3, QWEN3, MISTRAL = (
    (FOLDER / f"{name}.jinja").read_text() for name in ("llama3", "qwen3", "mistral")
)
BE_SHORT = {"role": "system", "content": "Be short."}
ASK = {"role": "user", "content": "Why? "}
ANSWER = {"role": "assistant", "content": "So."}
MORE = {"role": "user", "content": "Go on"}
TALK = [BE_SHORT, ASK, ANSWER, MORE]
TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))


def template(source):
    return ChatTemplate(path="here.json", source=source, special_tokens=TOKENS)


def test_llama_3_template_is_rendered():
    assert template(LLAMA3).render(TALK) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nSo.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGo on<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert template(LLAMA3).render([ASK], add_generation_prompt=False).endswith("Why?<|eot_id|>")


def test_qwen_3_template_is_rendered():
    thought = ANSWER | {"content": "<think>\nHm.\n</think>\n\nSo."}
    expected = (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhy? <|im_end|>\n"
        "<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\nGo "
        "on<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(QWEN3).render([BE_SHORT, ASK, thought, MORE]) == expected
    assert (
        template(QWEN3).render(TALK, enable_thinking=False) == expected + "<think>\n\n</think>\n\n"
    )


def test_mistral_template_is_rendered():
    assert (
        template(MISTRAL).render(TALK)
        == "<s>[INST] Be short.\n\nWhy?  [/INST] So.</s>[INST] Go on [/INST]"
    )
    with refusal("here.json.*roles must alternate"):
        template(MISTRAL).render([ASK, MORE])


def test_templates_have_functions_and_settings():
    assert template("{{ messages | tojson }}").render([{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )
    two = [{"content": "<é>", "role": "user"}]
    assert template("{{ messages | tojson(ensure_ascii=True) }}").render(two) == (
        r'[{"content": "<\u00e9>", "role": "user"}]'
    )
    assert template("{{ messages[0] | tojson(false, 1, (',', ':'), true) }}").render(two[:1]) == (
        '{\n "content":"<é>",\n "role":"user"\n}'
    )
    assert len(template("{{ strftime_now('%Y-%m-%d') }}").render([ASK])) == 10
    text = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role[0] * 2 }}{% "
        "endfor %}"
    )
    assert template(text).render(TALK) == "ssuu"
    text = "{% for m in messages %}{% generation %}{{ m.role }},{% endgeneration %}{% endfor %}"
    assert template(text).render([ASK, ANSWER]) == "user,assistant,"
    text = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert template(text).render([ASK]) == "21"
    assert template("  {% if true %}\n  a\n  {% endif %}\nb").render([ASK]) == "  a\nb"


def test_absent_tools_and_documents_are_none():
    """Templates test `tools is not none`, which is true of an undefined variable."""
    text = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}"
    assert template(text).render([ASK]) == "True True True"
    assert template(text).render([ASK], tools=[], documents=[{}]) == "False False True"
    with refusal("does not read temperature = 0.5: leave it out"):
        template(text + "my_temperature").render([ASK], temperature=0.5)


def test_messages_have_no_nulls_and_nothing_is_added():
    """Templates test for keys: nulls are dropped, as in transformers. Thoughts have three names."""
    keys = "{% for m in messages %}{{ m | dictsort }}{% endfor %}"
    call = {"role": "assistant", "tool_calls": [{}]}
    expected = "[('role', 'assistant'), ('tool_calls', [{}])]"
    assert (
        template(keys).render([call])
        == template(keys).render([call | {"content": None}])
        == expected
    )
    nulls = dict.fromkeys(("tool_calls", "reasoning_content", "name", "audio"))
    assert template(keys).render([ASK | nulls]) == template(keys).render([ASK])
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert (
            template("{{ messages[0].reasoning_content }}").render([ANSWER | {name: "Hm"}]) == "Hm"
        )


@pytest.fixture
def no_process(monkeypatch):
    """Starts the test without a worker process, and ends the process of the test."""
    monkeypatch.setattr(chat, "_worker", chat._Worker())
    yield
    chat._worker.end()


@pytest.fixture
def short(no_process, monkeypatch):
    """Limits templates to 0.2 seconds."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.2)


@pytest.mark.parametrize("source", (FOLDER / "hostile.txt").read_text().splitlines())
def test_templates_are_sandboxed(short, source):
    with refusal("here.json"):
        pytest.fail(repr(template(source).render([ASK])[:80]))


@pytest.mark.parametrize("is_blocked", [False, True])
def test_template_time_limit_needs_no_signal(short, is_blocked):
    """A program that has started libtpu ignores the signal."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = signal.signal(signal.SIGPROF, signal.SIG_DFL if is_blocked else signal.SIG_IGN)
    if is_blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        with refusal("it takes more than 0.2 seconds"):
            template(endless).render([ASK])
    finally:
        signal.signal(signal.SIGPROF, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def test_limits_count_one_conversation_alone(short):
    """Earlier conversations do not count, and the next one after a timeout is rendered."""
    source = (
        "{% for i in range(2000) %}{% for m in messages %}{{ m.role[:0] }}{% endfor %}{% endfor %}."
    )
    assert [template(source).render([ASK] * 6) for _ in range(12)] == ["."] * 12
    with refusal("here.json .* it takes more than 0.2 seconds$"):
        template(source).render([ASK] * 5_000)
    assert template(source).render([ASK]) == "."


def test_an_interrupted_conversation_does_not_answer_the_next(monkeypatch):
    template("first").render([ASK])
    with monkeypatch.context() as patch:
        patch.setattr(chat.json, "loads", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            template("interrupted").render([ASK])
    assert template("next").render([ASK]) == "next"


FORKED = """
import os
from specsamp.checkpoints import chat

template = chat.ChatTemplate(path="here.json", source="{{ messages[0].content }}")

def rendered(text):
    return template.render([{"role": "user", "content": text}]) == text

assert rendered("before")
child = os.fork()
is_right = all(rendered(f"{child} {i}") for i in range(100))
if child == 0:
    raise SystemExit(not is_right)
print(is_right, os.waitpid(child, 0)[1], chat._worker.process.poll())
"""


def test_a_forked_program_has_its_own_process():
    """Parent and child once shared a process: answers crossed, and the child's exit ended it."""
    made = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert made.stdout == "True 0 None\n", made.stdout + made.stderr


@pytest.fixture
def worker(no_process, monkeypatch):
    """Returns a process that has rendered a template; a second one has MAX_SECONDS + 0.4 s."""
    template("first").render([ASK])
    monkeypatch.setattr(chat, "MORE_SECONDS", 0.4, raising=False)
    return chat._worker.process


def test_a_process_that_ended_while_idle_is_replaced(worker):
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert template("next").render([ASK]) == "next"


def test_ended_template_process_is_replaced_once(worker):
    os.kill(worker.pid, signal.SIGSTOP)
    timer = threading.Timer(0.1, worker.kill)
    timer.start()
    assert template("next").render([ASK]) == "next"
    timer.join()


def test_unusable_template_is_an_error(no_process, monkeypatch, tmp_path):
    """A chat model would otherwise be used for plain completion."""
    (tmp_path / "jinja2.py").write_text("import no_such_library\n")
    assert not knows_conversations(ByteTokenizer())
    monkeypatch.setattr(
        ByteTokenizer, "encode_chat", lambda _, messages: template(LLAMA3).render(messages)
    )
    assert knows_conversations(ByteTokenizer())
    chat._worker.end()
    with monkeypatch.context() as patch, pytest.raises(CannotRender, match="pip install jinja2"):
        patch.setitem(sys.modules, "jinja2", None)
        knows_conversations(ByteTokenizer())
    with (
        monkeypatch.context() as patch,
        pytest.raises(CannotRender, match="ended with status 1: .*no_such_library"),
    ):
        patch.syspath_prepend(tmp_path)
        knows_conversations(ByteTokenizer())
    with (
        monkeypatch.context() as patch,
        pytest.raises(CannotRender, match="does not start: .*/no/python"),
    ):
        patch.setattr(sys, "executable", "/no/python")
        knows_conversations(ByteTokenizer())


def test_too_long_rendered_texts_are_refused():
    with refusal("here.json .* it writes 33,554,432 characters$"):
        template("{{ 'x' * 2 ** 25 }}").render([ASK])
    with refusal("here.json .* it takes more than 268,435,456 bytes of memory$"):
        template("{{ messages[0].content * 16_000_000 }}").render(
            [ASK | {"content": "😀"}]
        )  # twelve bytes each in JSON


def test_templates_end_by_the_clock(worker, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.1)
    os.kill(worker.pid, signal.SIGSTOP)
    rescue = threading.Timer(10, worker.kill)
    rescue.start()
    with refusal("did not finish in 0.5 seconds of wall time$"):
        template("stopped").render([ASK])
    rescue.cancel()
    monkeypatch.setattr(chat, "MORE_SECONDS", 25.0)  # time to start a new process
    assert template("next").render([ASK]) == "next"


def test_conversation_is_refused_while_template_process_is_busy(worker, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.1)
    with chat._worker.lock, pytest.raises(CannotRender, match="busy for 0.5 seconds: try again$"):
        template("second").render([ASK])
    assert template("next").render([ASK]) == "next"


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "the conversation has no messages"),
        ([{"role": "user"}], "message 0 must have a text as its content"),
        ([ASK | {"content": None, "tool_calls": []}], "message 0 must have a text as its content"),
        ([ASK | {"time": {1}}], "JSON values: .*set"),
        (
            [ASK, "Why?"],
            "message 1 must have a text as its role .images are not read.; got 'Why[?]'",
        ),
        (
            [ASK | {"content": [{"type": "image"}]}],
            "text as its content .images are not read.; got",
        ),
    ],
)
def test_invalid_messages_are_refused(messages, message):
    with refusal(message):
        template(LLAMA3).render(messages)


def write(folder, **content):
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def test_template_is_read_from_each_known_file(tmp_path):
    place = epath.Path(tmp_path)
    assert read_chat_template(place) is None
    write(tmp_path, eos_token="</s>")
    assert read_chat_template(place) is None
    write(
        tmp_path,
        chat_template="a",
        bos_token={"content": "<s>"},
        eos_token="</s>",
        pad_token=None,
        add_bos_token=True,
    )
    assert (read_chat_template(place).source, read_chat_template(place).special_tokens) == (
        "a",
        TOKENS,
    )
    write(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}],
    )
    found = read_chat_template(place)
    assert found.source == "c" and found.render([ASK]) == "c"
    assert found.render([ASK], tools=[{}]) == "b"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert read_chat_template(place).source == "d"
    (tmp_path / "additional_chat_templates").mkdir()  # as transformers saves them
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    found = read_chat_template(place)
    assert (found.render([ASK]), found.render([ASK], tools=[{}])) == ("d", "e")
    shutil.rmtree(tmp_path / "additional_chat_templates")
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, chat_template=[{"name": "tool_use", "template": "b"}])
    assert read_chat_template(place).source == "b"
    write(tmp_path, chat_template=7)
    with refusal("tokenizer_config.json has a chat_template of type int"):
        read_chat_template(place)


def test_conversations_as_prompts(original, tmp_path):
    """Special tokens appear once, where the template has them, and plain texts remain texts."""
    folder = shutil.copytree(original, tmp_path / "model")
    write(
        folder,
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}x",
    )
    tokenizer = open_checkpoint(folder).tokenizer
    pair = Pair(target=CountingLM(vocab_size=304), target_params=(), tokenizer=tokenizer)
    talk, text = encode(pair, [[ASK, ANSWER], "def"])
    assert talk == [
        *tokenizer.encode("Why? "),
        278,
        *tokenizer.encode("So."),
        278,
        *tokenizer.encode("x"),
    ]
    assert text == tokenizer.encode("def")
    made = generate(pair, [[ASK, ANSWER]], 4, draft_length=0, stop=[])[0]
    assert made.tokens == [talk[-1] + i for i in range(1, 5)]


def test_conversations_without_a_template(original):
    pair = Pair(
        target=CountingLM(vocab_size=304),
        target_params=(),
        tokenizer=open_checkpoint(original).tokenizer,
    )
    with refusal("the tokenizer has no chat template"):
        encode(pair, [[ASK]])
    with refusal("bytes have no chat template"):
        encode(Pair(target=CountingLM(), target_params=(), tokenizer=ByteTokenizer()), [[ASK]])
    with refusal("a conversation needs a tokenizer"):
        encode(Pair(target=CountingLM(), target_params=()), [[ASK]])
