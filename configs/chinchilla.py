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

from ml_collections import ConfigDict

from configs import common
from specsamp.mesh import slices

PAPER = "v4-32"  # 16 chips; the name counts TensorCores
# Heads of the draft; heads of the target are the most devices for one copy.
DRAFT_HEADS, MOST_DEVICES = 48, 64
WEIGHT_BYTES = 2 * 74.2e9  # of both, in bfloat16


def get_config(argument: str = PAPER) -> ConfigDict:
    words = {word for word in argument.split(",") if word}
    tiny, greedy = "tiny" in words, "greedy" in words
    batches = {word for word in words if word.startswith("batch=")}
    names = words - batches - {"tiny", "greedy"}
    if len(names) + tiny > 1 or len(batches) > 1:
        raise ValueError(f"{argument!r} names more than one slice or batch, such as v4-32,batch=8")
    found = None if tiny else slices.find(min(names, default=PAPER))
    devices = 1 if tiny else found.devices
    per_copy = math.gcd(devices, MOST_DEVICES)
    copies = devices // per_copy
    hbm_bytes = math.inf if tiny else found.hbm_bytes / found.devices_per_chip
    if WEIGHT_BYTES / per_copy > 0.95 * hbm_bytes:
        raise ValueError(
            f"{found.name} cannot hold {WEIGHT_BYTES / 1e9:.0f} GB of weights in {devices} x "
            f"{hbm_bytes / 2**30:.0f} GiB: take a larger slice"
        )
    text = min(batches, default=f"batch={copies}").removeprefix("batch=")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"batch must be a positive integer; got {text!r}")
    batch = int(text)
    if batch % copies:
        raise ValueError(
            f"batch {batch} does not divide over {copies} copies of the target: a copy takes "
            f"{per_copy} devices at most, so a larger slice takes a larger batch"
        )

    config = ConfigDict()
    if tiny:
        config.target = common.preset("tiny", num_heads=8)
        config.draft = common.preset("tiny", num_heads=8, num_layers=1)
    else:
        config.target, config.draft = common.preset("chinchilla_70b"), common.preset("draft_4b")
    # A draft of 48 heads can be split over 16 devices, but not over 64.
    draft_devices = math.gcd(DRAFT_HEADS, per_copy)
    return common.add_decoding(
        config,
        draft_length=4,
        prompt_length=8 if tiny else 512,
        max_new_tokens=8 if tiny else 128,
        repeats=3 if tiny else 20,
        batch=batch,
        temperature=0.0 if greedy else 1.0,
        top_p=1.0 if greedy else 0.8,  # the paper's nucleus, on XSum
        data=copies,
        model=per_copy,
        draft_model_parallelism=0 if draft_devices == per_copy else draft_devices,
    )


# The paper's curve (figure 1) for launch/benchmark.py --sweep: its nucleus and its greedy setting.
LENGTHS = "draft_length=0,1,2,3,4,5,6,7"
GRIDS = [(LENGTHS,), ("sampling.temperature=0.0", LENGTHS)]
