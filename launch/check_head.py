"""Checks that a head fits its target: how often its tokens would be accepted, and whether it is read as it was trained.

    python launch/check_head.py --config=configs/hf.py:llama-8b-eagle3
    python launch/check_head.py --config=configs/hf.py:TARGET,HEAD --config.drafter=head --prompts=mine.txt --plain

The target continues the prompts by itself. On these texts the head drafts as it does in decoding, but reads the tokens of
the text: once as it is configured, and once for each way in which its files could be meant instead, such as layers that
are counted from one. A head that is read wrongly costs speed and nothing else, so nothing but this shows it.

Exit status: 0, the head fits; 1, it is hardly accepted, or another reading is clearly better; 2, there is no head that
could be checked (stderr says why).
"""

from absl import flags

from launch.lib import entry
from launch.lib.cells import read_prompts
from launch.lib.config import ConfigFlag
from launch.lib.experiment import build, config_mesh, headline
from specsamp import use_compilation_cache
from specsamp.analysis import report
from specsamp.checkpoints.head_check import HeadCheck, check_head, write_texts

_CONFIG = ConfigFlag("configs/hf.py")
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "File of prompts, as JSON or one in each line. By default the prompts that come with the pair."
)
_TOKENS = flags.DEFINE_integer(
    "tokens", 64, "Number of tokens that the target writes after each prompt; the head reads them.", lower_bound=1
)
_OUTPUT = entry.define_output()

FAILED = 1


def main() -> int:
    console = entry.make_console()
    config = _CONFIG.value
    entry.check_output(_OUTPUT.value)
    prompts = read_prompts(_PROMPTS.value) if _PROMPTS.value else ()
    experiment = build(config, prompts, mesh=config_mesh(config), check_heads=False)
    if experiment.pair.head is None:
        raise ValueError(f"drafter = {config.drafter!r}, and the pair has no head: name one, see --help")
    use_compilation_cache()
    console.print(headline(experiment, task="a check of the head"))
    with entry.progress(console, "the target writes the texts"):
        texts = write_texts(
            experiment.pair,
            experiment.workload.prompts,
            tokens=_TOKENS.value,
            sampling=experiment.sampling,
            seed=config.seed,
        )
    with entry.progress(console, "the head reads them"):
        found = check_head(experiment.pair, texts, experiment.drafter.K, sampling=experiment.sampling)
    entry.show([table(found)], console)
    for sentence in found.sentences:
        console.print(sentence, style="bold green" if found.fits else "bold red", soft_wrap=True, markup=False)
    readings = [
        {"name": one.name, "hidden_layers": one.hidden_layers, "acceptance_by_position": one.by_position}
        for one in found.readings
    ]
    document = {
        "config": config.to_dict(),
        "pair": experiment.pair_name,
        "fits": found.fits,
        "sentences": found.sentences,
        "drafts": len(found.readings[0].acceptance_NK),
        "readings": readings,
    }
    entry.write_result(_OUTPUT.value, document, console)
    return 0 if found.fits else FAILED


def table(found: HeadCheck) -> report.Table:
    """Returns a row for each reading."""
    most = max(len(one.by_position) for one in found.readings)
    rows = []
    for one in found.readings:
        shares = [f"{share:.1%}" for share in one.by_position]
        rows.append((one.name, *shares, *[""] * (most - len(shares))))
    return report.Table(
        title="Acceptance by position, teacher-forced", header=("read", *(str(k + 1) for k in range(most))), rows=rows
    )


if __name__ == "__main__":
    entry.run(main, _CONFIG)
