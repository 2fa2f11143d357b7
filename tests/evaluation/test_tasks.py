"""Tasks: their files, good and bad, their prompts and their scores."""

import gzip
import itertools
import json
import math
import pathlib
import sys
import types

import numpy as np
import pytest

from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.evaluation import coding_tasks, isolation, text_tasks
from specsamp.evaluation.coding_tasks import (
    ParseResult,
    load_humaneval,
    load_mbpp,
    parse_python,
    parses,
    pass_at_k,
)
from specsamp.evaluation.records import read_records
from specsamp.evaluation.task import Attempt, compare_scores, mean_interval, summarise
from specsamp.evaluation.tasks import load_task
from support.extras import is_here, needs
from support.refusals import refusal, refused_calls

ADD = {
    "task_id": "Own/0",
    "prompt": 'def add(a, b):\n    """Return the sum."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    "    assert candidate(-1, 1) == 0\n",
    "canonical_solution": "    return a + b\n",
}
LAST = {
    "task_id": "Own/1",
    "prompt": 'def last(items):\n    """Return the last item, None if there is none."""\n',
    "entry_point": "last",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 2\n"
    "    assert candidate([]) is None\n",
    "canonical_solution": "    return items[-1] if items else None\n",
}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write_file(content, name="data.jsonl"):
    """Writes a file in the current folder and returns its name."""
    pathlib.Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns `write_file`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return write_file


@pytest.mark.parametrize("packed", [False, True])
def test_humaneval_counts_passing_completions(write, packed):
    text = lines([ADD, LAST])
    source = write(gzip.compress(text.encode("utf-8-sig")), "a.jsonl.gz") if packed else write(text)
    task = load_task("humaneval", source, insist=True)
    add, last = task.problems
    assert (add.id, add.prompt, task.stop, task.max_new_tokens) == (
        "Own/0",
        ADD["prompt"],
        coding_tasks.HUMANEVAL_STOP,
        512,
    )
    right = ADD["canonical_solution"]
    after = "\nprint('more')\nimport sys\nsys.exit(0)\n"
    wrong = ("    return a +\n", "    import sys; sys.exit(0)\n")
    answers = [Attempt(text=text) for text in (right, right + after, *wrong)]
    # Four answers are too few for pass@10.
    assert task.score(add, answers) == {"pass@1": 0.5, "parses": 0.75}
    assert task.score(last, [Attempt(text=LAST["canonical_solution"])]) == {
        "pass@1": 1.0,
        "parses": 1.0,
    }


def test_programs_that_cannot_be_isolated_are_not_run(write, monkeypatch):
    monkeypatch.setattr(isolation, "missing_isolation", lambda: "bwrap is not on PATH")
    path = write(lines([ADD]))
    answers = [Attempt(text=ADD["canonical_solution"])]
    # The refusal precedes all decoding.
    with refusal("none is run: bwrap is not on PATH.*--run_unisolated"):
        load_task("humaneval", path)
    task = load_humaneval(path)
    insisting = load_task("humaneval", path, insist=True)
    with pytest.raises(isolation.IsolationError, match="none is run: bwrap is not on PATH"):
        task.score(task.problems[0], answers)
    assert insisting.score(task.problems[0], answers) == {"pass@1": 1.0, "parses": 1.0}


def test_pass_at_k_counts_choices_that_pass():
    for n, k in itertools.product(range(1, 8), range(1, 8)):
        for passed in range(n + 1 if k <= n else 0):
            choices = list(itertools.combinations(range(n), k))
            share = np.mean([min(choice) < passed for choice in choices])
            assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-12)
    assert pass_at_k(10_000, 3, 100) == pytest.approx(
        1 - math.comb(9_997, 100) / math.comb(10_000, 100), rel=1e-9
    )


def test_intervals_hold_the_truth_and_differences_are_paired():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(40):
        found = mean_interval((rng.random(50) < 0.3).astype(float), seed=trial)
        covered += found.low <= 0.3 <= found.high
    assert 33 <= covered <= 40
    hard_P = rng.random(200)
    scores = [{"a": value} for value in hard_P]
    better = [
        {"a": value + 0.01 + 0.001 * noise} for value, noise in zip(hard_P, rng.normal(size=200))
    ]
    found = compare_scores(better, scores)["a"]
    assert 0.009 < found.low < found.mean < found.high < 0.011
    assert found.high - found.low < 0.1 * (summarise(scores)["a"].high - summarise(scores)["a"].low)
    # Equal scores do not prove that there is no difference.
    assert compare_scores(scores, scores)["a"].detectable == 3 / 200


