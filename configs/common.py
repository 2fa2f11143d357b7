"""Fields that every pair's configuration has: how it drafts, samples, and what is decoded on which devices."""

from ml_collections import ConfigDict, config_dict


def add_decoding(
    config: ConfigDict,
    *,
    draft_length: int,
    prompt_length: int,
    max_new_tokens: int,
    repeats: int,
    batch: int = 1,
    temperature: float = 0.8,
    top_p: float = 0.95,
    data: int = 1,
    model: int = 1,
    draft_model_parallelism: int = 0,
) -> ConfigDict:
    """Adds to ``config`` what configurations of pairs share, and returns it."""
    # K; 0 decodes autoregressively; "machine": what a forecast for this machine finds best, prompt lookup included
    config.draft_length = config_dict.FieldReference(draft_length, field_type=object)
    # or "pard", "head", "block", "early_exit", "window", "ngram", or "none": both sides autoregressive, a test of the benchmark
    config.drafter = "model"
    config.exit_layer = config_dict.placeholder(int)  # layers of the target that draft, for "early_exit"
    # Last tokens of the text that the target attends to while it drafts, for "window"; and first ones, by default 4.
    config.window = config_dict.placeholder(int)
    config.sinks = config_dict.placeholder(int)
    config.mask_id = config_dict.placeholder(int)  # the token that stands for one to be drafted, for "pard"
    # Children per level of a token tree, such as (3, 2, 1), under a rule of trees; (): chains of draft_length.
    config.tree = ()
    # Draft lengths that rows choose from, such as (0, 1, 2, 4), the last draft_length; (): always draft_length.
    config.adaptive = ConfigDict()
    config.adaptive.lengths = ()
    config.adaptive.costs_ms = ()  # milliseconds of a round with each of them; only their ratios matter
    config.adaptive.usual = config_dict.placeholder(int)  # the length that suits the batch; None: by ``acceptance``
    config.adaptive.acceptance = 0.7  # of a drafted token, as a row expects it before it has seen any
    config.adaptive.stop = "none"  # or "entropy", or "confidence": ends a draft early
    config.adaptive.least = 0.3  # of what the stop looks at, for a draft to go on
    config.attention = "auto"  # and experts, and warps: kernels on a TPU if they do what "plain" does; or "kernel"
    config.int8 = ConfigDict()
    config.int8.weights = "none"  # or "target", "draft" or "both": decode with weights in int8
    config.int8.caches = "none"  # or one of the same words: keys and values in int8
    config.rule = "token"  # or "block", or "coupled"; of trees "recursive", "traversal" or "kseq"; or a lossy one such as "ears:0.3", see launch/lib/rules.py
    config.sampling = ConfigDict()
    config.sampling.temperature = temperature  # 0.0 is greedy
    config.sampling.top_k = 0  # 0 is off
    config.sampling.top_p = top_p  # 1.0 is off
    config.sampling.min_p = 0.0  # 0.0 is off
    config.batch = batch
    config.prompt_length = prompt_length  # prompts are padded to it
    config.max_new_tokens = max_new_tokens
    config.repeats = repeats
    config.seed = 0  # from 0 to 2**32 - 1
    config.draft_temperature = config_dict.placeholder(float)  # of the draft alone; by default the target's
    config.synthetic_acceptance = config_dict.placeholder(float)  # made-up acceptance, for the benchmark alone
    config.mesh = ConfigDict()
    config.mesh.data = data  # shards of the batch
    config.mesh.model = model  # devices that hold one copy of the target together; 1 x 1 is one device
    # Devices that hold one copy of the draft together; 0: as many as the target's.
    config.mesh.draft_model_parallelism = draft_model_parallelism
    return config
