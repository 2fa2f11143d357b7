"""Chooses drafter and draft length for this machine, and for a benchmark of one point the draft's
temperature: the meaning of --config.draft_length=machine.

Single calls are timed once, and the times are kept in the folder of compiled programs. Acceptance
comes from the pair's file ``acceptance.json``, which `launch/benchmark.py` wrote for other prompts;
if it lacks this sampling, a few of the pair's prompts are decoded first. The planner compares the
forecasts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Mapping

import jax
from rich.console import Console

from launch.lib import entry
from launch.lib.cells import machine_identity
from launch.lib.experiment import Experiment, build, use_few_rows
from launch.lib.fields import MACHINE, ExperimentConfig
from specsamp import Method, Pair, machine, storage, use_compilation_cache
from specsamp.analysis import grid, report
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.calls import TIMED_LENGTH, time_calls
from specsamp.analysis.costs import PerCall
from specsamp.analysis.planner import make_plan
from specsamp.analysis.workload import decoders
from specsamp.checkpoints.trained_pair import pair_folder

ACCEPTANCE = "acceptance.json"  # in the folder of a pair
FEW_PROMPTS = 4  # decoded if no file has the acceptance


def for_machine(
    config: ExperimentConfig, console: Console, *, draft_temperatures: bool = False
) -> ExperimentConfig:
    """Returns the configuration with the drafter and draft length for this machine; prints the
    forecasts.

    A configuration whose draft length is a number is returned as it is.

    Args:
      draft_temperatures: also chooses the draft's temperature, see `best`.
    """
    if config.draft_length != MACHINE:
        return config
    calls = Calls.of(config, console)
    return best(config, calls, console, draft_temperatures=draft_temperatures)


def open_for_machine(config: ExperimentConfig, console: Console) -> Experiment:
    """Reads the pair of a service or a chat, with the drafter, the draft length and the kernel for
    this machine.
    """
    use_few_rows(config, console)
    config = for_machine(config, console)
    with entry.progress(console, "reading the pair"):
        return build(config, ["def main():"])


@dataclasses.dataclass(kw_only=True)
class Calls:
    """The costs of rounds on this machine by the word of the drafter, and the pair, if it
    was read.
    """

    config: ExperimentConfig
    costs: Mapping[str, PerCall]

    @classmethod
    def of(cls, config: ExperimentConfig, console: Console) -> Calls:
        """Reads the kept costs of an earlier run, or times the calls of the pair."""
        if not is_possible(config):
            raise ValueError(
                f"--config.draft_length={MACHINE} takes a drafter, one device and jit: name a "
                "number"
            )
        folder = use_compilation_cache()
        told = {
            "config": config.recorded,
            "drafter": config.drafter_name,
            "weights": weights_of(config),
            "source": machine.source_version(),
            **machine_identity(),
        }
        key = hashlib.sha256(report.json_text(told).encode()).hexdigest()[:16]
        path = None if folder is None else pathlib.Path(folder) / f"specsamp_calls_{key}.json"
        # None is kept yet, or it is damaged.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            kept = storage.read_json(path)["costs"].items()
            costs = {word: PerCall.from_json(of_word) for word, of_word in kept}
            return cls(config=config, costs=costs)
        calls = cls(config=config, costs={})
        with entry.progress(console, "timing single calls of target and drafters on this machine"):
            pair, work = calls.experiment.pair, calls.experiment.workload
            calls.costs = time_calls(pair, candidates(config, pair), work)
        if path is not None:
            storage.write(path, report.json_text({**told, "costs": calls.costs}))
        return calls

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Returns the experiment with drafts of the timed length; reads the pair once."""
        return build(
            self.config.turned({"draft_length": TIMED_LENGTH}), check_heads=False, all_fields=True
        )

    def acceptance(self, config: ExperimentConfig) -> dict[tuple[str, float | None], Profile]:
        """Returns the acceptance under the sampling of ``config`` by drafter and its temperature
        (None: the target's), from a file or from a few prompts.
        """
        given = config.draft_temperature
        if config.pair is not None and (path := pair_folder(config.pair) / ACCEPTANCE).is_file():
            greedy = config.sampling.temperature == 0
            same = {"temperature": 0.0} if greedy else dataclasses.asdict(config.sampling)
            cells = grid.chosen(grid.read_document(path)["cells"], **same)
            counted = {"rule": "token", "draft_length": TIMED_LENGTH, "synthetic_acceptance": None}
            counted["adaptive"] = None
            if given is not None:
                counted["draft_temperature"] = given
            known: dict[tuple[str, float | None], Profile] = {}
            for word in self.costs:
                of_word = grid.chosen(cells, drafter=word, **counted)
                temperatures = [cell["key"].get("draft_temperature") for cell in of_word]
                for temperature in dict.fromkeys(temperatures):
                    of_both = grid.chosen(of_word, draft_temperature=temperature)
                    profiles = grid.measured_acceptance(of_both)
                    known[word, temperature] = profiles[TIMED_LENGTH]
            if all((word, given) in known for word in self.costs):
                return known
        pair = self.experiment.pair
        work = dataclasses.replace(self.experiment.workload, repeats=FEW_PROMPTS)
        return {
            (word, given): Profile.of_texts(
                [row for turn in range(FEW_PROMPTS) for row in side.decode(turn).rows]
            )
            for word, side in decoders(pair, candidates(config, pair), work).items()
        }


