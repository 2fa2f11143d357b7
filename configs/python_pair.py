"""Trains a pair that writes Python, on the source of the standard library.

    python launch/train.py --config=configs/python_pair.py:target --workdir=runs/target
    python launch/train.py --config=configs/python_pair.py:draft --workdir=runs/draft \\
        --config.target=runs/target
    python launch/train.py --config=configs/python_pair.py:layer_skip --workdir=runs/layer_skip
    python launch/train.py --config=configs/python_pair.py:layer_skip --workdir=runs/tuned \\
        --config.init=runs/target
    python launch/train.py --config=configs/python_pair.py:head --workdir=runs/head \\
        --config.target=python
    python launch/train.py --config=configs/python_pair.py:medusa --workdir=runs/medusa \\
        --config.target=python
    python launch/train.py --config=configs/python_pair.py:mtp --workdir=runs/mtp \\
        --config.target=python
    python launch/train.py --config=configs/python_pair.py:dspark --workdir=runs/dspark \\
        --config.target=python
    python launch/train.py --config=configs/python_pair.py:mtp_target --workdir=runs/mtp_target
    python launch/train.py --config=configs/python_pair.py:draft_target --workdir=runs/draft_target
    python launch/train.py --config=configs/python_pair.py:tiny_target --workdir=/tmp/tiny

The draft is distilled from the target, on the same text and on text that the target wrote.
"layer_skip" is a target that drafts with its own first layers: from scratch, or tuned from a
target. Heads draft from the target's hidden states: "head" is EAGLE-3's, "medusa" are Medusa's,
"mtp" is a module for multi-token prediction like MiMo's; "dflash" and "dspark" draft a block in one
call. "mtp_target" and "draft_target" train a target and its draft together, from the first step.
With "tiny_" before the word ("tiny_target", "tiny_draft" and so on) each goes through all steps in
a minute. "llama_target" and "llama_draft" have an architecture that other engines can read: gated,
without n-gram embeddings (launch/export.py).
"""

from ml_collections import ConfigDict, FieldReference, config_dict

KINDS = (
    "target",
    "draft",
    "layer_skip",
    "head",
    "medusa",
    "mtp",
    "dflash",
    "dspark",
    "tiny_target",
    "tiny_draft",
    "tiny_layer_skip",
    "tiny_head",
    "tiny_medusa",
    "tiny_mtp",
    "tiny_dflash",
    "tiny_dspark",
    "llama_target",
    "llama_draft",
    "mtp_target",
    "draft_target",
    "tiny_mtp_target",
    "tiny_draft_target",
)
BLOCKS = ("dflash", "dspark")
HEADS = ("head", "medusa", "mtp", *BLOCKS)


