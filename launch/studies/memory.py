"""Reports the memory that the decoding loop compiles to, over batch, K and vocabulary; nothing is allocated or run.

python launch/studies/memory.py --config=configs/random_pair.py:38m --output=runs/random_38m_memory.json
"""

from launch.lib import entry
from launch.lib.config import ConfigFlag, heeds
from launch.lib.experiment import make_sampling
from launch.lib.rules import make_rule
from launch.lib.shapes import known_models
from launch.studies.loop_memory import memory_grid, memory_table

_CONFIG = ConfigFlag("configs/random_pair.py:38m")
_OUTPUT = entry.define_output()

FIELDS = (
    "target",
    "draft",
    "rule",
    "sampling",
    "prompt_length",
    "max_new_tokens",
)  # batch, K and vocabulary are the grid's


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    config = _CONFIG.value
    heeds(_CONFIG, FIELDS, "this study")
    models = {side: model.config for side, model in known_models(config).items()}
    with entry.progress(console, "starting") as say:
        grid = memory_grid(
            models["target"],
            models["draft"],
            make_rule(config.rule),
            make_sampling(config.sampling),
            slots=config.prompt_length + config.max_new_tokens,
            progress=say,
        )
    entry.show([memory_table(grid)], console)
    heeded = {name: value for name, value in config.to_dict().items() if name in FIELDS}
    entry.write_result(_OUTPUT.value, {"config": heeded, "models": models, "result": grid}, console)


if __name__ == "__main__":
    entry.run(main, _CONFIG)
