"""Compares greedy completions, and the time of a token, with those of Hugging Face transformers,
and the time with that of llama.cpp.

    pip install torch transformers xllamacpp
    python launch/study.py beside --target=TARGET --head=smollm2-head --draft=DRAFT \\
        --gguf=model.Q4_1.gguf --source=spec_bench.jsonl --output=runs/beside.json

All answer the first questions of each category, in turns: ours and transformers read the same files
in float32, also the same draft model, llama.cpp the quantised file from which they may come. Times
include the reading of the prompt. Where two completions differ, the first differing token has a
margin: the target's logit of its most probable token less that of the next. A small margin is a
near-tie, which rounding decides.
"""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from launch.lib.study import Document, Published, Say, Study
from specsamp import NgramDrafter, Pair, generate, greedy
from specsamp.analysis.report import Table
from specsamp.analysis.workload import Quartiles
from specsamp.checkpoints.public_pair import read_pair
from specsamp.evaluation.task import first_of_each
from specsamp.evaluation.tasks import load_task

K = 4
NEAR = 1e-3  # logits
OURS = ("plain", "prompt lookup", "head", "draft model")
THEIRS = tuple(f"transformers, {name}" for name in ("plain", "prompt lookup", "draft model"))
LLAMA = "llama.cpp, plain"
COMPARED = (*OURS, THEIRS[0])


def prepare(options: Any) -> None:
    """Reads both sides and the questions."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f"{error}: pip install torch transformers") from error
    torch.set_num_threads(options.threads)
    options.torch = torch
    options.pair = read_pair(options.target, options.head, is_head=True, dtype="float32")
    read_theirs = transformers.AutoModelForCausalLM.from_pretrained
    options.theirs = read_theirs(options.target, dtype=torch.float32)
    options.theirs.generation_config.eos_token_id = None  # completions have a fixed length
    if options.draft:
        options.drafted = read_pair(options.target, options.draft, dtype="float32")
        options.assistant = read_theirs(options.draft, dtype=torch.float32)
        options.assistant.generation_config.update(
            num_assistant_tokens=K,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    options.llama = llama_server(options) if options.gguf else None
    problems = load_task("spec_bench", options.source).problems
    options.questions = first_of_each(problems, options.of_each)


def llama_server(options: Any) -> Any:
    """Starts llama.cpp on a file, in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.gguf
    params.n_parallel, params.n_ctx = 1, 4096
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    return xllamacpp.Server(params)


def measure(options: Any, say: Say) -> dict[str, Any]:
    """Answers every question on both sides."""
    seconds, differing = collections.defaultdict(list), []
    timed = {question.id for question in first_of_each(options.questions, options.timed_of_each)}
    for number, question in enumerate(options.questions):
        say(f"{number} of {len(options.questions)} questions")
        message = [{"role": "user", "content": question.prompt}]
        prompt = options.pair.tokenizer.encode_chat(message)
        completions, runs = {}, [*runs_of(options, prompt).items()]
        first = number % len(runs)
        for name, run in runs[first:] + runs[:first]:
            if question.id not in timed:
                completions[name] = run() if name in COMPARED else None
                continue
            run()  # compiles, and fills caches
            start = time.perf_counter()
            completions[name] = run()
            seconds[name].append((time.perf_counter() - start) / options.new_tokens)
        reference = completions[THEIRS[0]]
        for name in OURS:
            if completions.get(name, reference) != reference:
                at = first_difference(completions[name], reference)
                margin = margin_of(options, prompt + reference[:at])
                differing.append(
                    {"question": question.id, "method": name, "token": at, "margin": margin}
                )
    return {
        "questions": len(options.questions),
        "timed": len(timed),
        "new_tokens": options.new_tokens,
        "ms_per_token": {name: Quartiles.of(1e3 * np.array(s)) for name, s in seconds.items()},
        "differing": differing,
    }


def runs_of(options: Any, prompt: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Returns a function for each method, which answers a question greedily: with tokens, or with
    the answer of llama.cpp.
    """
    most = options.new_tokens

    def ours(pair: Pair = options.pair, **method: Any) -> list[int]:
        [done] = generate(pair, [prompt], most, sampling=greedy(), stop=[], **method)
        return list(done.tokens)

    def theirs(**method: Any) -> list[int]:
        ids = options.torch.tensor([prompt])
        with options.torch.inference_mode():
            out = options.theirs.generate(
                ids,
                attention_mask=options.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=most,
                pad_token_id=0,
                **method,
            )
        return out[0, len(prompt) :].tolist()

    request = {"prompt": list(prompt), "n_predict": most, "temperature": 0, "top_k": 1}
    request |= {"ignore_eos": True, "cache_prompt": False}

    def llama() -> Any:
        answer = options.llama.handle_completions(request)
        if answer["usage"]["completion_tokens"] != most:
            raise ValueError(f"llama.cpp answers {answer!r:.200} instead of {most} tokens")
        return answer

    of_draft = {
        OURS[3]: lambda: ours(options.drafted, draft_length=K),
        THEIRS[2]: lambda: theirs(assistant_model=options.assistant),
    }
    optional = ({LLAMA: llama} if options.llama else {}) | (of_draft if options.draft else {})
    return optional | {
        OURS[0]: lambda: ours(draft_length=0),
        THEIRS[0]: theirs,
        OURS[1]: lambda: ours(drafter=NgramDrafter(K)),
        THEIRS[1]: lambda: theirs(prompt_lookup_num_tokens=K),
        OURS[2]: lambda: ours(draft_length=K),
    }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns the first place where two completions differ."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(theirs))


def margin_of(options: Any, tokens: Sequence[int]) -> float:
    """Returns how far the most probable next token leads, in logits of transformers."""
    with options.torch.inference_mode():
        logits = options.theirs(options.torch.tensor([tokens])).logits[0, -1]
    first, second = options.torch.topk(logits, 2).values.tolist()
    return first - second


def beside_table(document: Document) -> Table:
    """Returns times per token and differing completions, a row for each method."""
    rows = []
    for name, ms in document["ms_per_token"].items():
        found = [one["margin"] for one in document["differing"] if one["method"] == name]
        near = sum(margin < NEAR for margin in found)
        equal = f"{document['questions'] - len(found)} of {document['questions']}"
        compared = equal + (f"; near-ties: {near} of {len(found)}" if found else "")
        rows.append(
            {
                "": name,
                "ms per token": f"{ms['median']:.1f} ({ms['lower']:.1f} to {ms['upper']:.1f})",
                "equal completions": compared if name in OURS else "",
            }
        )
    title = f"Beside transformers: greedy, {document['new_tokens']} tokens, K = {K}"
    note = (
        f"Quartiles over {document['timed']} questions. A near-tie has a margin below {NEAR:g} "
        "logits."
    )
    return Table.of(title, rows, note=note)


STUDY = Study(
    question="Are greedy completions those of Hugging Face transformers, and which is faster?",
    measure=measure,
    prepare=prepare,
    tables={"beside": Published(["smollm2_beside"], beside_table)},
    options={
        "target": (None, "The target, a folder or the id of a model of the hub."),
        "head": (None, "The head that drafts for it."),
        "draft": (None, "A draft model; without it, none is compared."),
        "source": (None, "Questions in the format of Spec-Bench."),
        "gguf": (None, "A file for llama.cpp; without it, llama.cpp is left out."),
        "of_each": (17, "Questions of each category that are compared."),
        "timed_of_each": (3, "Questions of each category that are also timed."),
        "new_tokens": (64, "Tokens of each completion."),
        "threads": (2, "Threads of torch and of llama.cpp."),
    },
)
