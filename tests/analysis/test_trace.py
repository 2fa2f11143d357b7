"""What a profile is read as: which operation belongs to which scope, and that every moment counts once."""

import jax
import pytest
from jax.profiler import ProfileData

from specsamp.analysis import benchmark, trace
from specsamp.analysis.workload import Workload, decoders
from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import chain, temperature
from support.run_script import call
from support.weights import drawn_params

TINY = "--config=configs/random_pair.py:tiny"


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A profile of a pair whose draft is its target, on this CPU."""
    model = TransformerLM(tiny(num_layers=1, positions="rotary"))
    params = drawn_params(model)
    pair = Pair(target=model, target_params=params, draft=model, draft_params=params)
    work = Workload(batch=1, prompt_length=4, max_new_tokens=20, repeats=1)
    method = Method(drafter=ModelDrafter(model, 2), sampling=chain(temperature(0.8)))
    (decoder,) = decoders(pair, {"speculative": method}, work).values()
    spans, read = {}, trace.spans_by_program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "spans_by_program", lambda *arguments: spans.update(read(*arguments)) or spans)
        folder = tmp_path_factory.mktemp("profiles")
        traced = trace.trace(decoder, folder)
    assert [*folder.glob("**/*.trace.json.gz")]  # as the command says
    named = [bool(scope) for *_, scope in spans["decode"]]
    assert sum(named) > 0.9 * len(named) > 0  # without a scope: such as the loop itself
    return traced


def test_a_round_is_split_by_its_scopes(traced):
    """The loop, the models and the compiler agree on the names."""
    prefill, decoding = traced
    assert {"draft/attention", "draft/mlp", "draft/logits", "draft/sample"} <= decoding.scopes.keys()
    assert {"score/embed", "score/attention", "score/mlp", "score/logits"} <= decoding.scopes.keys()
    assert {"verify/rest", "commit/rest"} <= decoding.scopes.keys()
    assert {"target/attention", "draft/attention"} <= prefill.scopes.keys()
    assert decoding.runs == 6 and decoding.what == "Round, K = 2" and prefill.what == "Prefill of 4 tokens"


def test_the_table_adds_parts_up_to_phases(traced):
    table = traced[1].table()
    rows = {row[0]: row for row in table.rows}
    phases = ["draft", "score", "verify", "commit", trace.OUTSIDE]
    assert [name for name in rows if not name.startswith(" ")] == [*phases, "all"]
    assert sum(float(rows[name][2]) for name in phases) == pytest.approx(float(rows["all"][2]), abs=0.005)
    assert rows["all"][1] == "100.0%" and "mean of 6" in table.note


@pytest.mark.parametrize(
    "name, scope",
    [
        ("jit(decode)/jit(run_request)/while/body/draft/Decoder/layer_0/attention/dot_general", ("draft", "attention")),
        ("jit(decode)/while/body/score/Decoder/logits/logits/mul;while/body/draft/mlp/add", ("score", "logits")),
        ("jit(decode)/while/body/verify/add", ("verify",)),
        ("jit(prefill)/prefill/target/layer_0/mlp/add", ("target", "mlp")),
        ("jit(decode)/while", ()),
        ("jit(decode)/attention/add", ()),  # in no phase
        ("", ()),
    ],
)
def test_scopes_are_read_off_the_compilers_names(name, scope):
    assert trace.scope_of(name) == scope


def test_operations_without_a_name_are_left_to_what_they_run_in():
    text = """
  %dot.1 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(f)/draft/mlp/dot_general" stack_frame_id=4}
  ROOT %fusion = f32[2]{0} fusion(%dot.1), metadata={op_name="jit(f)/add"}
  %copy.3 = f32[2]{0} copy(%a)
