"""Shows where the time of decoding goes while it runs: a profile of one prefill and some rounds, by named scope.

    programs = trace(decoder, "runs/trace")                # of `specsamp.analysis.workload`
    report.print_tables([program.table() for program in programs], console)

Nothing is taken apart. `jax.profiler` records when each operation of the compiled programs ran, and writes a folder that
xprof and Perfetto show. Each operation carries the `jax.named_scope` that it comes from; operations that the compiler
fused carry that of one of them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from specsamp import storage
from specsamp.analysis.report import Table
from specsamp.analysis.workload import TimedDecoder
from specsamp.decoding.state import DecodeState, RequestBatch, Weights

Array = jax.Array

# Scopes of the loop, of reading prompts and of models, in the order in which tables show them.
PHASES = ("target", "draft", "score", "verify", "commit")
PARTS = ("embed", "fuse", "attention", "mlp", "logits", "sample")
REST, OUTSIDE = "rest", "in no scope"
ROUNDS = 8  # enough for a mean, few enough to look at
WARM_ROUNDS = 16  # before rounds that are timed, at most: the first ones after other work are slow

Scope = tuple[str, ...]  # () of operations in no scope; a phase; or a phase and a part
Span = tuple[float, float, Scope]  # nanoseconds of begin and end
Operation = tuple[str, str, float, float]  # its program, its name, nanoseconds of begin and end


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """The time of a program on one device, from its first operation to its last."""

    what: str  # one run of it
    runs: int  # that were traced; all else is per run
    scopes: Mapping[str, float]  # ms by scope: "draft/attention"; "draft/rest" holds operations of the phase in no part

    @property
    def ms(self) -> float:
        """The sum of all scopes; 0 where the platform reports no operations."""
        return sum(self.scopes.values())

    def table(self) -> Table:
        """Returns a line for each phase, and below it one for each of its parts."""
        lines = []
        for phase in (*PHASES, OUTSIDE):
            named = [(*scope.partition("/"), ms) for scope, ms in self.scopes.items()]
            parts = {part: ms for of, _, part, ms in named if of == phase}
            lines += [(phase, sum(parts.values()))] if parts else []
            lines += [(f"  {part}", parts[part]) for part in (*PARTS, REST) if part in parts and len(parts) > 1]
        rows = [(name, f"{ms / self.ms:.1%}", f"{ms:.3f}") for name, ms in [*lines, ("all", self.ms)]]
        note = f"mean of {self.runs}" if self.runs > 1 else ""
        return Table(title=self.what, header=("scope", "share", "ms"), rows=rows, note=note)


class Profiled:
    """A decoder's prefill and rounds of its first prompts, compiled so that operations name the scopes of this source."""

    def __init__(self, decoder: TimedDecoder):
        if jax.config.jax_disable_jit:
            raise ValueError("nothing is compiled under JAX_DISABLE_JIT: there is nothing to trace")
        engine, requests = decoder.engine, decoder.requests(0)
        loop = engine.loop
        self.arguments = engine.weights, engine.arrays(requests)
        self.prompts = engine.padded([request.prompt for request in requests], decoder.workload.prompt_length)
        self.warm, self.rounds = middle_rounds(decoder)

        def prefill(weights: Weights, request: RequestBatch, tokens_BP: Array, lengths_B: Array) -> DecodeState:
            state = loop.prefill(weights, request, tokens_BP, lengths_B, slots=engine.slots)
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

    def profile(self, folder: str | os.PathLike, run: Callable[[], Any]) -> dict[str, list[Span]]:
        """Profiles what ``run`` runs; returns the spans of each program's operations, none where none were reported."""
        before, options = set(_profiles(folder)), jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions would be most of the events
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        # Each machine writes a file, named by its host.
        host, written = socket.gethostname(), set(_profiles(folder)) - before
        own = sorted(written, key=lambda path: (not path.name.startswith(host), str(path)))[:1]
        profiles = [jax.profiler.ProfileData.from_serialized_xspace(path.read_bytes()) for path in own]
        return spans_by_program([event for profile in profiles for event in operations(profile)], self.scopes)

    def round_shares(self) -> dict[str, float]:
        """Returns the shares of each phase and of "sample" in rounds amid a text; {} where no operations are reported."""
        state = self.decode(self.prefill(), self.warm)
        with tempfile.TemporaryDirectory() as folder:
            spans = self.profile(folder, lambda: self.decode(state, self.rounds))["decode"]
        times, shares = ms_by_scope(spans, self.rounds), dict.fromkeys((*PHASES, OUTSIDE, "sample"), 0.0)
        for scope, ms in times.items():
            shares[scope.partition("/")[0]] += ms / sum(times.values())
            shares["sample"] += ms / sum(times.values()) * (scope == "draft/sample")
        return shares if times else {}


