"""Shows where the time of decoding goes while it runs: a profile of one prefill and some rounds, by named scope.

    traced = trace(decoder, "runs/trace", rounds=8)        # of `specsamp.analysis.workload`
    report.show(traced.tables(), console)
    split = split_round(speculative, autoregressive, turns=5)

Nothing is taken apart. `jax.profiler` notes when each operation of the compiled programs ran, and writes a folder that
xprof and Perfetto show. The compiler wrote into each operation which `jax.named_scope` it comes from; of operations that
it fused, only one's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import math
import os
import re
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from specsamp import storage
from specsamp.analysis.report import Table
from specsamp.analysis.workload import Decoder, Quartiles, matrices_of, product_timer, take_turns
from specsamp.decoding.state import DecodeState, RequestBatch, Weights

Array = jax.Array

# Scopes of the loop, of reading prompts and of models, in the order in which tables show them.
PHASES = ("target", "draft", "score", "verify", "commit")
PARTS = ("embed", "fuse", "attention", "mlp", "logits", "sample")
REST, OUTSIDE = "rest", "in no scope"
ROUNDS = 8  # by default: enough for a mean, few enough to look at
WARM_ROUNDS = 16  # before those of a split, at most: the first ones after other work are slow

Scope = tuple[str, ...]  # () of operations in no scope; a phase; or a phase and a part
Span = tuple[float, float, Scope]  # nanoseconds of begin and end
Operation = tuple[str, str, float, float]  # its program, its name, nanoseconds of begin and end


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScopeTime:
    """Holds what one scope took, per run of what was traced."""

    scope: str  # such as "draft/attention"; "draft/rest" is what of it lies in no part
    share: float  # of the time of all scopes
    ms: float
    operations: float  # how many ran


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """The time of a program on one device, from its first operation to its last."""

    what: str  # one run of it
    runs: int  # that were traced; all else is per run
    ms: float  # the sum of all scopes
    host_ms: float  # by the clock of the host, which also counts the call and its end
    scopes: tuple[ScopeTime, ...]  # empty: the platform reports no operations

    def table(self) -> Table:
        """Returns a line for each phase, and below it one for each of its parts."""
        rows = []
        for phase in (*PHASES, OUTSIDE):
            within = [one for one in self.scopes if one.scope.partition("/")[0] == phase]
            if not within:
                continue
            total = _sum(phase, within)
            rows.append(_row(phase, total))
            if len(within) > 1:
                rows += [_row(f"  {one.scope.partition('/')[2]}", one) for one in within]
        rows.append(_row("all", _sum("all", self.scopes)))
        runs = f"mean of {self.runs}; " if self.runs > 1 else ""
        return Table(
            title=self.what,
            header=("scope", "share", "ms", "operations"),
            rows=rows,
            note=f"{runs}by the clock of the host, with the profiler on: {self.host_ms:.3g} ms",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A profile that was written, and what was read of it."""

    folder: str  # for xprof
    viewer: str | None  # the file for Perfetto
    programs: tuple[ProgramTime, ...]  # a prefill and a round

    def tables(self) -> list[Table]:
        """Returns a table for each program whose operations were reported."""
        return [program.table() for program in self.programs if program.scopes]

    @property
    def sentences(self) -> list[str]:
        """Returns where to open the profile, and what is missing of it."""
        told = [f"trace: pip install xprof; xprof --logdir={self.folder} --port=6006; open http://localhost:6006"]
        if self.viewer is not None:
            told.append(f"or open {self.viewer} at https://ui.perfetto.dev")
        if not self.tables():
            told.append(f"{jax.default_backend()} reported no operations: there is no table by scope")
        return told


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The milliseconds of one phase, per round."""

    ms: Quartiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSplit:
    """One round of the speculative loop by scope, and a round of the autoregressive loop beside it.

    The five parts are ``draft_model``, ``draft_sampling``, ``score``, ``verify``, ``commit``.
    """

    draft_model: PhaseTime  # calls of the draft model
    draft: PhaseTime  # the same with warps and draws
    draft_sampling: Quartiles  # ms: draft - draft_model
    score: PhaseTime  # the call of the target
    verify: PhaseTime  # warping its logits, and the rule
    commit: PhaseTime  # bookkeeping
    round: PhaseTime  # the whole
    unexplained: Quartiles  # ms: of operations in no scope, and between operations
    sampling_share: Quartiles  # (draft_sampling + verify + commit) / round
    step: PhaseTime  # one round of the autoregressive loop
    break_even: Quartiles  # round / step: tokens that a round must emit for the draft to pay
    least_round: Quartiles  # (draft_model + score) / step: the round if only its models took time, in steps
    stream_step: PhaseTime  # multiplying as many rows as a step has by every matrix of the target: a floor of `step`
    stream_score: PhaseTime  # the same for `score`
    streamed_bytes: int  # of those matrices
    step_gb_per_s: Quartiles  # streamed_bytes / step
    stream_gb_per_s: Quartiles  # streamed_bytes / stream_step


def split_round(
    speculative: Decoder,
    autoregressive: Decoder,
    turns: int,
    progress: Callable[[str], None] = lambda text: None,
) -> RoundSplit | None:
    """Times rounds of two decoders in turn, profiles those of the first, and times its products with the target alone.

    A profile takes time itself, so it only says the phases' shares of a round; the milliseconds are a clock's, without
    it. Shares and differences are taken within a turn, and medians over turns are reported. A phase that was timed alone
    in a loop would be too fast: there the draft's weights stay in a CPU's cache, from which a round's score drives them.

    Returns:
      The split; None where the platform reports no operations.

    Raises:
      ValueError: under ``JAX_DISABLE_JIT``, where there are no programs to profile.
    """
    progress("compiling the phases of a round")
    profiled = Profiled(speculative)
    batch, loop, weights = speculative.workload.batch, speculative.loop, speculative.weights
    tokens = {"stream_step": 1, "stream_score": loop.drafter.K + 1}
    timers = {name: product_timer(loop, weights, batch, count) for name, count in tokens.items()}
    timers |= {"round": lambda: round_ms(speculative), "step": lambda: round_ms(autoregressive)}
    timers |= {"shares": profiled.round_shares}
    runs = {name: lambda turn, timer=timer: timer() for name, timer in timers.items()}
    measured = take_turns(runs, turns, lambda text: progress(f"phases: turn {text}"))
    shares = measured.pop("shares")
    if not all(shares):
        return None
    ms = {name: np.array(times) for name, times in measured.items()}
    ms |= {name: np.array([one[name] for one in shares]) * ms["round"] for name in shares[0]}
    return summary(ms, sum(matrix.nbytes for matrix in matrices_of(loop.target, weights.target)))


def summary(ms: Mapping[str, np.ndarray], streamed_bytes: int) -> RoundSplit:
    """Returns the split of milliseconds by turn; ``ms["sample"]`` is the part of the draft that warps and draws."""
    draft_model, own = ms["draft"] - ms["sample"], ms["sample"] + ms["verify"] + ms["commit"]
    whole = ("draft", "score", "verify", "commit", "round", "step", "stream_step", "stream_score")
    return RoundSplit(
        **{name: PhaseTime(ms=Quartiles.of(ms[name])) for name in whole},
        draft_model=PhaseTime(ms=Quartiles.of(draft_model)),
        draft_sampling=Quartiles.of(ms["sample"]),
        unexplained=Quartiles.of(ms["round"] - draft_model - ms["score"] - own),
        sampling_share=Quartiles.of(own / ms["round"]),
        break_even=Quartiles.of(ms["round"] / ms["step"]),
        least_round=Quartiles.of((draft_model + ms["score"]) / ms["step"]),
        streamed_bytes=streamed_bytes,
        step_gb_per_s=Quartiles.of(streamed_bytes / ms["step"] / 1e6),
        stream_gb_per_s=Quartiles.of(streamed_bytes / ms["stream_step"] / 1e6),
    )


class Profiled:
    """A decoder's prefill and rounds of its first prompts, compiled so that operations name the scopes of this source."""

    def __init__(self, decoder: Decoder):
        if jax.config.jax_disable_jit:
            raise ValueError("nothing is compiled under JAX_DISABLE_JIT: there is nothing to trace")
        loop, weights, request = decoder.loop, decoder.weights, decoder.request(0)
        tokens_BP, lengths_B, _ = decoder.workload.rows(0, loop.target.vocab_size)
        self.lengths_B, self.arguments = lengths_B, (weights, request)
        self.prompts = jnp.asarray(tokens_BP), jnp.asarray(lengths_B)
        self.most = rounds_within(decoder)

        def prefill(weights: Weights, request: RequestBatch, tokens_BP: Array, lengths_B: Array) -> DecodeState:
            state = loop.prefill(weights, request, tokens_BP, lengths_B, slots=decoder.slots)
            return dataclasses.replace(state, request=None)

        def decode(weights: Weights, request: RequestBatch, state: DecodeState, rounds: Array) -> DecodeState:
            state = loop.run(weights, dataclasses.replace(state, request=request), rounds)
            return dataclasses.replace(state, request=None)

        options = dict(loop.target.compiler_options) or None
        with _own_scopes():
            self._prefill = jax.jit(prefill).lower(*self.arguments, *self.prompts).compile()
            decoding = jax.jit(decode, donate_argnames="state", compiler_options=options)
            self._decode = decoding.lower(*self.arguments, self.prefill(), jnp.int32(0)).compile()
        self.scopes = {"prefill": scopes_of(self._prefill.as_text()), "decode": scopes_of(self._decode.as_text())}

    def prefill(self) -> DecodeState:
        """Reads the prompts."""
        return jax.block_until_ready(self._prefill(*self.arguments, *self.prompts))

    def decode(self, state: DecodeState, rounds: int) -> DecodeState:
        """Runs some rounds; the state is donated."""
        return jax.block_until_ready(self._decode(*self.arguments, state, jnp.int32(rounds)))

    def round_shares(self) -> dict[str, float]:
        """Profiles some rounds in the middle of a text; returns the share of each phase, and of the draft's "sample" again.

        Empty where the platform reports no operations.
        """
        warm, rounds = middle_rounds(self.most)
        state = self.decode(self.prefill(), warm)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=_options()):
                self.decode(state, rounds)
            spans = spans_by_program(_operations(_own(set(_profiles(folder)))), self.scopes)["decode"]
        shares = dict.fromkeys((*PHASES, OUTSIDE, "sample"), 0.0)
        for one in program_time("", spans, rounds, 0.0).scopes:
            shares[one.scope.partition("/")[0]] += one.share
            shares["sample"] += one.share * (one.scope == "draft/sample")
        return shares if spans else {}