def get_config(kind: str = "target") -> ConfigDict:
    if kind not in KINDS:
        raise ValueError(f"no {kind!r} in configs/python_pair.py: choose one of {', '.join(KINDS)}")
    if kind.endswith(("mtp_target", "draft_target")):
        return with_target(get_config(kind.removesuffix("_target")), kind)
    tiny, draft, head = kind.startswith("tiny"), kind.endswith("draft"), kind.endswith(HEADS)
    config = ConfigDict()

    config.data = ConfigDict()
    config.data.folder = ""  # a folder of texts; "" is the Python standard library
    config.data.pattern = "*.py"
    config.data.exclude = ("site-packages", "dist-packages", "encodings", "pydoc_data")
    config.data.held_out = 0.03  # share of the files that is kept from training
    config.data.tokenizer = ""  # a tokenizer.json; "" trains one (a draft takes its target's)
    config.data.eos = "<eos>"  # the tokenizer's end-of-text token
    config.data.length = 64 if tiny else 256  # T, tokens that a training window predicts
    config.data.held_out_windows = 16 if tiny else 256
    if tiny:
        config.data.pattern = "s*.py"

    config.model = ConfigDict()
    config.model.vocab_size = 512 if tiny else 2048
    config.model.width = 64 if tiny else 512
    config.model.num_layers = 2 if tiny else 6
    config.model.num_heads = 2 if tiny else 4
    config.model.num_kv_heads = 1
    config.model.feedforward_width = 256 if tiny else 2560
    config.model.positions = "rotary"
    config.model.max_positions = 2048
    config.compute_dtype = "bfloat16"  # parameters and optimizer stay float32

    config.train = ConfigDict()
    config.train.steps = 60 if tiny else 5000
    config.train.batch = 8 if tiny else 16
    config.train.microbatches = 1
    config.train.learning_rate = 3e-3 if tiny else 1.5e-3
    config.train.warmup_steps = 10 if tiny else 100
    config.train.weight_decay = 0.1
    config.train.clip_norm = 1.0
    config.train.seed = 0

    config.mesh = ConfigDict()
    config.mesh.model = 1  # devices of a replica of the model; further devices are data shards

    config.intervals = ConfigDict()
    config.intervals.log = 10
    config.intervals.evaluate = 60 if tiny else 500
    config.intervals.checkpoint = 30 if tiny else 100

    if kind.endswith("layer_skip"):
        config.init = ""  # the folder of a target's run to tune; "" trains from scratch
        config.layer_skip = ConfigDict()
        # Probability that the last layer is dropped for a row; lower for earlier layers.
        config.layer_skip.dropout = 0.1
        # How much inner layers count in the loss; 0.0: not at all.
        config.layer_skip.exit_scale = 0.2
        config.layer_skip.curriculum = "rotational"  # or "gradual"
        # A step of the rotational curriculum reads one inner layer in so many.
        config.layer_skip.rotation = 3
        config.model.num_layers = 4 if tiny else 6
    if draft or head:
        config.target = ""  # the folder of the target's run; or a pair, by name or folder
        # The folder of a run of the same kind whose parameters to start from; "": random ones.
        config.init = ""
        # or "reverse_kl", "total_variation", "lk_hybrid", "dspark"; also "cross_entropy" on the
        # text, except for blocks
        config.objective = "forward_kl"
        config.generated = ConfigDict()
        config.generated.rows = 32 if tiny else 4096  # windows that the target completes
        config.generated.share = 0.6  # share of a training batch's rows that the target wrote
        config.generated.prompt_length = 16 if tiny else 32
        config.generated.temperature = 0.8
        config.generated.top_p = 0.95
        config.generated.batch = 16 if tiny else 64  # rows written at a time
        config.generated.greedy_share = 0.25  # share of these rows that is written greedily
    if head:
        config.test_time = ConfigDict()
        config.test_time.test_steps = 3 if tiny else 4  # of the training-time test
        config.test_time.decay = 0.8  # the weight of a step, of that of the step before it
        # Positions whose logits are in memory at a time; all.
        config.test_time.chunk = config_dict.placeholder(int)
        config.head = head_fields(
            kind.removeprefix("tiny_"), tiny, config.test_time.get_ref("test_steps")
        )
        config.model.num_layers = 1
        # Through the values comes what token was drafted.
        config.model.num_kv_heads = config.model.num_heads
        config.model.feedforward_width = 128 if tiny else 512
        config.model.gated = True
        config.model.activation = "silu"
        if kind.endswith("mtp"):
            config.model.attention_bias = True  # as MiMo's has
        if kind.endswith(BLOCKS):
            config.test_time.test_steps = config.head.get_ref("block_size") - (
                1 if kind.endswith("dflash") else 0
            )
            config.test_time.decay = 0.7788  # exp(-1/4)
            config.test_time.anchors = 8 if tiny else 48  # blocks of each window
            config.test_time.marginals = (
                0.0 if kind.endswith("dflash") else 0.3
            )  # weight of the loss without correction
            # D-PACE's weights instead of decay; 0.5 for example.
            config.test_time.pace = config_dict.placeholder(float)
            config.model.num_layers = 2
            config.model.num_kv_heads = 1 if tiny else 2
            config.model.feedforward_width = 128 if tiny else 256
            config.model.query_key_norm = True  # as in Qwen3, whose layers files describe
            # The first layer sees the last tokens alone: with all of them a new head does not
            # improve for a long time.
            config.model.window, config.model.global_layers = 2, (1,)
        config.generated.rows = 32 if tiny else 1024
        config.generated.share = 0.5
        if not tiny:
            config.train.steps = 4000
            config.train.batch = 4 if kind.endswith(BLOCKS) else 8
            config.train.learning_rate = 3e-3
    if draft:
        config.model.width = 32 if tiny else 128
        config.model.num_layers = 1 if tiny else 2
        config.model.num_heads = 2
        config.model.feedforward_width = 128 if tiny else 512
        # Rows of each table of n-gram embeddings; 0: no tables.
        config.model.ngram_rows = 256 if tiny else 32768
        config.model.ngram_order = 3
        if not tiny:
            config.train.steps = 8000
            config.train.learning_rate = 3e-3
    if kind.startswith("llama"):
        config.model.gated = True
        config.model.activation = "silu"
        config.model.feedforward_width = 384 if draft else 1664  # a gate is a third matrix
        if draft:
            config.model.ngram_rows = 0
    return config


