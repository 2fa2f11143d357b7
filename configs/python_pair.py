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

BLOCKS = ("dflash", "dspark")
HEADS = ("head", "medusa", "mtp", *BLOCKS)
ALONE = ("target", "draft", "layer_skip", *HEADS, "mtp_target", "draft_target")
KINDS = (*ALONE, *(f"tiny_{kind}" for kind in ALONE), "llama_target", "llama_draft")


def get_config(kind: str = "target") -> ConfigDict:
    if kind not in KINDS:
        raise ValueError(f"no {kind!r} in configs/python_pair.py: choose one of {', '.join(KINDS)}")
    tiny, word = kind.startswith("tiny_"), kind.removeprefix("tiny_")
    if word in ("mtp_target", "draft_target"):
        return with_target(get_config(kind.removesuffix("_target")), word, tiny)
    draft, head = word in ("draft", "llama_draft"), word in HEADS
    config = ConfigDict(
        dict(
            data=dict(
                folder="",  # a folder of texts; "" is the Python standard library
                pattern="s*.py" if tiny else "*.py",
                exclude=("site-packages", "dist-packages", "encodings", "pydoc_data"),
                held_out=0.03,  # share of the files that is kept from training
                tokenizer="",  # a tokenizer.json; "" trains one (a draft takes its target's)
                eos="<eos>",  # the tokenizer's end-of-text token
                length=64 if tiny else 256,  # T, tokens that a training window predicts
                held_out_windows=16 if tiny else 256,
            ),
            model=dict(
                vocab_size=512 if tiny else 2048,
                width=64 if tiny else 512,
                num_layers=2 if tiny else 6,
                num_heads=2 if tiny else 4,
                num_kv_heads=1,
                feedforward_width=256 if tiny else 2560,
                positions="rotary",
                max_positions=2048,
            ),
            compute_dtype="bfloat16",  # parameters and optimizer stay float32
            train=dict(
                steps=60 if tiny else 5000,
                batch=8 if tiny else 16,
                microbatches=1,
                optimizer="adamw",  # or "muon": fewer steps, which take a little longer
                learning_rate=3e-3 if tiny else 1.5e-3,
                warmup_steps=10 if tiny else 100,
                weight_decay=0.1,
                clip_norm=1.0,
                seed=0,
            ),
            mesh=dict(model=1),  # devices of a copy of the model; further devices are data shards
            intervals=dict(
                log=10,
                evaluate=60 if tiny else 500,
                checkpoint=30 if tiny else 100,
            ),
        )
    )
    if word == "layer_skip":
        config.init = ""  # the folder of a target's run to tune; "" trains from scratch
        config.layer_skip = dict(
            # Probability that the last layer is dropped for a row; lower for earlier layers.
            dropout=0.1,
            exit_scale=0.2,  # how much inner layers count in the loss; 0.0: not at all
            curriculum="rotational",  # or "gradual"
            # A step of the rotational curriculum reads one inner layer in so many.
            rotation=3,
        )
        config.model.num_layers = 4 if tiny else 6
    if draft or head:
        config.target = ""  # the folder of the target's run; or a pair, by name or folder
        # The folder of a run of the same kind whose parameters to start from; "": random ones.
        config.init = ""
        # or "reverse_kl", "total_variation", "lk_hybrid", "dspark"; also "cross_entropy" on the
        # text, except for blocks
        config.objective = "forward_kl"
        config.generated = dict(
            rows=32 if tiny else 4096,  # windows that the target completes
            share=0.6,  # share of a training batch's rows that the target wrote
            prompt_length=16 if tiny else 32,
            temperature=0.8,
            top_p=0.95,
            batch=16 if tiny else 64,  # rows written at a time
            greedy_share=0.25,  # share of these rows that is written greedily
        )
    if head:
        config.test_time = dict(
            test_steps=3 if tiny else 4,  # of the training-time test
            decay=0.8,  # the weight of a step, of that of the step before it
            # Positions whose logits are in memory at a time; all.
            chunk=config_dict.placeholder(int),
        )
        config.head = head_fields(word, tiny, config.test_time.get_ref("test_steps"))
        config.model.update(
            num_layers=1,
            # Through the values comes what token was drafted.
            num_kv_heads=config.model.num_heads,
            feedforward_width=128 if tiny else 512,
            gated=True,
            activation="silu",
        )
        if word == "mtp":
            config.model.attention_bias = True  # as MiMo's has
        if word in BLOCKS:
            is_dflash = word == "dflash"
            config.test_time.test_steps = config.head.get_ref("block_size") - int(is_dflash)
            config.test_time.update(
                decay=0.7788,  # exp(-1/4)
                anchors=8 if tiny else 48,  # blocks of each window
                marginals=0.0 if is_dflash else 0.3,  # weight of the loss without correction
                # D-PACE's weights instead of decay; 0.5 for example.
                pace=config_dict.placeholder(float),
            )
            config.model.update(
                num_layers=2,
                num_kv_heads=1 if tiny else 2,
                feedforward_width=128 if tiny else 256,
                query_key_norm=True,  # as in Qwen3, whose layers files describe
                # The first layer sees the last tokens alone: with all of them a new head does not
                # improve for a long time.
                window=2,
                global_layers=(1,),
            )
        config.generated.rows = 32 if tiny else 1024
        config.generated.share = 0.5
        if not tiny:
            batch = 4 if word in BLOCKS else 8
            config.train.update(steps=4000, batch=batch, learning_rate=3e-3)
    if draft:
        config.model.update(
            width=32 if tiny else 128,
            num_layers=1 if tiny else 2,
            num_heads=2,
            feedforward_width=128 if tiny else 512,
            # Rows of each table of n-gram embeddings; 0: no tables.
            ngram_rows=256 if tiny else 32768,
            ngram_order=3,
        )
        if not tiny:
            config.train.update(steps=8000, learning_rate=3e-3)
    if word.startswith("llama"):
        config.model.gated = True
        config.model.activation = "silu"
        config.model.feedforward_width = 384 if draft else 1664  # a gate is a third matrix
        if draft:
            config.model.ngram_rows = 0
    return config


