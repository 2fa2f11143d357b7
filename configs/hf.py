"""A public checkpoint, or a pair of them, by name.

    python launch/chat.py --config=configs/hf.py:smollm2 --config.hugging_face.dtype=float32
    python launch/demo.py --config=configs/hf.py:gpt2 --prompt='The meaning of life is'
    python launch/benchmark.py --config=configs/hf.py:llama-8b --distributed --output=gs://BUCKET/llama-8b.json
    python launch/benchmark.py --config=configs/hf.py:gs://BUCKET/target,gs://BUCKET/draft
    python launch/benchmark.py --config=configs/hf.py:exported/target,exported/draft \\
        --config.hugging_face.dtype=float32
    python launch/chat.py --config=configs/hf.py:HuggingFaceTB/SmolLM2-1.7B-Instruct \\
        --config.chat=True

"smollm2" is a small tuned model, with a head that comes with this package. After the colon comes
the name of a pair below, or a target and a draft, each a folder, a gs:// folder or the id of a
model of the hub (pip install huggingface_hub jinja2). --config.hugging_face.target=FOLDER takes the
place of the target of a pair. A target alone takes --config.drafter=ngram (prompt lookup, the
default), early_exit (its first layers), window or none. With --config.drafter=head the draft is a
head, such as EAGLE-3's, or once more the target, where a module for multi-token prediction lies in
its checkpoint. Some models can be read only after their licence was accepted on their page, and
with a token. launch/export.py writes a model that was trained here as such a folder.
"""

import dataclasses
import functools
import pathlib

from ml_collections import ConfigDict

from configs import common


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicPair:
    """A target and its draft, a model or a head.

    They are split over the fewest chips of 16 GiB that hold both in bfloat16 and their caches.
    """

    target: str
    draft: str = ""  # none
    # Devices that one copy of the target is split over; they divide its heads.
    model_parallelism: int = 1
    # Devices that one copy of the draft is split over; 0: as many as the target's.
    draft_model_parallelism: int = 0
    drafter: str = "model"  # or "head": ``draft`` reads the target's hidden states
    chat: bool = False  # a tuned model: prompts are messages to it
    draft_length: int = 4  # K