def middle_rounds(decoder: TimedDecoder) -> tuple[int, int]:
    """Returns the number of warm-up rounds and of timed rounds; together they end no text."""
    most = max((decoder.workload.max_new_tokens - 1) // (decoder.engine.loop.depth + 1), 1)
    warm = min(most - 1, WARM_ROUNDS)
    return warm, min(most - warm, ROUNDS)


def trace(decoder: TimedDecoder, folder: str | os.PathLike) -> tuple[ProgramTime, ...]:
    """Writes a profile of one prefill and some rounds of a workload's first prompts, and returns the times of both.

    All processes must call it; each writes its own file into the folder, local or ``gs://``. Programs are compiled anew,
    since compiled ones may name scopes of another version; ValueError is raised under ``JAX_DISABLE_JIT``.
    """
    profiled = Profiled(decoder)
    rounds = min(ROUNDS, profiled.warm + profiled.rounds)
    profiled.decode(profiled.prefill(), rounds)
    spans = profiled.profile(folder, lambda: profiled.decode(profiled.prefill(), rounds))
    read = f"Prefill of {int(profiled.prompts[1].sum())} tokens"
    programs = ("prefill", read, 1), ("decode", f"Round, K = {decoder.method.drafter.K}", rounds)
    return tuple(
        ProgramTime(what=what, runs=runs, scopes=ms_by_scope(spans[name], runs)) for name, what, runs in programs
    )


def scopes_of(text: str) -> dict[str, Scope]:
    """Returns the named scopes of a program, the text of ``compiled.as_text()``, by operation.

    A product that the compiler rewrote, such as that of a single row on a CPU, has no scope. It gets the scope of its reader,
    or of its operands where the reader is in another phase.
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
    """Returns the operations of a `jax.profiler.ProfileData` that ran on the first device of this process.

    On CPUs and GPUs an event has the names of its program and operation. A CPU's product may go on in other threads after
    its event: then another event marks its end. A TPU has a line of programs, and a line of operations, each named by its
    text; copies and collectives are on other lines.
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
        with warnings.catch_warnings():  # their type, made in C++, lacks an attribute that Python 3.12 requires
            warnings.simplefilter("ignore", DeprecationWarning)
            events = [(event, dict(event.stats)) for line in plane.lines for event in line.events]
        ends = {(event.name, stats.get("_c")): event.start_ns for event, stats in events}
        for event, stats in events:
            if "hlo_op" in stats and int(stats.get("device_ordinal", 0)) == 0:
                end = max(event.end_ns, ends.get((f"end: {event.name}", stats.get("_p")), 0))
                found.append((str(stats.get("hlo_module", "")), str(stats["hlo_op"]), event.start_ns, end))
    return found


def spans_by_program(events: Iterable[Operation], scopes: Mapping[str, Mapping[str, Scope]]) -> dict[str, list[Span]]:
    """Returns the spans of the operations that have a scope, by program; time of other operations is that of their loop."""
    spans: dict[str, list[Span]] = {name: [] for name in scopes}
    for module, operation, begin, end in events:
        program = re.sub(r"^jit_|[(.].*$", "", module)
        scope = scopes.get(program, {}).get(operation)
        if scope is not None:
            spans[program].append((begin, end, scope))
    return spans


def ms_by_scope(spans: Iterable[Span], runs: int) -> dict[str, float]:
    """Returns the milliseconds of each scope, per run.

    Operations contain others (a loop, those of its body), and several may run at once: each moment counts once, for the
    operation that began last. Moments in which none ran count as in no scope.
    """
    waiting = sorted(spans, reverse=True)
    edges = sorted({edge for span in waiting for edge in span[:2]})
    times: collections.Counter[str] = collections.Counter()
    running: list[Span] = []
    for now, following in zip(edges, edges[1:]):
        while waiting and waiting[-1][0] <= now:
            running.append(waiting.pop())
        running = [span for span in running if span[1] > now]
        scope = max(running, key=lambda span: (span[0], -span[1]))[2] if running else ()
        name = "/".join(scope if len(scope) == 2 else (*scope, REST)) if scope else OUTSIDE
        times[name] += (following - now) / 1e6 / runs
    return dict(times)


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


def _profiles(folder: str | os.PathLike) -> list[epath.Path]:
    place = storage.place(folder) / "plugins" / "profile"
    return list(place.glob("*/*.xplane.pb")) if place.exists() else []