def test_data_set_of_the_hub_is_read(write, monkeypatch):
    """The stand-in of the hub's library offers a data set whose files the hub has converted."""
    ours = {
        "main/test-0.jsonl": write(lines([ADD]), "0"),
        "main/test-1.jsonl": write(lines([LAST]), "1"),
    }
    others = ["main/train-0.jsonl", "main/latest.jsonl", "small/test-0.jsonl"]
    files = {None: ["README.md", "script.py"], "refs/convert/parquet": [*ours, *others]}
    hub = types.SimpleNamespace(
        auth_check=lambda name, repo_type: None,
        list_repo_files=lambda name, repo_type, revision: files[revision],
        hf_hub_download=lambda name, file, repo_type, revision: ours[file],
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert [problem.id for problem in load_task("humaneval", insist=True).problems] == [
        "Own/0",
        "Own/1",
    ]
    files["refs/convert/parquet"] = others[:2]
    with refusal("'a/b' has no file of the split 'test'", FileNotFoundError):
        read_records("a/b", {})
    # The first is called before the calls with retries.
    hub.auth_check = hub.list_repo_files = None
    with refusal("no file 'a/b', and the hub did not send it .TypeError", FileNotFoundError):
        read_records("a/b", {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refusal("pip install huggingface_hub"):
        read_records("a/b", {})


@pytest.mark.skipif(not is_here("pyarrow"), reason="without pyarrow")
def test_parquet_files_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ADD, LAST]), path)
    assert read_records(str(path), coding_tasks.HUMANEVAL_FIELDS) == [ADD, LAST]
    path.write_bytes(path.read_bytes()[:-3])
    with refusal("a.parquet is damaged"):
        read_records(str(path), coding_tasks.HUMANEVAL_FIELDS)


ARTICLES = [
    {"document": "It rained.\n\nMuch.", "summary": "Rain fell."},
    {"document": "A cat sat on a mat.", "summary": "A cat sat.", "id": "7"},
]


def test_xsum_asks_with_one_example(write, monkeypatch):
    monkeypatch.setattr(text_tasks, "_scorer", lambda: None)
    (problem,) = load_task("xsum", write(lines(ARTICLES))).problems
    assert problem.prompt == (
        "Article: It rained. Much.\nSummary: Rain fell.\n\nArticle: A cat sat on a mat.\nSummary:"
    )
    assert (problem.id, problem.reference) == ("7", "A cat sat.")


@needs("rouge_score")
def test_rouge_scores_equal_hand_counts(write):
    """Scores equal hand counts of unigrams, bigrams and the longest common subsequence."""
    task = load_task("xsum", write(lines(ARTICLES)))
    found = task.score(task.problems[0], [Attempt(text=" A cat slept.\n\nArticle: A cat sat.")])
    assert found == {
        "rouge1": pytest.approx(2 / 3),
        "rouge2": pytest.approx(1 / 2),
        "rougeL": pytest.approx(2 / 3),
    }


def test_spec_bench_includes_mt_bench_among_six(write):
    records = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 82, "category": "summarization", "turns": ["Sum up."]},
    ]
    source = write(lines(records))
    for name, category in (("mt_bench", "writing"), ("spec_bench", "mt_bench")):
        task = load_task(name, source)
        first, second = task.problems
        assert (task.name, first.category, second.category) == (name, category, "summarization")
        assert (first.id, first.prompt, first.further_turns) == ("81", "Write.", ("Again.",))
        assert task.score(first, [Attempt(text="a")]) == {}