def with_target(config: ConfigDict, word: str, tiny: bool) -> ConfigDict:
    """Changes the fields of a draft or a head to train it together with its target."""
    target = get_config("tiny_target" if tiny else "target")
    for name in ("target", "init", "generated"):
        del config[name]
    config.train = target.train
    mtp = word == "mtp_target"
    config.together = dict(
        model=target.model,
        # DeepSeek-V3 weighs the mean over its modules with 0.3. The loss here is a sum over four
        # steps: a third of that weight.
        weight=0.1 if mtp else 1.0,
        pull=1.0 if mtp else 0.0,  # how much of the draft's gradient reaches the target
    )
    config.objective = "cross_entropy" if mtp else "forward_kl"
    return config


def head_fields(kind: str, tiny: bool, steps: FieldReference) -> ConfigDict:
    """Returns the fields of a kind of head, as in its files."""
    if kind == "medusa":
        return ConfigDict(
            dict(
                kind="medusa",
                num_heads=steps,  # each drafts one token
                bias=True,
                own_output=True,  # one for each head, which begins as the target's
            )
        )
    if kind == "mtp":
        return ConfigDict(
            dict(
                kind="mtp",
                # One drafts any number of tokens; of several, each drafts one: test_time.test_steps
                # must then be their number.
                num_modules=1,
                # As in MiMo's, whose names the export uses; other kinds are trained, but not
                # exported.
                hidden_first=True,  # the hidden state stands before the token
                norm_output=True,  # the features for later steps are normalised
            )
        )
    # The layers of the target whose outputs a head reads, counted from 0. The usual ones of six
    # layers would repeat.
    hidden_layers = (0, 1) if tiny else (1, 3, 5)
    if kind not in BLOCKS:
        return ConfigDict(
            dict(
                kind="eagle3",
                hidden_layers=hidden_layers,
                draft_vocab_size=0,  # the most frequent tokens are drafted; 0: all
                # Embeds tokens itself; False: as the target does, whose width it then has.
                own_embedding=False,
                own_output=False,  # the same for the output
                # The target's streams grow from layer to layer: each has a norm of its own.
                fc_norm=True,
                norm_before_residual=True,
            )
        )
    fields = ConfigDict(
        dict(
            kind=kind,
            hidden_layers=hidden_layers,
            block_size=4 if tiny else 8,
            # Of the rows that draft: the end of text, which is never pending.
            mask_id=511 if tiny else 2047,
            windows_both_ways=False,
        )
    )
    if kind == "dspark":
        fields.update(
            markov="vanilla",  # or "gated", "recurrent"
            markov_rank=16 if tiny else 64,
            confidence="markov",
        )
    return fields
