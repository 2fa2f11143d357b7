"""How many completions of a pair are Python, up to where the budget cut them.

python launch/quality.py --config=configs/trained_pair.py --output=runs/python_pair_quality.json
"""

from absl import flags

import entry
from config_file import ConfigFlag
from experiment import build, config_replica, headline
from specsamp import generate
from specsamp.evaluation.python_syntax import parses

_CONFIG = ConfigFlag("configs/trained_pair.py")
_COMPLETIONS = flags.DEFINE_integer("completions", 200, "How many, in equal parts for every prompt.", lower_bound=1)
_OUTPUT = entry.define_output()


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    replica = config_replica(_CONFIG.value)
    experiment = build(_CONFIG.value, mesh=None if replica.mesh.size == 1 else replica.mesh)
    console.print(headline(experiment))
    pair, work = experiment.pair, experiment.workload
    if pair.tokenizer is None:
        raise ValueError("--config: a pair without a tokenizer writes no text")
    prompts = [pair.tokenizer.decode(prompt) for prompt in work.prompts]
    mine, per_prompt = replica.share(len(prompts)), -(-_COMPLETIONS.value // len(prompts))
    with entry.progress(console, "completing"):
        completions = mine and generate(
            pair,
            [prompts[i] for i in mine],
            work.max_new_tokens,
            sampling=experiment.sampling,
            drafter=experiment.drafter,
            rule=experiment.rule,
            num_samples=per_prompt,
            seed=work.seed,
            prompt_ids=mine,
        )
    good = [0] * len(mine)
    for c in completions:
        good[c.prompt_index] += parses(prompts[mine[c.prompt_index]], c.text, ended=c.finish == "stop")
    by_prompt = replica.gather(mine, good, len(prompts))
    total = per_prompt * len(prompts)
    share = sum(by_prompt) / total
    console.print(f"{sum(by_prompt)} of {total} completions parse: {share:.1%}")
    document = {
        "config": _CONFIG.value.to_dict(),
        "completions": total,
        "parse": sum(by_prompt),
        "share": share,
        "parse_by_prompt": by_prompt,
        "completions_per_prompt": per_prompt,
    }
    entry.write_result(_OUTPUT.value, document, console)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