def weights_of(config: ExperimentConfig) -> list[tuple[str, int, int]]:
    """Returns names, bytes and times of change of the pair's local files, which a new export
    changes.
    """
    folders = [] if config.pair is None else [pair_folder(config.pair)]
    if (names := config.hugging_face) is not None:
        folders = [names.target, names.draft or names.target]
    paths = [
        path
        for folder in folders
        for path in sorted(pathlib.Path(folder).expanduser().rglob("*.safetensors"))
    ]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def is_possible(config: ExperimentConfig) -> bool:
    """Returns whether calls can be timed: a drafter of chains, one device, and
    compilation is on.
    """
    devices = config.mesh.data * config.mesh.model * jax.process_count()
    return (
        config.word.drafts and not config.tree and devices == 1 and not jax.config.jax_disable_jit
    )


def candidates(config: ExperimentConfig, pair: Pair) -> dict[str, Method]:
    """Returns a method for each candidate drafter: the configuration's, and for a draft model also
    prompt lookup.
    """
    tried = [config.drafter, "ngram"] if config.word.draft == "model" else [config.drafter]
    return {
        word: config.turned({"drafter": word, "draft_length": TIMED_LENGTH}).make_method(pair)
        for word in tried
    }


def best(
    config: ExperimentConfig,
    calls: Calls,
    console: Console,
    *,
    least: int = 0,
    draft_temperatures: bool = False,
) -> ExperimentConfig:
    """Returns the configuration with the drafter and draft length of the best forecast.

    Args:
      least: the shortest draft length.
      draft_temperatures: under the token rule, also compares the temperatures of the draft whose
        acceptance is recorded.
    """
    with entry.progress(console, "counting what is accepted"):
        accepted = calls.acceptance(config)
    # Acceptance was counted under the token rule, and a lossy rule's texts depend on the draft's
    # temperature.
    tries_temperatures = draft_temperatures and config.rule == "token"
    forecasts = {}
    for (word, temperature), profile in accepted.items():
        if temperature != config.draft_temperature and not tries_temperatures:
            continue
        plan = make_plan(profile, calls.costs[word], draft_lengths=range(TIMED_LENGTH + 1))
        forecast = max(plan.forecasts[least:], key=lambda one: one.speedup.value)
        forecasts[word, temperature] = forecast
    word, temperature = max(forecasts, key=lambda key: forecasts[key].speedup.value)
    said = ", ".join(
        f"{name}{'' if of_draft is None else f' at draft T = {of_draft:g}'} "
        f"K = {one.draft_length}: {one.speedup.value:.2f}x"
        for (name, of_draft), one in forecasts.items()
    )
    sampling = grid.distribution_of(dataclasses.asdict(config.sampling))
    console.print(f"forecast for this machine, {sampling}: {said}", style="dim")
    length = forecasts[word, temperature].draft_length
    chosen = {"drafter": word, "draft_length": length}
    if length:
        chosen["draft_temperature"] = temperature
    return config.turned(chosen)
