"""The audit of endpoints: sound engines pass, a planted bias of the stated size fails, and bad
answers are named.
"""

import contextlib
import http.server
import json
import math
import threading

import numpy as np
import pytest

from specsamp.evaluation.audit import Status
from specsamp.evaluation.audit.endpoints import RemoteEngine, compare_endpoints
from support.extras import slow_but
from support.refusals import refusal
from support.run_script import call

PAIRS = ("aa", "ab", "ac", "ba", "bb", "bc")
PROBS = np.array([0.3, 0.2, 0.1, 0.2, 0.15, 0.05])
BIASED = PROBS + np.array([0.1, 0, 0, -0.1, 0, 0])
SOUND = {"detect": 0.1, "level": 1e-4}


@contextlib.contextmanager
def engine(probs=PROBS, shown=PROBS, most=1000, status=200, answer=None, refusals=0):
    """Serves samples of ``probs``, at most ``most`` per answer, with log-probabilities of ``shown``
    on request.
    """
    busy = iter(range(refusals))

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            drawn = np.random.default_rng(asked["seed"]).choice(
                len(PAIRS), min(asked["n"], most), p=probs
            )
            choices = [{"text": PAIRS[i], "logprobs": None} for i in drawn]
            for choice, i in zip(choices, drawn):
                if "logprobs" in asked:
                    choice["logprobs"] = {
                        "tokens": [*PAIRS[i]],
                        "token_logprobs": [math.log(shown[i]), 0.0],
                    }
            body = json.dumps(answer or {"choices": choices}).encode()
            self.send_response(status if next(busy, None) is None else 429)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("probs", "verdict"), [(PROBS, Status.PASSED), (BIASED, Status.FAILED)])
@pytest.mark.parametrize("alone", slow_but([True, False], False))
def test_a_planted_bias_of_the_stated_size_fails(probs, verdict, alone):
    with engine(probs) as speculative, engine() as plain:
        fields = {"logprobs": 0} if alone else {}
        other = None if alone else RemoteEngine(plain)
        check = compare_endpoints(RemoteEngine(speculative, fields), other, ["x", "y"], **SOUND)
    assert check.verdict == verdict, check.sentence
    assert check.numbers["cells"] == 2 * (len(PAIRS) + 1)
    if verdict is Status.FAILED:
        assert check.numbers["measured"] == pytest.approx(0.1, abs=0.04)


def test_log_probabilities_of_another_distribution_fail():
    with engine(PROBS, shown=BIASED) as url:
        check = compare_endpoints(RemoteEngine(url, {"logprobs": 0}), None, ["x"], **SOUND)
    assert check.verdict is Status.FAILED


def test_busy_engines_are_asked_again(monkeypatch):
    with engine(most=1, refusals=2) as url:
        drawn = RemoteEngine(url).sample("x", 70, 0)
    assert len(drawn) == 70 and {text for text, _ in drawn} <= set(PAIRS)
    monkeypatch.setattr("specsamp.evaluation.audit.endpoints.BUSY_SECONDS", 0.0)
    with engine(refusals=1000) as url, refusal("refused .* for 0 seconds: "):
        RemoteEngine(url).sample("x", 1, 0)  # not for ever


@pytest.mark.parametrize(
    ("answer", "status", "fields", "message"),
    [
        ({"error": {"message": "no such model"}}, 400, {}, "no such model"),
        ({"choices": [{"text": "a"}]}, 200, {"logprobs": 0}, "returns no logprobs"),
        ({"nothing": 1}, 200, {}, "gave no completion"),
        ([1], 200, {}, "gave no completion"),
        ({"choices": []}, 200, {}, "returns no choices"),
        ({"choices": [{"text": "aa"}] * 64}, 200, {}, "leaves nothing to chance"),
    ],
)
def test_bad_answers_are_named(answer, status, fields, message):
    with engine(answer=answer, status=status) as url, refusal(message):
        compare_endpoints(
            RemoteEngine(url, fields), None if fields else RemoteEngine(url), ["x"], **SOUND
        )


def test_missing_engine_is_named():
    with refusal(r"http://127.0.0.1:9 gave no completion"):
        RemoteEngine("http://127.0.0.1:9").sample("x", 1, 0)


@pytest.mark.slow
def test_endpoint_audit_reports_and_fails_for_bias(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x\ny\n")
    shared = [f"--prompts={prompts}", "--detect=0.1", f"--output={tmp_path}/audit.json"]
    with engine(BIASED) as speculative, engine() as plain:
        found = call("audit", f"--engine={speculative}", f"--reference={plain}", *shared)
        sound = call("audit", f"--engine={plain}", '--request={"temperature": 1}', *shared)
    assert found.returncode == 1 and "failed" in found.stdout and plain in found.stdout
    assert sound.returncode == 0, sound.stderr
    assert json.loads((tmp_path / "audit.json").read_text())["request"] == {"temperature": 1}