def test_gsm8k_is_scored_by_the_marked_number(write):
    task = load_task(
        "gsm8k",
        write(lines([{"question": "999 + 1?", "answer": "It is 1 + 9 * 111.\n#### 1,000"}])),
    )
    (problem,) = task.problems
    assert (problem.prompt, problem.category) == ("Question: 999 + 1?\nAnswer:", "math")
    answers = (
        " It is 1000.",
        " #### 1,000.00",
        " 999, then 1000\nQuestion: 3",
        " 1",
        " none",
        " 1000 - 1 = 999",
    )
    assert task.score(problem, [Attempt(text=text) for text in answers]) == {
        "correct": pytest.approx(1 / 2)
    }
    goes_on = (
        "#### 1000\n\nQ: A robe takes 2 bolts and 3",
        "#### 1000\nI used 2 steps.",
        "#### $1,000 (2 bolts)",
    )
    goes_on += ("#### 1000\n#### 7", "####\nIt is 1000", "Step ####: 3\n#### 1000")
    assert task.score(problem, [Attempt(text=text) for text in goes_on]) == {"correct": 1}
    signs = ("#### -$1,000", "#### - 1000", "#### - -1000", "#### \N{MINUS SIGN}1000")
    for wrong in ("#### 7, not 1000", *signs):
        assert task.score(problem, [Attempt(text=wrong)]) == {"correct": 0}


def test_shots_are_shown_before_each_question(write, tmp_path):
    source = write(
        lines(
            [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]
        )
    )
    shots = tmp_path / "shots.jsonl"
    shots.write_text(lines([{"question": "0 + 1?", "answer": "It is 1.\n#### 1"}]))
    problems = load_task("gsm8k", source, shots=str(shots)).problems
    shown = "Question: 0 + 1?\nAnswer: It is 1.\n#### 1\n\nQuestion: "
    assert [one.prompt for one in problems] == [
        f"{shown}{asked}?\nAnswer:" for asked in ("1 + 1", "2 + 2")
    ]


@pytest.mark.parametrize("field", ["text", "prompt"])
def test_mbpp_counts_passing_completions(write, field):
    record = {
        "task_id": 11,
        field: "Write a function to match \\x.",
        "test_list": ["assert f(1) == 2"],
    }
    if field == "prompt":
        record |= {"test_imports": ["import math"], "test_list": ["assert f(1) == math.isqrt(4)"]}
    # The sanitized edition is an array.
    text = lines([record]) if field == "text" else json.dumps([record], indent=1)
    task = load_task("mbpp", write(text), insist=True)
    (problem,) = task.problems
    assert problem.prompt == f'"""\nWrite a function to match \\x.\n{record["test_list"][0]}\n"""\n'
    found = task.score(
        problem, [Attempt(text="def f(x):\n    return x + 1\n\nassert 0"), Attempt(text="f = len")]
    )
    assert found == {"pass@1": 0.5, "parses": 1.0}


def test_mbpp_has_the_published_test_tasks(write):
    records = [
        {"task_id": number, "text": "a", "test_list": ["b"]} for number in (10, 11, 510, 511)
    ]
    assert [problem.id for problem in load_mbpp(write(lines(records))).problems] == ["11", "510"]


def test_python_is_scored_by_parsing():
    task = load_task("python")
    assert [problem.prompt for problem in task.problems] == load_prompts("python")
    answers = [Attempt(text="\n\nx = 1\ny = 2\n"), Attempt(text="\n\n)(\n")]
    found = [task.score(problem, answers)["parses"] for problem in task.problems]
    assert set(found) <= {0.0, 0.5}
    assert 0.5 in found


# Python that is cut off by a budget parses; other text does not.


VERDICTS = [
    ("", ParseResult.COMPLETE),
    ("x = 1\n", ParseResult.COMPLETE),
    ("def f():\n", ParseResult.INCOMPLETE),
    ("x = (1,\n", ParseResult.INCOMPLETE),
    ("try:\n    x\n", ParseResult.INCOMPLETE),
    ("@wraps\n", ParseResult.INCOMPLETE),
    ("x = 1 \\\n", ParseResult.INCOMPLETE),
    ("x =\n", ParseResult.ERROR),
    ("if x:\n    x\n  y\n", ParseResult.ERROR),
    ("x = (1]\n", ParseResult.ERROR),
    ('x = "a\n', ParseResult.ERROR),  # the line has ended, and the string with it
    ("(" * 500 + "\n", ParseResult.ERROR),  # deeper than the parser goes
    ("x = 1\x00\n", ParseResult.ERROR),
    ('x = "\\d"\n', ParseResult.COMPLETE),  # a warning is no error
]


