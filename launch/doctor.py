"""Finds problems of this machine, of a head or of the names of a pair, before long computations.

    python launch/doctor.py                                    # versions, devices, memory, access
    python launch/doctor.py --config=configs/hf.py:llama-8b    # does the pair fit, can it be read?
    python launch/doctor.py --look_at=head --config=configs/hf.py:llama-8b-eagle3
    python launch/doctor.py --look_at=names                    # all pairs of configs/hf.py
    python launch/doctor.py --look_at=names \\
        --pair=Qwen/Qwen3-8B,RedHatAI/Qwen3-8B-speculator.eagle3 --head

--look_at=head checks that a head fits its target: on texts of the target it drafts a token after
every position, and the acceptance is printed, also for other layers and, of heads that draft
blocks, other block sizes and the other first row. A head that is read wrongly costs speed alone, so
nothing else shows it.

--look_at=names checks whether public names exist, can be read and would load. It reads config,
tokenizer and the headers of the tensors from the hub, some megabytes, and downloads no weights.

Exit status: 0, no problem; 1, a warning, a head that does not fit, or a name that would not load;
2, a problem that must be solved first, or a check that is impossible (stderr has the reason).
"""

import os

from absl import flags
from rich.console import Console
from rich.text import Text

from launch.lib import entry
from launch.lib.cells import read_prompts
from launch.lib.config import load_file
from launch.lib.experiment import build, headline
from launch.lib.fields import ExperimentFlag
from launch.lib.shapes import known_models
from specsamp import doctor, storage, use_compilation_cache
from specsamp.analysis.report import Table
from specsamp.checkpoints import public_pair
from specsamp.doctor import Level, Wanted
from specsamp.evaluation.head_check import check_head
from specsamp.evaluation.isolation import missing_isolation
from specsamp.models import few_rows

FLAGS_OF = {
    "machine": (),
    "head": ("prompts", "tokens", "output"),
    "names": ("pair", "head", "output"),
}
_CONFIG = ExperimentFlag("configs/trained_pair.py")
_LOOK_AT = flags.DEFINE_enum(
    "look_at",
    "machine",
    list(FLAGS_OF),
    "Check the machine, the head of --config, or public names.",
)
_PROMPTS = entry.define("prompts")
_TOKENS = flags.DEFINE_integer(
    "tokens",
    64,
    "Number of tokens that are decoded with the head after each prompt.",
    lower_bound=1,
)
_PAIR = flags.DEFINE_multi_string(
    "pair",
    [],
    "Check this pair of configs/hf.py, or TARGET,DRAFT; may be repeated; by default all pairs of "
    "the file.",
)
_HEAD = flags.DEFINE_bool(
    "head", False, "The second name of each TARGET,DRAFT is a head of the first."
)
_OUTPUT = entry.define("output")

SIGNS = {
    Level.FINE: ("fine", "green"),
    Level.WARNING: ("warning", "yellow"),
    Level.ERROR: ("mend", "red"),
}


def main() -> int:
    console = entry.make_console()
    others = set().union(*FLAGS_OF.values()).difference(FLAGS_OF[_LOOK_AT.value])
    entry.refuse_flags(others, f"--look_at={_LOOK_AT.value} does not read it")
    entry.check_result(_OUTPUT.value)
    return {"machine": look_at_machine, "head": look_at_head, "names": look_at_names}[
        _LOOK_AT.value
    ](console)


def look_at_machine(console: Console) -> int:
    """Prints the findings about the machine, and returns the worst level."""
    known = doctor.read_facts()
    findings = doctor.examine(known, wanted())
    if known.platform == "cpu" and not known.failed:
        said = few_rows.build()
        level = Level.WARNING if few_rows.FAILED in said else Level.FINE
        findings.append(doctor.Finding(level, said))
    missing = missing_isolation()
    programs = f"not isolated here ({missing})" if missing else "isolated by bubblewrap"
    findings.append(doctor.Finding(Level.FINE, f"programs of humaneval and mbpp are {programs}"))
    for finding in findings:
        sign, colour = SIGNS[finding.level]
        fix = f"\n{'':<9}{finding.fix}" if finding.fix else ""
        console.print(Text(f"{sign:<9}", style=colour), finding.what + fix, sep="")
    return max(finding.level for finding in findings)


def wanted() -> Wanted:
    """Returns the devices, memory and names that the configuration needs, with each model split
    over its devices.
    """
    config = _CONFIG.value
    devices = {"target": config.mesh.model, "draft": config.mesh.draft_devices or config.mesh.model}
    names = [config.hugging_face.target, config.hugging_face.draft] if config.hugging_face else []
    known = known_models(config)
    sizes = [one.weight_bytes / devices[side] for side, one in known.items()]
    return Wanted(
        devices=config.mesh.data * config.mesh.model,
        weights_bytes=sum(sizes) if sizes else None,
        from_hub=tuple(name for name in names if name and not storage.place(name).exists()),
    )


def look_at_head(console: Console) -> int:
    """Prints the acceptance of the head of --config; returns 1 if it does not fit."""
    config = _CONFIG.value
    use_compilation_cache()
    experiment = build(config, read_prompts(_PROMPTS.value), check_heads=False)
    if experiment.pair.head is None:
        raise ValueError(
            f"drafter = {config.drafter!r}, and the pair has no head: name one, see --help"
        )
    console.print(headline(experiment, task="a check of the head"))
    with entry.progress(console, "decoding with the head"):
        found = check_head(
            experiment.pair,
            experiment.workload.prompts,
            tokens=_TOKENS.value,
            sampling=experiment.method.sampling,
            seed=config.seed,
            others=True,
        )
    rows = [
        {"the head is read": name, "accepted": f"{accepted:.1%}"}
        for name, accepted in found.readings.items()
    ]
    title = "Acceptance of a first token after every position"
    entry.show([Table.of(title, rows)] if rows else [], console)
    for sentence in found.sentences:
        console.print(sentence, style="bold green" if found.fits else "bold red")
    document = {
        "config": config.recorded,
        "pair": experiment.pair_name,
        "fits": found.fits,
        "sentences": found.sentences,
        "drafts": found.drafted,
        "acceptance": found.acceptance,
        "readings": found.readings,
    }
    entry.write_result(_OUTPUT.value, document, console)
    return int(not found.fits)


def look_at_names(console: Console) -> int:
    """Prints which public names would load; returns 1 if a name would not."""
    _CONFIG.refuse("--look_at=names reads the names of configs/hf.py: give --pair")
    # The hub's library has a bar for every small file.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    public, findings = load_file("configs/hf.py"), []
    known = {**public.PAIRS, **public.HEADS}
    asked = {word: public.find(word) for word in _PAIR.value or known}
    with entry.progress(console, "asking the hub") as say:
        for number, (word, pair) in enumerate(asked.items(), 1):
            say(f"pair {number} of {len(asked)}, {word}")
            is_head = pair.drafter == "head" or (_HEAD.value and word not in known)
            findings += public_pair.check_pair(
                word, pair.target, pair.draft, is_head=is_head, chat=pair.chat
            )
    rows = [
        {
            "pair": entry.visible(one.pair),
            "as": one.role,
            "name": entry.visible(one.model),
            "": "does not load" if one.problem else "loads",
            "why, or what differs": entry.visible(one.problem or "; ".join(one.notes)),
        }
        for one in findings
    ]
    problems = sum(one.problem is not None for one in findings)
    title = f"{len(findings)} names, of which {problems} would not load"
    entry.show([Table.of(title, rows, left=5)], console)
    entry.write_result(_OUTPUT.value, {"names": findings}, console)
    return int(problems > 0)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
