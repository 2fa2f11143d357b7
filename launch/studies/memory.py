"""Reports the memory that the decoding loop compiles to, over batch, K and vocabulary; nothing is allocated or run.

python launch/studies/memory.py --config=configs/random_pair.py:38m --output=runs/random_38m_memory.json
"""

import _launch  # noqa: F401, the folder of entry
import entry
from config_file import ConfigFlag
from experiment import build, headline, refuse
from loop_memory import memory_grid, memory_table

_CONFIG = ConfigFlag("configs/random_pair.py:38m")
_OUTPUT = entry.define_output()


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    refuse(_CONFIG.value, "draft_temperature", "synthetic_acceptance")
    experiment = build(_CONFIG.value)
    console.print(headline(experiment))
    work, pair = experiment.workload, experiment.pair
    with entry.progress(console, "starting") as say:
        grid = memory_grid(
            pair.target.config,
            pair.draft.config,
            experiment.rule,
            experiment.sampling,
            slots=work.prompt_length + work.max_new_tokens,
            progress=say,
        )
    entry.show([memory_table(grid)], console)
    models = {"target": pair.target.config, "draft": pair.draft.config}
    entry.write_result(_OUTPUT.value, {"config": _CONFIG.value.to_dict(), "models": models, "result": grid}, console)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
