"""Trains a head that drafts inside a public target, or a draft model for it, from conversations
or any other texts.

    python launch/train.py --config=configs/hf_head.py:meta-llama/Llama-3.1-8B-Instruct \\
        --workdir=runs/head --config.data.folder=chats
    python launch/train.py --config=configs/hf_head.py:Qwen/Qwen3-8B,medusa --workdir=runs/medusa \\
        --config.data.folder=chats
    python launch/train.py --config=configs/hf_head.py:meta-llama/Llama-3.1-8B-Instruct,draft \\
        --workdir=runs/draft --config.data.folder=chats
    python launch/export.py --run=runs/head --output=exported/head
    python launch/doctor.py --look_at=head \\
        --config=configs/hf.py:meta-llama/Llama-3.1-8B-Instruct,exported/head \\
        --config.drafter=head --config.chat=True

After the colon comes the target, a folder, a gs:// folder or the id of a model of the hub; then, if
it is not to be EAGLE-3's ("head"), the kind of the head: "medusa", "mtp", "dflash" or "dspark"; or
"draft", a model that begins with the target's embedding and first layers. Tokenizer and chat
template are the target's. Each line of a .jsonl file in the folder of texts is a conversation,
{"messages": [{"role": "user", "content": "Hi"}, ...]}; other texts are read with
--config.data.pattern='*.txt'. The target completes a share of them itself, which is how it will be
used. The target's weights lie over ``mesh.model`` devices, in bfloat16; the other devices read
other rows.
"""

from ml_collections import ConfigDict, config_dict

from configs import python_pair


def get_config(argument: str = "") -> ConfigDict:
    """Returns the configuration of a head or a draft for a target; fields of its layers that are
    None, and those of a draft that are left out, are the target's.
    """
    target, _, kind = argument.partition(",")
    kind = kind or "head"
    kinds = (*python_pair.HEADS, "draft")
    if kind not in kinds:
        raise ValueError(
            f"no kind of head {kind!r} in configs/hf_head.py: choose one of {', '.join(kinds)}"
        )
    config = python_pair.get_config("llama_draft" if kind == "draft" else kind)
    config.target = target

    config.data.update(pattern="*.jsonl", exclude=(), length=2048, held_out_windows=64)
    sizes = ("num_heads", "num_kv_heads", "head_size", "feedforward_width", "vocab_size", "width")
    config.model = dict(
        num_layers=1,
        positions="rotary",
        gated=True,
        activation="silu",
        attention_bias=kind == "mtp",
        max_positions=config_dict.placeholder(int),
        norm_epsilon=config_dict.placeholder(float),
        rotary_base=config_dict.placeholder(float),
        rotary_scaling=config_dict.placeholder(dict),
        **{name: config_dict.placeholder(int) for name in sizes},
    )
    config.train.update(steps=20_000, batch=16, learning_rate=1e-4, warmup_steps=300, clip_norm=0.5)
    config.generated.update(rows=4096, prompt_length=512, batch=16)
    if kind == "draft":
        config.init = config.get_ref("target")  # its first layers; "": random parameters
        sizes = ("width", "num_heads", "num_kv_heads", "head_size", "feedforward_width")
        config.model = dict(num_layers=2, **{name: config_dict.placeholder(int) for name in sizes})
        return config
    config.test_time.chunk = 256  # logits of a large vocabulary do not fit otherwise
    if kind in python_pair.BLOCKS:
        config.model.update(
            num_layers=5,
            query_key_norm=True,  # as in Qwen3, whose layers files describe
            # The first layer sees the last tokens alone: a new head learns sooner. With another
            # number of layers, name the others in global_layers.
            window=2,
            global_layers=(1, 2, 3, 4),
        )
        config.objective = "dspark"
        # Of each text, and whose logits are in memory.
        config.test_time.update(anchors=128, chunk=8)
        config.head.update(
            hidden_layers=(),
            windows_both_ways=False,
            block_size=16,
            # An unused id of the target, such as 151669 of Qwen3.
            mask_id=config_dict.placeholder(int),
        )
    if kind == "head":
        config.test_time.test_steps = 7
        config.head.update(
            hidden_layers=(),  # the usual ones of a target of so many layers
            draft_vocab_size=32_000,
            own_output=True,
            fc_norm=False,
        )
    return config