def rounds_within(decoder: Decoder) -> int:
    """Returns how many rounds surely end no text, at least one."""
    return max((decoder.workload.max_new_tokens - 1) // (decoder.loop.depth + 1), 1)


def middle_rounds(most: int) -> tuple[int, int]:
    """Returns how many rounds go before those of a split, and how many are of it; together at most ``most``."""
    warm = min(most - 1, WARM_ROUNDS)
    return warm, min(most - warm, ROUNDS)


def round_ms(decoder: Decoder) -> float:
    """Times a round in the middle of a text by the clock, nothing profiled."""
    warm, rounds = middle_rounds(rounds_within(decoder))
    state = jax.block_until_ready(decoder.loop.run(decoder.weights, decoder.prefill(0), warm))
    start = time.perf_counter()
    jax.block_until_ready(decoder.loop.run(decoder.weights, state, rounds))
    return (time.perf_counter() - start) / rounds * 1e3


def trace(decoder: Decoder, folder: str | os.PathLike, rounds: int = ROUNDS) -> Trace:
    """Writes a profile of one prefill and some rounds of a workload's first prompts, after a run that is not counted.

    All processes must call it; each writes its own file, and reads it.

    Args:
      decoder: what runs; its programs are compiled anew, since those that were kept may name scopes of another version.
      folder: local or ``gs://``; a profile is added to those that are there.
      rounds: fewer where the texts would end before.

    Raises:
      ValueError: under ``JAX_DISABLE_JIT``, where there are no programs to trace.
      OSError: the folder cannot be written.
    """
    profiled = Profiled(decoder)
    rounds = min(rounds, profiled.most)
    profiled.decode(profiled.prefill(), rounds)
    before = set(_profiles(folder))
    with jax.profiler.trace(folder, profiler_options=_options()):
        start = time.perf_counter()
        state = profiled.prefill()
        middle = time.perf_counter()
        profiled.decode(state, rounds)
        end = time.perf_counter()
    written = _own(set(_profiles(folder)) - before)
    spans = spans_by_program(_operations(written), profiled.scopes)
    viewer = None if written is None else written.with_name(written.name.replace(".xplane.pb", ".trace.json.gz"))
    lengths_B = profiled.lengths_B
    tokens = " + ".join(map(str, lengths_B.tolist())) if len(lengths_B) <= 4 else int(lengths_B.sum())
    return Trace(
        folder=os.fspath(folder),
        viewer=None if viewer is None or not viewer.exists() else os.fspath(viewer),
        programs=(
            program_time(f"Prefill of {tokens} tokens", spans["prefill"], 1, middle - start),
            program_time(f"Round, K = {decoder.loop.drafter.K}", spans["decode"], rounds, end - middle),
        ),
    )


def scopes_of(text: str) -> dict[str, Scope]:
    """Returns the scope of each operation of a compiled program that the compiler named one for, by the operation's name.

    A product that the compiler wrote anew, such as one of a single row on a CPU, has no name: it belongs to what reads it,
    or where that is another phase, to what it reads.

    Args:
      text: ``compiled.as_text()``.
    """
    scopes, readers, products = {}, {}, {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)", line)
        if match is None:
            continue
        name, right = match.groups()
        operands = re.findall(r"%([\w.\-]+)", right)
        named = re.search(r'\bop_name="([^"]*)"', right)
        if named is not None:
            scopes[name] = scope_of(named[1])
            for operand in operands:
                readers.setdefault(operand, scopes[name])
        elif " dot(" in right:
            products[name] = operands
    for name, operands in products.items():
        before = next((scopes[operand] for operand in operands if scopes.get(operand)), ())
        after = readers.get(name, before)
        if before or after:
            scopes[name] = after if after[:1] == before[:1] or not before else before
    return scopes


def scope_of(op_name: str) -> Scope:
    """Returns phase and part of a path of scopes, such as ``jit(decode)/while/body/draft/layer_0/attention/dot_general``."""
    names = op_name.partition(";")[0].split("/")  # of operations that were made one, the first
    phase = next((i for i, name in enumerate(names) if name in PHASES), None)
    if phase is None:
        return ()
    part = next((name for name in names[phase + 1 :] if name in PARTS), None)
    return (names[phase],) if part is None else (names[phase], part)


def operations(profile: Any) -> list[Operation]:
    """Returns the operations that ran on the first device of this process.

    On CPUs and GPUs events say themselves what they are. A CPU's product may go on in other threads after its event:
    then an event of its own marks its end. A TPU has a line of programs, and one of operations, each named by its text;
    what runs beside them, copies and collectives, is on other lines.

    Args:
      profile: a `jax.profiler.ProfileData`.
    """
    planes = list(profile.planes)
    devices = sorted(plane.name for plane in planes if re.fullmatch(r"/device:\w+:\d+", plane.name))
    found: list[Operation] = []
    for plane in planes:
        if plane.name.startswith("/device:") and plane.name not in devices[:1]:
            continue
        lines = {line.name: line for line in plane.lines}
        if "XLA Ops" in lines and "XLA Modules" in lines:
            programs = sorted((event.start_ns, event.end_ns, event.name) for event in lines["XLA Modules"].events)
            for event in lines["XLA Ops"].events:
                inside = (name for begin, end, name in programs if begin <= event.start_ns < end)
                name = event.name.partition(" = ")[0].removeprefix("%")
                found.append((next(inside, ""), name, event.start_ns, event.end_ns))
            continue
        with warnings.catch_warnings():  # the type of these, made by C++, lacks what Python 3.12 asks of types
            warnings.simplefilter("ignore", DeprecationWarning)
            events = [(event, dict(event.stats)) for line in plane.lines for event in line.events]
        ends = {
            (event.name, stats.get("_c")): event.start_ns for event, stats in events if event.name.startswith("end: ")
        }
        for event, stats in events:
            if "hlo_op" in stats and int(stats.get("device_ordinal", 0)) == 0:
                end = max(event.end_ns, ends.get((f"end: {event.name}", stats.get("_p")), 0))
                found.append((str(stats.get("hlo_module", "")), str(stats["hlo_op"]), event.start_ns, end))
    return found


def spans_by_program(events: Iterable[Operation], scopes: Mapping[str, Mapping[str, Scope]]) -> dict[str, list[Span]]:
    """Returns the spans of each program's operations.

    An operation that the compiler added and named no scope for belongs to what it runs in, such as a loop.

    Args:
      scopes: of each program's operations, by the program's name.
    """
    spans: dict[str, list[Span]] = {name: [] for name in scopes}
    for module, operation, begin, end in events:
        program = re.sub(r"^jit_|[(.].*$", "", module)
        scope = scopes.get(program, {}).get(operation)
        if scope is not None:
            spans[program].append((begin, end, scope))
    return spans


def program_time(what: str, spans: Iterable[Span], runs: int, host_seconds: float) -> ProgramTime:
    """Returns the time of each scope, per run.

    Operations contain others (a loop, those of its body), and several may run at once: each moment counts once, for the
    operation that began last. Moments in which none ran count as in no scope.
    """
    spans = sorted(spans)
    seconds, counts = _innermost(spans), collections.Counter(scope for *_, scope in spans)
    total = sum(seconds.values())
    order = {name: i for i, name in enumerate((*PHASES, OUTSIDE, *PARTS, REST))}
    times = []
    for scope in counts.keys() | seconds.keys():
        name = "/".join(scope if len(scope) == 2 else (*scope, REST)) if scope else OUTSIDE
        nanoseconds = seconds[scope]
        numbers = {"ms": nanoseconds / 1e6 / runs, "operations": counts[scope] / runs}
        times.append(ScopeTime(scope=name, share=nanoseconds / total if total else 0.0, **numbers))
    times.sort(key=lambda one: [order[name] for name in one.scope.split("/")])
    ms, host_ms = total / 1e6 / runs, host_seconds * 1e3 / runs
    return ProgramTime(what=what, runs=runs, ms=ms, host_ms=host_ms, scopes=tuple(times))


def _innermost(spans: Iterable[Span]) -> collections.Counter[Scope]:
    """Returns for how many nanoseconds each scope had the operation that began last, of those that were running.

    Args:
      spans: in the order of their begins.
    """
    times: collections.Counter[Scope] = collections.Counter()
    running: list[tuple[float, float, Scope]] = []  # a heap: the last begin first; of equal ones the shortest
    now = None
    for begin, end, scope in (*spans, (math.inf, math.inf, ())):
        now = begin if now is None else now
        while running and now < begin:
            _, last, current = running[0]
            until = min(last, begin)
            if until > now:
                times[current] += until - now
                now = until
            if last <= now:
                heapq.heappop(running)
        if begin is not math.inf and now < begin:
            times[()] += begin - now
            now = begin
        heapq.heappush(running, (-begin, end, scope))
    return times


def _sum(scope: str, times: Iterable[ScopeTime]) -> ScopeTime:
    sums = {name: sum(getattr(one, name) for one in times) for name in ("share", "ms", "operations")}
    return ScopeTime(scope=scope, **sums)


def _row(name: str, time: ScopeTime) -> tuple[str, ...]:
    return name, f"{time.share:.1%}", f"{time.ms:.3f}", f"{time.operations:.0f}"


@contextlib.contextmanager
def _own_scopes() -> Iterator[None]:
    """Within it a compiled program that is kept on disk is taken only if its scopes are those of this source."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _options() -> jax.profiler.ProfileOptions:
    """Returns options that leave out calls of Python functions, which would be most of the events."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def _profiles(folder: str | os.PathLike) -> list[epath.Path]:
    place = storage.place(folder) / "plugins" / "profile"
    return list(place.glob("*/*.xplane.pb")) if place.exists() else []


def _own(written: set[epath.Path]) -> epath.Path | None:
    """Returns the file of this process's machine; None: nothing was written."""
    return min(written, key=lambda path: (not path.name.startswith(socket.gethostname()), str(path)), default=None)


def _operations(written: epath.Path | None) -> list[Operation]:
    """Reads the operations of a profile; none where nothing was written."""
    if written is None:
        return []
    return operations(jax.profiler.ProfileData.from_serialized_xspace(written.read_bytes()))