def with_target(config: ConfigDict, kind: str) -> ConfigDict:
    """Changes the fields of a draft or a head to train it together with its target."""
    target = get_config("tiny_target" if kind.startswith("tiny") else "target")
    for name in ("target", "init", "generated"):
        del config[name]
    config.train = target.train
    config.together = ConfigDict()
    config.together.model = target.model
    mtp = kind.endswith("mtp_target")
    # DeepSeek-V3 weighs the mean over its modules with 0.3. The loss here is a sum over four steps:
    # a third of that weight.
    config.together.weight = 0.1 if mtp else 1.0
    # How much of the draft's gradient reaches the target.
    config.together.pull = 1.0 if mtp else 0.0
    config.objective = "cross_entropy" if mtp else "forward_kl"
    return config


def head_fields(kind: str, tiny: bool, steps: FieldReference) -> ConfigDict:
    """Returns the fields of a kind of head, as in its files."""
    fields = ConfigDict()
    if kind == "medusa":
        fields.kind = "medusa"
        fields.num_heads = steps  # each drafts one token
        fields.bias = True
        fields.own_output = True  # one for each head, which begins as the target's
        return fields
    if kind == "mtp":
        fields.kind = "mtp"
        # One drafts any number of tokens; of several, each drafts one: test_time.test_steps must
        # then be their number.
        fields.num_modules = 1
        # As in MiMo's, whose names the export uses; other kinds are trained, but not exported.
        fields.hidden_first = True  # the hidden state stands before the token
        fields.norm_output = True  # the features for later steps are normalised
        return fields
    if kind in BLOCKS:
        fields.kind = kind
        # The usual ones of six layers would repeat.
        fields.hidden_layers = (0, 1) if tiny else (1, 3, 5)
        fields.block_size = 4 if tiny else 8
        # Of the rows that draft: the end of text, which is never pending.
        fields.mask_id = 511 if tiny else 2047
        fields.windows_both_ways = False
        if kind == "dspark":
            fields.markov = "vanilla"  # or "gated", "recurrent"
            fields.markov_rank = 16 if tiny else 64
            fields.confidence = "markov"
        return fields
    fields.kind = "eagle3"
    # The layers of the target whose outputs it reads, counted from 0. The usual ones of six layers
    # would repeat.
    fields.hidden_layers = (0, 1) if tiny else (1, 3, 5)
    fields.draft_vocab_size = 0  # the most frequent tokens are drafted; 0: all
    # Embeds tokens itself; False: as the target does, whose width it then has.
    fields.own_embedding = False
    fields.own_output = False  # the same for the output
    # The target's streams grow from layer to layer: each has a norm of its own.
    fields.fc_norm = True
    fields.norm_before_residual = True
    return fields