PAIRS = {
    # For one laptop.
    "gpt2": PublicPair(target="openai-community/gpt2-large", draft="distilbert/distilgpt2"),
    "smollm2-1.7b": PublicPair(
        target="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        draft="HuggingFaceTB/SmolLM2-135M-Instruct",
        chat=True,
    ),
    "llama-8b": PublicPair(
        target="meta-llama/Llama-3.1-8B", draft="meta-llama/Llama-3.2-1B", model_parallelism=4
    ),
    "llama-70b": PublicPair(
        target="meta-llama/Llama-3.1-70B",
        draft="meta-llama/Llama-3.2-1B",
        model_parallelism=16,
    ),
    "qwen-3b": PublicPair(target="Qwen/Qwen2.5-3B", draft="Qwen/Qwen2.5-0.5B"),  # for one chip
    # 28 and 14 heads: the draft does not go over four devices.
    "qwen-7b": PublicPair(
        target="Qwen/Qwen2.5-7B",
        draft="Qwen/Qwen2.5-0.5B",
        model_parallelism=4,
        draft_model_parallelism=1,
    ),
    "qwen-32b": PublicPair(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B", model_parallelism=8),
    # 4 kv heads; 128 experts of a layer, of which a token reads 8.
    "qwen-30b-a3b": PublicPair(
        target="Qwen/Qwen3-30B-A3B",
        draft="Qwen/Qwen3-0.6B",
        model_parallelism=8,
        draft_length=2,  # longer ones read more experts
    ),
    "gemma-9b": PublicPair(
        target="google/gemma-2-9b", draft="google/gemma-2-2b", model_parallelism=4
    ),
    # 4 heads and 1 kv head: the draft does not go over eight devices.
    "gemma-27b": PublicPair(
        target="google/gemma-3-27b-it",
        draft="google/gemma-3-1b-it",
        model_parallelism=8,
        draft_model_parallelism=1,
        chat=True,
    ),
    "pythia-12b": PublicPair(
        target="EleutherAI/pythia-12b", draft="EleutherAI/pythia-160m", model_parallelism=4
    ),
}
# Heads draft for the tuned models that they were trained on; for base models they are accepted
# less.
tuned_with_head = functools.partial(PublicPair, drafter="head", chat=True)
HEADS = {
    "smollm2": tuned_with_head(
        target="HuggingFaceTB/SmolLM2-135M-Instruct",
        draft="smollm2-head",
        draft_length=1,  # of little training: a third of its first tokens are accepted
    ),
    "llama-8b-eagle3": tuned_with_head(
        target="meta-llama/Llama-3.1-8B-Instruct",
        draft="RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        model_parallelism=4,
    ),
    "llama-70b-eagle3": tuned_with_head(
        target="meta-llama/Llama-3.3-70B-Instruct",
        draft="RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        model_parallelism=16,
    ),
    "qwen-8b-eagle3": tuned_with_head(
        target="Qwen/Qwen3-8B",
        draft="RedHatAI/Qwen3-8B-speculator.eagle3",
        model_parallelism=4,
    ),
    # Its block drafts seven tokens.
    "qwen-8b-dspark": tuned_with_head(
        target="Qwen/Qwen3-8B",
        draft="deepseek-ai/dspark_qwen3_8b_block7",
        model_parallelism=4,
        draft_length=7,
    ),
    "qwen-32b-eagle3": tuned_with_head(
        target="Qwen/Qwen3-32B",
        draft="RedHatAI/Qwen3-32B-speculator.eagle3",
        model_parallelism=8,
    ),
    "gpt-oss-20b-eagle3": tuned_with_head(
        target="openai/gpt-oss-20b",
        draft="RedHatAI/gpt-oss-20b-speculator.eagle3",
        model_parallelism=4,
    ),
    # 16 kv heads, 4 in layers without a window.
    "gemma4-31b-assistant": tuned_with_head(
        target="google/gemma-4-31B-it",
        draft="google/gemma-4-31B-it-assistant",
        model_parallelism=8,
    ),
    "qwen3.5-9b-mtp": tuned_with_head(
        target="Qwen/Qwen3.5-9B",
        draft="Qwen/Qwen3.5-9B",
        model_parallelism=4,
    ),
    # 2 kv heads; 512 experts of a layer, of which a token reads 10.
    "qwen3-next-mtp": tuned_with_head(
        target="Qwen/Qwen3-Next-80B-A3B-Instruct",
        draft="Qwen/Qwen3-Next-80B-A3B-Instruct",
        model_parallelism=16,
        draft_length=2,  # longer ones read more experts
    ),
    "mimo-7b-mtp": tuned_with_head(
        target="XiaomiMiMo/MiMo-7B-RL",
        draft="XiaomiMiMo/MiMo-7B-RL",
        model_parallelism=4,
        draft_length=1,  # which its module was trained for
    ),
}
PROMPTS = (
    "The history of the steam engine begins",
    "def fibonacci(n):\n    ",
    "Question: Why is the sky blue?\nAnswer:",
    "In a large bowl, mix the flour and the salt. Then",
)


def get_config(argument: str = "smollm2") -> ConfigDict:
    """Returns the configuration of a pair; see `find` for the argument."""
    pair = find(argument)
    config = ConfigDict(
        dict(
            hugging_face=dict(
                target=pair.target,
                draft=pair.draft,
                # Of weights, activations and caches; float32 is faster on a CPU.
                dtype="bfloat16",
                # The draft may have another tokenizer: it drafts the tokens that both have.
                other_vocabulary=False,
            ),
            prompts=PROMPTS,
            # Prompts that are texts are messages of a user, written out by the target's chat
            # template.
            chat=pair.chat,
        )
    )
    common.add_decoding(
        config,
        draft_length=pair.draft_length,
        prompt_length=32,
        max_new_tokens=128,
        repeats=12,
        model=pair.model_parallelism,
        draft_model_parallelism=pair.draft_model_parallelism,
    )
    config.drafter = pair.drafter
    return config


def find(argument: str) -> PublicPair:
    """Returns the pair of a name of `PAIRS` or `HEADS`, of two models, ``TARGET,DRAFT``, or of a
    target alone.

    Raises:
      ValueError: it is none of these.
    """
    known = PAIRS | HEADS
    if argument in known:
        return known[argument]
    names = argument.split(",")
    is_folder = argument != "" and pathlib.Path(argument).expanduser().is_dir()
    if is_folder or (len(names) == 1 and "/" in argument):
        return PublicPair(target=argument, drafter="ngram")
    if len(names) != 2 or not all(names):
        raise ValueError(
            f"no pair {argument!r} in configs/hf.py: choose one of {', '.join(known)}, or give a "
            "target, alone or with a draft, such as Qwen/Qwen2.5-7B,Qwen/Qwen2.5-0.5B"
        )
    return PublicPair(target=names[0], draft=names[1])
