"""A trained pair and its held-out prompts.

    python launch/demo.py --config=configs/trained_pair.py
    python launch/benchmark.py --config=configs/trained_pair.py:python --config.rule=block
    python launch/benchmark.py --config=configs/trained_pair.py:runs/my_pair --config.draft_length=6
    python launch/sweep.py --config=configs/trained_pair.py --output=notebooks/results/python_pair_grid.json
    python launch/studies/speedup.py --config=configs/trained_pair.py --output=notebooks/results/python_pair_speedup.json

After the colon comes a pair of the package, or a folder (launch/export_pair.py writes one).
"""

from ml_collections import ConfigDict, config_dict


def get_config(pair: str = "python") -> ConfigDict:
    config = ConfigDict()
    config.pair = pair
    config.draft_length = 3  # K; 0 decodes autoregressively. On two cores best for greedy and sampled text together
    config.drafter = "model"  # or "ngram", or "none"
    config.rule = "token"  # or "block", or "coupled"
    config.sampling = ConfigDict()
    config.sampling.temperature = 0.8  # 0.0 is greedy
    config.sampling.top_k = 0  # 0 is off
    config.sampling.top_p = 0.95  # 1.0 is off
    config.sampling.min_p = 0.0  # 0.0 is off
    config.batch = 1
    config.prompt_length = 96  # prompts are padded to it
    config.max_new_tokens = 128
    config.repeats = 20
    config.seed = 0
    config.draft_temperature = config_dict.placeholder(float)  # of the draft alone; default: the target's
    config.synthetic_acceptance = config_dict.placeholder(float)  # made-up acceptance, for the benchmark alone
    config.mesh = ConfigDict()
    config.mesh.data = 1  # shares of the batch
    config.mesh.model = 1  # devices that hold one copy of the target together; 1 x 1 is one device
    config.mesh.draft_model_parallelism = (
        0  # devices that hold one copy of the draft together; 0: as many as the target's
    )
    return config


def get_hyper(h):
    """Draft length, temperature, rule and drafter; and a draft that is hotter or colder than its target."""
    laws = h.sweep("sampling.temperature", [0.0, 0.8, 1.0])
    lengths = h.sweep("draft_length", [0, 1, 2, 4, 8])
    rules, drafters = h.sweep("rule", ["token", "block"]), h.sweep("drafter", ["model", "ngram"])
    biased = h.product([h.sweep("draft_temperature", [0.0, 0.4, 0.6, 0.8, 1.0, 1.2]), h.sweep("draft_length", [4])])
    return h.product([laws, lengths, rules, drafters]) + biased