"""
    scopes = trace.scopes_of(text)
    assert scopes == {"dot.1": ("draft", "mlp"), "fusion": ()}
    read = trace.scopes_of("  %dot.4 = f32[2]{0} dot(%a, %b)\n" + text.replace("dot(%a, %b)", "add(%dot.4, %b)"))
    assert read == scopes | {"dot.4": ("draft", "mlp")}  # a product without a name is of what reads it
    events = [
        ("jit_f", "fusion", 0, 10),
        ("jit_f", "copy.3", 2, 4),
        ("jit_other", "dot.1", 0, 9),
        ("jit_f(7)", "dot.1", 5, 8),
    ]
    assert trace.spans_by_program(events, {"f": scopes}) == {"f": [(0, 10, ()), (5, 8, ("draft", "mlp"))]}


def test_every_moment_counts_once_for_what_began_last():
    loop, draft, score = (), ("draft",), ("score", "mlp")
    spans = [(0, 100, loop), (10, 50, draft), (20, 30, score), (40, 70, score), (120, 140, draft)]
    microseconds = {scope: ms * 1e6 * 2 for scope, ms in trace.ms_by_scope(spans, runs=2).items()}
    # Of the loop: what is left of 0 to 100; between the loop and the last draft nothing ran.
    assert microseconds == pytest.approx({"draft/rest": 20 + 20, "score/mlp": 10 + 30, trace.OUTSIDE: 40 + 20})
    within = trace.ms_by_scope([(0, 10, draft), (0, 4, score)], runs=1)  # of two that begin together, the shorter
    assert trace.ms_by_scope([], runs=1) == {}  # of a platform that reports no operations
    assert within == pytest.approx({"score/mlp": 4e-6, "draft/rest": 6e-6})


def line(name, events, names):
    ids = {text: number + 1 for number, text in enumerate(names)}
    return f'name: "{name}" ' + " ".join(
        f"events {{ metadata_id: {ids[text]} offset_ps: {begin}000 duration_ps: {end - begin}000 }}"
        for text, begin, end in events
    )


def test_a_tpu_has_lines_of_programs_and_of_operations():
    """As they are published; of two devices the first is read."""
    names = [
        "jit_prefill(12)",
        "jit_decode(34)",
        "%fusion.1 = f32[8]{0} fusion(%a), kind=kLoop",
        "%while.2 = (s32[]) while(%b)",
    ]
    metadata = "".join(
        f"event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: '{name}' }} }} " for i, name in enumerate(names)
    )
    modules = line("XLA Modules", [(names[0], 0, 10), (names[1], 20, 90)], names)
    ops = line("XLA Ops", [(names[2], 2, 9), (names[3], 20, 90), (names[2], 30, 60)], names)
    plane = f"lines {{ {modules} }} lines {{ {ops} }} {metadata}"
    planes = [f'planes {{ name: "/device:TPU:{i}" {plane} }}' for i in (0, 1)] + ['planes { name: "/host:CPU" }']
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    assert trace.operations(profile) == [
        ("jit_prefill(12)", "fusion.1", 2, 9),
        ("jit_decode(34)", "while.2", 20, 90),
        ("jit_decode(34)", "fusion.1", 30, 60),
    ]


def test_what_is_not_compiled_is_not_traced():
    with jax.disable_jit():
        done = call("benchmark", TINY, "--trace=runs/x")
    assert done.returncode == 2 and "JAX_DISABLE_JIT is set: leave out one of the two" in done.stderr


def test_a_profile_says_shares_and_a_clock_the_milliseconds(monkeypatch):
    """A round of 10 us in the profile takes 8 us by the clock: every phase takes eight tenths of its time in the profile."""
    spans = [(0, 7000, ("draft", "mlp")), (7000, 8000, ("draft", "sample")), (8000, 20000, ("score", "mlp"))]
    profiled = object.__new__(trace.Profiled)
    vars(profiled).update(warm=1, rounds=2, prefill=lambda: None, decode=lambda state, rounds: None)
    profiled.profile = lambda folder, run: {"decode": spans}
    assert profiled.round_shares() == pytest.approx(
        {"draft": 0.4, "sample": 0.05, "score": 0.6} | dict.fromkeys(("target", "verify", "commit", trace.OUTSIDE), 0)
    )
    monkeypatch.setattr(benchmark, "Profiled", lambda decoder: profiled)
    clock = iter([8e-3, 4e-3, 8e-3, 10e-3, 8e-3, 8e-3])  # of a round and of a step, turn by turn
    monkeypatch.setattr(benchmark, "round_ms", lambda decoder: next(clock))
    split = benchmark.split_round(None, None, turns=2)
    assert split.round.ms.median == 8e-3 and split.step.ms.median == 7e-3
    assert split.draft_model.ms.median == pytest.approx(2.8e-3) and split.sampling_share.median == pytest.approx(0.05)
    assert split.least_round.median == pytest.approx((7.6 / 4 + 7.6 / 10) / 2)  # of one turn each, not of medians
    assert split.draft.ms.median == pytest.approx(3.2e-3) and split.draft_sampling.median == pytest.approx(0.4e-3)
    assert split.score.ms.median == pytest.approx(4.8e-3) and split.unexplained.median == pytest.approx(0)
    spans.clear()  # a platform that reports no operations
    assert benchmark.split_round(None, None, turns=1) is None
