"""What the files of all kinds of heads have in common."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from specsamp.checkpoints.safetensors_io import SINGLE

FAMILY_OF = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SPECULATORS = "speculators_model_type"  # a key that only files of speculators have
# Tensors beside a head's: maps of vocabularies, tensors of the target, and tables that are computed.
OF_SPECULATORS = re.compile(r"(d2t|t2d|verifier_norm\.weight|verifier_lm_head\.weight)$|rotary_emb\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The files of a kind of heads."""

    whose: str = "speculators"  # its authors, for messages
    file: str = SINGLE  # of the tensors, where it is written
    names: Mapping[str, str]  # see tensor_names.py
    others: re.Pattern = OF_SPECULATORS  # names of tensors that are no parameters of the head
