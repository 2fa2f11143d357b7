"""Writes completions for a file of prompts; a killed run resumes.

    python launch/generate.py --prompts=prompts.jsonl --output=runs/texts.jsonl --rows=16
    python launch/generate.py --prompts=prompts.jsonl --output=gs://BUCKET/texts.jsonl --replica=3/8

A line of --prompts is {"prompt": TEXT} or {"messages": [...]}, and may have an "id", an integer; by
default its place, counted from 0. A line of --output is a completion, whose "prompt_id" names the
prompt. The same command resumes.

--replica=i/N takes the ids that are i modulo N, and writes a file of its own in the folder of
--output. A text depends on its prompt, its id and the seed alone, unless the drafter uses
several rows, so replicas write the texts of one run. The command without --replica takes over the
files of all replicas, and decodes what is missing.

    python launch/generate.py --config=configs/hf.py:TARGET --conversations=2000000 \\
        --output=runs/chats --rows=32

decodes so many tokens of conversations from a tuned target, questions and answers of up to
--config.max_new_tokens, to train a draft or a head on: --output is a folder of token ids. A later
run with more tokens begins with the same conversations.
"""

import time

from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.cells import read_numbered
from launch.lib.experiment import build, headline
from launch.lib.fields import ExperimentConfig, ExperimentFlag, own_with_digest
from launch.lib.own_code import is_own
from specsamp import CompletionLog, generate_many, storage
from specsamp.serving.orders import parse_order
from specsamp.training.conversations import write_conversations

_CONFIG = ExperimentFlag("configs/trained_pair.py")
_PROMPTS = flags.DEFINE_string("prompts", None, "The prompts, JSON lines, local or gs://.")
_CONVERSATIONS = flags.DEFINE_integer(
    "conversations",
    None,
    "Without --prompts: write so many tokens of conversations.",
    lower_bound=1,
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "The file of completions, or the folder of conversations, local or gs://.",
    required=True,
)
_REPLICA = entry.define("replica")
_ROWS = flags.DEFINE_integer("rows", 8, "Texts that are decoded together.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Completions of each prompt.", lower_bound=1)
_ORDER = entry.define("order")
_REQUIRE_EXACT = entry.define("require_exact")


def main() -> None:
    console = entry.make_console()
    _CONFIG.refuse_fields(["prompts"], "give --prompts")
    config = _CONFIG.read(["batch", "prompt_length", "repeats"], "give --rows and --samples")
    config = config.turned({"batch": _ROWS.value})
    if (_PROMPTS.value is None) == (_CONVERSATIONS.value is None):
        raise ValueError("give --prompts=FILE, or --conversations=TOKENS, and not both")
    if _CONVERSATIONS.value is not None:
        write_chats(config, console)
        return
    order = parse_order(_ORDER.value)
    replica, output = entry.parse_replica(_REPLICA.value, _OUTPUT.value)
    if storage.is_stream(_OUTPUT.value):
        raise ValueError(
            f"--output={_OUTPUT.value} is a stream, from which no run can go on: name a file"
        )
    prompts = replica.part(read_numbered(_PROMPTS.value, bool(config.chat)), "prompts")
    texts = list(prompts.values())
    experiment = build(config, texts[: config.batch])
    own = [own_with_digest(word) for word in (config.rule, config.drafter) if is_own(word)]
    made_by = {"weights": experiment.weights} | ({"own code": own} if own else {})
    log = CompletionLog(_OUTPUT.value, made_by, replica)
    queue = generate_many(
        experiment.pair,
        texts,
        config.max_new_tokens,
        rows=config.batch,
        log=log,
        order=order,
        seed=config.seed,
        num_samples=_SAMPLES.value,
        prompt_ids=list(prompts),
        method=experiment.method,
        require_exact=_REQUIRE_EXACT.value,
    )
    total = len(texts) * _SAMPLES.value
    task = f"{len(texts)} prompts, {total} texts of up to {config.max_new_tokens} tokens"
    console.print(headline(experiment, task=task))
    start, tokens = time.perf_counter(), 0
    with entry.keeps("the same command goes on"), entry.progress(console, "decoding") as say:
        for done, completion in enumerate(queue, 1):
            tokens += len(completion.tokens)
            say(f"{done} of {total} texts")
    seconds = time.perf_counter() - start
    told = f"{total} texts, {queue.known} of them known before; {tokens} tokens"
    console.print(f"{told}, in {seconds:.0f} s")
    entry.say_written(output, console)


def write_chats(config: ExperimentConfig, console: Console) -> None:
    """Writes conversations of the target to the folder of --output."""
    entry.refuse_flags(["replica", "samples", "order"], "--conversations does not read it")
    if storage.is_stream(_OUTPUT.value):
        raise ValueError(f"--output={_OUTPUT.value} is a stream: name a folder")
    folder = storage.place(_OUTPUT.value)
    entry.check_output(str(folder / "written_by.json"))
    experiment = build(config)
    console.print(headline(experiment, task=f"conversations of {_CONVERSATIONS.value} tokens"))
    with entry.keeps("the same command goes on"), entry.progress(console, "writing") as say:
        write_conversations(
            folder,
            experiment.pair,
            tokens=_CONVERSATIONS.value,
            rows=_ROWS.value,
            longest_answer=config.max_new_tokens,
            seed=config.seed,
            report=lambda tokens: say(f"{tokens} of {_CONVERSATIONS.value} tokens"),
        )
    entry.say_written(folder, console)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
