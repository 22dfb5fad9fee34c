"""Work of clients' texts in a process of its own: what never ends, crashes or fills memory is refused, and over."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outcore.apart import Apart, Bench
from outcore.serve import reading
from tests.forked import ROOT
from tests.refused import refused
from tests.waiting import until

HI = [{"role": "user", "content": "Hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


class Tool:
    """Does what it is told."""

    def say(self, words):
        return words

    def number(self):
        return os.getpid()

    def sleep(self):
        time.sleep(600)

    def crash(self):
        ctypes.string_at(0)

    def fill(self):
        return len(bytearray(3 << 30))

    def sink(self):
        return self.sink()

    def stack(self):
        return threading.stack_size()

    def fail(self):
        raise KeyError("nothing here")


@pytest.fixture(scope="module")
def apart():
    made = Apart(Tool(), memory_bytes=2 << 30)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sleep", "takes more than the 0.2 s"),
        ("crash", "too much memory, or is nested too deeply"),
        ("fill", "too much memory"),
        ("sink", "recursion"),
        ("fail", "nothing here"),
    ],
)
def test_work_that_goes_wrong_is_refused_in_words_and_the_next_call_answers(apart, name, words):
    refused(ValueError, words, lambda: apart.call(name, limit_s=0.2 if name == "sleep" else None))
    assert apart.call("say", "yes") == "yes"


def test_a_call_that_says_no_limit_has_that_of_all():
    apart = Apart(Tool(), limit_s=0.2)
    try:
        refused(ValueError, "takes more than the 0.2 s", lambda: apart.call("sleep"))
    finally:
        apart.close()


def test_work_has_less_stack_than_those_who_use_what_it_tried(apart):
    assert 0 < 2 * apart.call("stack") <= reading.STACK_BYTES


def test_each_thread_has_a_process_so_that_none_waits(apart):
    waits = threading.Thread(target=lambda: refused(ValueError, "takes more", lambda: apart.call("sleep", limit_s=1)))
    waits.start()
    assert apart.call("say", "yes") == "yes" and waits.is_alive()
    waits.join()


def test_work_ends_with_a_server_that_was_killed():
    script = (
        "import sys, threading; from outcore.apart import Apart; from tests.apart.test_apart import Tool; "
        "apart = Apart(Tool()); print(apart.call('number'), flush=True); "
        "threading.Thread(target=sys.stdin.read).start(); apart.call('sleep', limit_s=600)"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert server.stdout is not None
    worker = int(server.stdout.readline())
    server.kill()
    server.communicate()
    until(lambda: not Path(f"/proc/{worker}").exists())


def tokenizer_of(template="", pattern=None):
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "H": 2, "i": 3}, []))
    made.decoder = decoders.ByteLevel()
    if pattern:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = template or "{{ messages[0].content }}"
    return tokenizer


def test_a_bench_that_has_worked_here_works_there_and_one_that_cannot_be_sent_is_said():
    bench = Bench(tokenizer_of())
    here = bench.ask("prompt", HI, None, {}, False)
    apart = Apart(bench)
    try:
        assert apart.call("prompt", HI, None, {}, False) == here == ("Hi", [2, 3], {})
    finally:
        apart.close()
    refused(RuntimeError, "a process of its own", lambda: Apart(Bench(Alone())))


class Alone:
    """A tokenizer that holds what cannot be sent."""

    chat_template = "{{ messages }}"

    def __init__(self):
        self.lock = threading.Lock()


def chain(count):
    """Rules that refer to each other, deeper than a stack is."""
    return "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1} "b"' for i in range(count)), f'r{count}: "c"'])


@pytest.mark.parametrize(
    ("bench", "asked", "words"),
    [
        (Bench(tokenizer_of(LOOPS)), ("prompt", HI, None, {}, False), "takes more than"),
        (Bench(tokenizer_of("{{ '%9999999999d' % 1 }}")), ("prompt", HI, None, {}, False), "MemoryError"),
        (Bench(tokenizer_of(pattern=r"(?=(a+))a*b\1")), ("texts", ["a" * 90_000], True), "takes more than"),
        (Bench(tokenizer_of()), ("try_form", chain(20_000)), "nested too deeply"),
    ],
)
def test_templates_tokenizers_and_forms_of_strangers_cost_seconds_at_most(bench, asked, words):
    if asked[0] == "try_form":
        pytest.importorskip("llguidance")
    apart = Apart(bench)
    try:
        with pytest.raises(ValueError, match=words):
            apart.call(*asked, limit_s=20 if "form" in asked[0] else 1)
    finally:
        apart.close()
