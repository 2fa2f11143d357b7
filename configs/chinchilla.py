"""Describes the pair of Chen et al. (arXiv 2302.01318): a 70B target and a wide, shallow 4B draft,
K = 4, on 16 TPU v4 chips.

    python launch/benchmark.py --config=configs/chinchilla.py --distributed --output=gs://BUCKET/nucleus.json
    python launch/benchmark.py --config=configs/chinchilla.py:v4-32,greedy --distributed
    python launch/benchmark.py --config=configs/chinchilla.py:v5p-64,batch=8 --distributed
    python launch/benchmark.py --config=configs/chinchilla.py:tiny    # all steps, on a CPU
    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python launch/benchmark.py --config=configs/chinchilla.py:tiny --config.mesh.model=8

After the colon, in any order: a TPU slice (specsamp/mesh/slices.json), "batch=N", "greedy", "tiny".
The trained weights are not public. With random ones the times are as in the trained pair,
acceptance and speedup are not.
"""

import math

from ml_collections import ConfigDict, config_dict

from configs import common
from specsamp.mesh import slices

PAPER = "v4-32"  # 16 chips; the name counts TensorCores
# Heads of the draft; heads of the target are the most devices for one copy.
DRAFT_HEADS, MOST_DEVICES = 48, 64
WEIGHT_BYTES = 2 * 74.2e9  # of both, in bfloat16


def get_config(argument: str = PAPER) -> ConfigDict:
    words = [word for word in argument.split(",") if word]
    tiny, greedy = "tiny" in words, "greedy" in words
    batches = [word.removeprefix("batch=") for word in words if word.startswith("batch=")]
    names = [
        word for word in words if word not in ("tiny", "greedy") and not word.startswith("batch=")
    ]
    if len(names) + tiny > 1 or len(batches) > 1:
        raise ValueError(f"{argument!r} names more than one slice or batch, such as v4-32,batch=8")
    if not all(batch.isdecimal() and int(batch) >= 1 for batch in batches):
        raise ValueError(f"batch must be a positive integer; got {batches[0]!r}")
    found = None if tiny else slices.find(names[0] if names else PAPER)
    devices = 1 if found is None else found.devices
    per_copy = math.gcd(devices, MOST_DEVICES)
    if (
        found is not None
        and WEIGHT_BYTES / per_copy > 0.95 * found.hbm_bytes * found.chips / found.devices
    ):
        raise ValueError(
            f"{found.name} cannot hold {WEIGHT_BYTES / 1e9:.0f} GB of weights in {devices} x "
            f"{found.hbm_bytes * found.chips / found.devices / 2**30:.0f} GiB: take a larger slice"
        )
    batch = int(batches[0]) if batches else devices // per_copy
    if batch % (devices // per_copy):
        raise ValueError(
            f"batch {batch} does not divide over {devices // per_copy} copies of the target: a "
            f"copy takes {per_copy} devices at most, so a larger slice wants a larger batch"
        )

    config = ConfigDict()
    config.target = model("tiny", num_heads=8) if tiny else model("chinchilla_70b")
    config.draft = model("tiny", num_heads=8, num_layers=1) if tiny else model("draft_4b")
    # A draft of 48 heads can be split over 16 devices, but not over 64.
    draft_devices = math.gcd(DRAFT_HEADS, per_copy)
    common.add_decoding(
        config,
        draft_length=4,
        prompt_length=8 if tiny else 512,
        max_new_tokens=8 if tiny else 128,
        repeats=3 if tiny else 20,
        batch=batch,
        temperature=0.0 if greedy else 1.0,
        top_p=1.0 if greedy else 0.8,  # the paper's nucleus, on XSum
        data=devices // per_copy,
        model=per_copy,
        draft_model_parallelism=0 if draft_devices == per_copy else draft_devices,
    )
    return config


# The paper's curve (figure 1) for launch/benchmark.py --sweep: its nucleus and its greedy setting.
LENGTHS = "draft_length=0,1,2,3,4,5,6,7"
GRIDS = [(LENGTHS,), ("sampling.temperature=0.0", LENGTHS)]


def model(preset: str, **changes) -> ConfigDict:
    """Returns the fields of a preset of specsamp/models/config.py; what is None here is as the
    preset has it.
    """
    kinds = {
        "num_layers": int,
        "num_heads": int,
        "num_kv_heads": int,
        "max_positions": int,
        "positions": str,
    }
    as_it_is = {name: config_dict.placeholder(kind) for name, kind in kinds.items()}
    return ConfigDict({"preset": preset} | as_it_is | changes)
