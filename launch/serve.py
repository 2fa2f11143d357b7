"""Serves a pair over HTTP: OpenAI's completions and chat completions, with continuous batching.

    python launch/serve.py --port=8000
    python launch/serve.py --config=configs/hf.py:llama-8b-eagle3 --rows=16 --context=8192 \\
        --key_file=key.txt

    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0.8, "seed": 1}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    chunks = client.completions.create(model="python", prompt="def f(n):", stream=True)
    for chunk in chunks:
        print(chunk.choices[0].text, end="")

A text equals that of `generate` with the same seed. Each request has its own sampling, seed, budget
and stop texts; drafter and rule are the configuration's.
usage.completion_tokens_details counts the drafted tokens that were accepted and rejected. GET
/health has the counts of busy rows, GET /metrics all counts for Prometheus, and the page at / shows
a text while it is decoded. Libraries: pip install -e '.[serve]'.
"""

import dataclasses
import os
import signal
import sys
from typing import NoReturn

import jax
from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.experiment import Experiment, headline, rule_name
from launch.lib.fields import ExperimentConfig, ExperimentFlag
from launch.lib.machine_choice import open_for_machine
from launch.lib.rules import make_rule
from specsamp import storage, validate
from specsamp.checkpoints.chat import knows_conversations
from specsamp.decoding.method import check_exact
from specsamp.mesh import distributed
from specsamp.serving.learner import Learner
from specsamp.serving.orders import parse_order
from specsamp.serving.request_warps import make_warp
from specsamp.serving.service import Service

KEY = "SPECSAMP_SERVE_KEY"
# Seconds after which a thread that waits gets Python's lock: the compiler holds it for long, and a
# step needs it many times.
SWITCH_INTERVAL = 0.0005

_CONFIG = ExperimentFlag("configs/trained_pair.py")
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "The address to bind; 0.0.0.0 listens on all interfaces."
)
_PORT = flags.DEFINE_integer(
    "port", 8000, "The port; 0 chooses a free port.", lower_bound=0, upper_bound=65535
)
_MODEL = flags.DEFINE_string(
    "model", None, "The model's name for clients; default the name of the pair or the target."
)
_ROWS = flags.DEFINE_integer("rows", 8, "Texts that are decoded together.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context",
    None,
    "Tokens of a prompt and its text together; fewer is faster; default up to 4096.",
    lower_bound=2,
)
_MAX_WAITING = flags.DEFINE_integer(
    "max_waiting",
    64,
    "Texts that may wait for a row; further requests get status 429.",
    lower_bound=0,
)
_MAX_PER_CLIENT = flags.DEFINE_integer(
    "max_per_client",
    None,
    "Texts of one of several keys, or of an address, that may run; default all.",
    lower_bound=1,
)
_LEARNING_RATE = flags.DEFINE_float(
    "draft_learning_rate",
    0.0,
    "Learning rate at which the draft model is distilled on finished texts; 0: it does not learn.",
    lower_bound=0.0,
)
_ROUNDS = flags.DEFINE_integer(
    "rounds_per_slice",
    4,
    "Rounds between scheduler steps, which stream new text and admit requests.",
    lower_bound=1,
)
_MAX_BODY = flags.DEFINE_integer("max_body", 1 << 20, "Bytes of a request at most.", lower_bound=1)
_TIMEOUT = flags.DEFINE_float(
    "timeout", 60.0, "Seconds for a client to send a request, and to read the answer."
)
_KEY_FILE = flags.DEFINE_string(
    "key_file",
    None,
    f"A file with the keys that requests may bring, one a line; default the variable {KEY}.",
)
_GRAMMARS = flags.DEFINE_bool(
    "grammars", False, "Take response_format and tools; each start then compiles anew."
)
_ORDER = entry.define("order")
_REQUIRE_EXACT = entry.define("require_exact")


def main() -> None:
    console = entry.make_console()
    # SIGTERM ends this process as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from specsamp.serving.endpoint import Endpoint
        from specsamp.serving.web_server import WebServer, address, bind
    except ImportError as error:
        raise ValueError(
            f"an endpoint takes libraries ({error}): pip install starlette uvicorn pydantic jinja2 "
            "prometheus-client"
        ) from error
    validate.number("--timeout", _TIMEOUT.value, 0.1)
    sys.setswitchinterval(SWITCH_INTERVAL)
    of_requests = ("batch", "max_new_tokens", "prompt_length", "repeats", "sampling", "seed")
    of_requests += ("prompts",)
    config = _CONFIG.read(of_requests, "requests bring it, and --rows and --context bound it")
    parse_order(_ORDER.value)
    if _REQUIRE_EXACT.value:
        check_exact(make_rule(config.rule))
    held = []  # the first process has the keys and the port, and its errors end all
    distributed.from_first(
        lambda: held.extend([read_keys(), bind(_HOST.value, _PORT.value, _TIMEOUT.value)])
    )
    if not held:
        decode_for_first(config, console)
    keys, bound = held
    with bound:
        experiment, service = make_service(config, console)
        has_chat = knows_conversations(experiment.pair.tokenizer)
        service.start()
        model = _MODEL.value or (config.hugging_face.target if config.hugging_face else config.pair)
        endpoint = Endpoint(
            service=service,
            model=model,
            has_chat=has_chat,
            keys=keys,
            max_body=_MAX_BODY.value,
            timeout=_TIMEOUT.value,
            say=lambda line: console.print(line, style="dim", markup=False, highlight=False),
        )
        server = WebServer(endpoint.app(), service, _TIMEOUT.value)
        bound.listen()  # before the address is printed
        say_where(console, address(bound), model, bool(keys))
        try:
            server.run(sockets=[bound])
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"{server.ended} texts were being written and were ended"
            ) from interrupt
        finally:
            end(service, at_once=server.force_exit)
        check(service)


