"""Fields of every pair's configuration: drafting, sampling, workload and devices."""

from typing import Any

from ml_collections import ConfigDict, config_dict

INTEGERS = "vocab_size width num_layers num_heads num_kv_heads feedforward_width max_positions"
TEXTS = "positions activation dtype"


def preset(name: str, **changes: Any) -> ConfigDict:
    """Returns the fields of a preset of specsamp/models/config.py, with changes; None keeps the
    preset's value.
    """
    kept = {field: config_dict.placeholder(int) for field in INTEGERS.split()}
    kept |= {field: config_dict.placeholder(str) for field in TEXTS.split()}
    return ConfigDict({"preset": name} | kept | changes)


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
    """Adds the common fields of pairs to ``config``, and returns it."""
    config.update(
        # K; 0 decodes autoregressively; "machine": the best by a forecast for this machine, which
        # also tries prompt lookup
        draft_length=config_dict.FieldReference(draft_length, field_type=object),
        # or "beam", "pard", "head", "block", "early_exit", "window", "ngram", several such as
        # "voting:ngram:model" or "choosing:ngram:early_exit", or "none": both sides
        # autoregressive, a test of the benchmark
        drafter="model",
        # Layers of the target that draft, for "early_exit".
        exit_layer=config_dict.placeholder(int),
        # Last tokens of the text that the target attends to while it drafts, for "window"; and
        # first ones.
        window=config_dict.placeholder(int),
        sinks=4,
        # Texts that "ngram" looks in, too: a file of token ids (.npy), or of a text; "": none.
        corpus="",
        # The token that stands for one to be drafted, for "pard".
        mask_id=config_dict.placeholder(int),
        # Children per level of a token tree, (3, 2, 1) for example, under a rule of trees; ():
        # chains of draft_length.
        tree=(),
        adaptive=dict(
            # Draft lengths to choose from for each row, (0, 1, 2, 4) for example, the last
            # draft_length; (): always draft_length.
            lengths=(),
            # Milliseconds of a round with each of them; only their ratios matter.
            costs_ms=(),
            # The length that suits the batch; None: by ``acceptance``.
            usual=config_dict.placeholder(int),
            acceptance=0.7,  # the prior acceptance of a drafted token
            stop="none",  # or "entropy", or "confidence": ends a draft early
            least=0.3,  # the least value of the stop for a longer draft
        ),
        # And experts, and warps: kernels on a TPU if they do what "plain" does; or "kernel".
        attention="auto",
        int8=dict(
            weights="none",  # or "target", "draft" or "both": decode with weights in int8
            caches="none",  # or one of the same words: keys and values in int8
        ),
        # Or "block", or "coupled"; of trees "recursive", "traversal" or "kseq"; or a lossy one such
        # as "ears:0.3", see launch/lib/rules.py.
        rule="token",
        sampling=dict(
            temperature=temperature,  # 0.0 is greedy
            top_k=0,  # 0 is off
            top_p=top_p,  # 1.0 is off
            min_p=0.0,  # 0.0 is off
        ),
        batch=batch,
        prompt_length=prompt_length,  # prompts are padded to it
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        seed=0,  # from 0 to 2**32 - 1
        # Of the draft alone; by default the target's.
        draft_temperature=config_dict.placeholder(float),
        # made-up acceptance, for the benchmark alone.
        synthetic_acceptance=config_dict.placeholder(float),
        mesh=dict(
            data=data,  # shards of the batch
            # Devices that hold one copy of the target together; 1 x 1 is one device.
            model=model,
            # Devices that hold one copy of the draft together; 0: as many as the target's.
            draft_model_parallelism=draft_model_parallelism,
        ),
    )
    return config