@pytest.mark.parametrize("text, verdict", VERDICTS)
def test_parser_tells_complete_incomplete_and_wrong(text, verdict):
    assert parse_python(text) is verdict


CUT = [  # prompts, completions, and whether the rest of a budget parses
    ("def f(x):\n", "    return x\n", True),
    ("def f(x):\n", "    return x\n\ny = (1,\n", True),  # a statement still open
    ("def f(x):\n", "    return x\nfoo bar", True),  # a line without its end
    ("def f(x):\n", "    return x\nfoo bar\n", False),
    ("def f(x):\n", "    foo bar\n    return x\n", False),
    ("def f(x):\n", "    return x", False),  # no line of it survives
    ("def f(x):\n", "", False),
    ("x = 1\n", "y = (\n", False),  # only the prompt is left
    ("x = 1\n\x0c\n", "y = (\n", False),  # a form feed ends no line
    ("def f(", "x):\n    return x\n", True),  # in the middle of a line
    ("x = 1", "\ny = (\n", False),  # the prompt's own line does not count
    ("x = 1", "\n\n\ny = 2\nz = (\n", True),
    ("x = (\n", "1,\n", False),  # no complete statement at all
    ("def f(x):\n", "    pass\n" + '"""Text that goes on\n    and on\n', True),
    ("def f(x):\n", "    pass\n\x0c\ny = 1\n", True),
]


@pytest.mark.parametrize("prompt, completion, expected", CUT)
def test_cut_completions_that_parse_are_counted(prompt, completion, expected):
    assert parses(prompt, completion) is expected


def humaneval(content, name="data.jsonl"):
    return load_humaneval(write_file(content, name))


def mbpp(**record):
    return load_mbpp(write_file(lines([record])))


test_refused_tasks = refused_calls(
    {
        "data.jsonl is empty: it should hold records with task_id, prompt": lambda: humaneval(""),
        "line 2: task_id 'Own/0' is that of .*line 1": lambda: humaneval(lines([ADD, ADD])),
        "line 2: no field 'entry_point', there are": lambda: humaneval(
            lines([ADD, {"task_id": "b", "prompt": ""}])
        ),
        "line 1: field 'prompt' must be str, not 3": lambda: humaneval(
            lines([ADD | {"prompt": 3}])
        ),
        "line 2: no JSON": lambda: humaneval(lines([ADD]) + "{"),
        r"line 3: must be a JSON object; got '\[1\]'": lambda: humaneval(lines([ADD]) + "\n[1]\n"),
        "no text in UTF-8 .byte 0": lambda: humaneval(b"\xff"),
        "cut.gz is damaged": lambda: humaneval(
            gzip.compress(lines([ADD] * 99).encode())[:-12], "cut.gz"
        ),
        "data.jsonl.gz is damaged": lambda: humaneval(b"no gzip", "data.jsonl.gz"),
        "no regular file": lambda: load_task("humaneval", "."),
        "task must be one of humaneval, xsum.*got 'chess'": lambda: load_task("chess"),
        "spec_bench has no default source": lambda: load_task("spec_bench"),
        "one article, which is the example": lambda: text_tasks.load_xsum(
            write_file(lines(ARTICLES[:1]))
        ),
        "question 81 has no turns": lambda: text_tasks.load_turns(
            "mt_bench", write_file(lines([dict(question_id=81, category="writing", turns=[])]))
        ),
        "shots have no effect on the task mbpp": lambda: load_task(
            "mbpp", write_file("{}"), shots=write_file("{}", "shots.jsonl")
        ),
        "task 11 has neither a field 'text' nor 'prompt'": lambda: mbpp(task_id=11, test_list=[]),
        "no task_id from 11 to 510": lambda: mbpp(task_id=10, text="a", test_list=["b"]),
        r"task 11: field 'test_list' must hold lines of code, not \[\]": lambda: mbpp(
            task_id=11, text="a", test_list=[]
        ),
        r"'test_list' must hold lines of code, not \[3\]": lambda: mbpp(
            task_id=11, text="a", test_list=[3]
        ),
        "must hold lines of code, not .* ' '": lambda: mbpp(
            task_id=11, text="a", test_list=["assert f(1) == 2", " "]
        ),
    }
)