def end(service: Service, at_once: bool) -> None:
    """Waits for the slice that runs, and for the program that is being compiled, which may take
    minutes.

    A second interrupt ends this process at once, without a normal exit, which would block too.
    """
    service.close()
    try:
        if at_once:
            raise KeyboardInterrupt
        service.join()
    except KeyboardInterrupt:
        distributed.end_now("interrupted twice; what was being compiled is lost", entry.INTERRUPTED)


def decode_for_first(config: ExperimentConfig, console: Console) -> NoReturn:
    """Decodes what the first process takes, until it ends."""
    _, service = make_service(config, console)
    # They may go to all processes, and the first still needs this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    service.start()
    service.join()
    check(service)
    raise KeyboardInterrupt("the first process has ended the server")


def make_service(config: ExperimentConfig, console: Console) -> tuple[Experiment, Service]:
    """Returns the experiment and the service of its pair, compiled for the first requests."""
    experiment = open_for_machine(config.turned({"batch": _ROWS.value}), console)
    method, drafter = experiment.method, experiment.method.drafter
    service = Service(
        experiment.pair,
        dataclasses.replace(method, sampling=make_warp({})),
        rows=_ROWS.value,
        context=_CONTEXT.value,
        max_waiting=_MAX_WAITING.value,
        max_per_client=_MAX_PER_CLIENT.value,
        rounds_per_slice=_ROUNDS.value,
        learner=make_learner(experiment) if _LEARNING_RATE.value else None,
        order=parse_order(_ORDER.value),
        has_grammars=_GRAMMARS.value,
    )
    drafting = f"{type(drafter).__name__} K = {drafter.K}" if drafter.K else "no draft"
    task = (
        f"{drafting}, {rule_name(method.rule)}, {service.batch.usage.rows} rows, "
        f"{service.context} tokens of prompt and text"
    )
    console.print(headline(experiment, task))
    with entry.progress(console, "compiling for the first requests"):
        service.compile()
    return experiment, service


def check(service: Service) -> None:
    """Ends this process if the service has failed."""
    if service.failed and jax.process_count() > 1:
        distributed.end_now(f"{service.failed}; has another process died?")
    if service.failed:
        raise RuntimeError(service.failed)


def make_learner(experiment: Experiment) -> Learner:
    """Returns the training configuration of the draft while the server runs, with a constant
    learning rate.
    """
    from specsamp.training.online import DraftLearner  # loads optax and orbax
    from specsamp.training.trainer import TrainConfig

    config = TrainConfig(steps=2**30, batch=8, learning_rate=_LEARNING_RATE.value, final_share=1.0)
    return DraftLearner(experiment.pair, config)


def say_where(console: Console, url: str, model: str, has_key: bool) -> None:
    """Prints the address of the server, and a warning if anybody can use it."""
    console.print(
        f"ready: {url}/v1 serves {model!r}, {'with' if has_key else 'without'} a key; Ctrl-C ends "
        "it",
        style="bold",
    )
    if not has_key and _HOST.value not in ("127.0.0.1", "localhost", "::1"):
        console.print(
            "anybody who reaches this address can use it: give --key_file", style="yellow"
        )


def read_keys() -> list[str]:
    """Returns the keys of the file or of the environment; raises ValueError for one that no header
    can hold.
    """
    where = (
        f"--key_file={_KEY_FILE.value}" if _KEY_FILE.value else f"the environment variable {KEY}"
    )
    if _KEY_FILE.value:
        text = storage.read_text(_KEY_FILE.value)
    elif KEY in os.environ:
        text = os.environ[KEY]
    else:
        return []
    keys = text.strip().splitlines()
    if not keys or not all(
        key and key.isascii() and key.isprintable() and " " not in key for key in keys
    ):
        raise ValueError(f"{where} must hold keys of printable ASCII without spaces, one a line")
    return keys


if __name__ == "__main__":
    entry.run(main, _CONFIG)
