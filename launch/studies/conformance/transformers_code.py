"""transformers: `generate` with a draft model, as a whole; and what its functions do with the drafts of an assistant."""

from __future__ import annotations

import functools
import pathlib
import types
from typing import Any

import torch

from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit, load_module
from launch.studies.conformance.torch_tables import drawn, tables, tempered


def whole_loop(files: pathlib.Path, case: Case, **lossy: float) -> tuple[Emit, Emit]:
    """Returns `generate` with a draft model, and without."""
    import transformers

    class Rows(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class, _supports_cache_class = transformers.LlamaConfig, True

        def __init__(self, logits):
            size = {"hidden_size": 2, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 2}
            super().__init__(
                transformers.LlamaConfig(vocab_size=len(logits), bos_token_id=None, eos_token_id=None, **size)
            )
            self.rows = torch.nn.Embedding.from_pretrained(torch.tensor(logits))

        def get_input_embeddings(self):
            return self.rows

        def forward(self, input_ids, cache=None, **_):
            if cache is not None:
                nothing = torch.zeros(1, 1, input_ids.shape[1], 2)
                cache.update(nothing, nothing, 0)
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.rows(input_ids), cache=cache)

    target, draft = Rows(case.target), Rows(case.draft)
    draft.generation_config.num_assistant_tokens = case.K
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    settings = {"do_sample": True, "temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p}
    settings |= {"max_new_tokens": case.count, "pad_token_id": 0}

    def tokens(last: int, **more: Any) -> list[int]:
        return target.generate(torch.tensor([[last]]), **settings, **more)[0, 1:].tolist()

    return functools.partial(tokens, assistant_model=draft, **lossy), tokens


def assistants(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    """Runs their candidate generator on a stand-in for the assistant, and their verification on what it proposes."""
    from transformers.generation import candidate_generator, utils

    target, draft = tables(case)
    generator = object.__new__(candidate_generator.SinglePositionMultiTokenCandidateGenerator)
    generator.target_model_input_embeddings = lambda ids: ids[..., None]
    generator.assistant_model = lambda inputs_embeds, **_: types.SimpleNamespace(
        logits=draft(inputs_embeds[..., 0]).logits, last_hidden_state=inputs_embeds[..., 1:]
    )
    generator.assistant_model.device = target.device
    generator.num_assistant_tokens, generator.main_model_max_length = case.K, 100
    generator.is_main_model_prefill = True
    seen = types.SimpleNamespace(hidden_states=[torch.zeros(1, 1, 1, dtype=torch.long)], shared_kv_states={})

    def emit(last: int) -> list[int]:
        ids, logits = generator.get_candidates(torch.tensor([[last]]), {}, seen, False, 0)
        scored = target(ids).logits / case.temperature
        return utils._speculative_sampling(ids, logits, case.K, scored)[0][0].tolist()

    return emit, drawn(tempered(case), target)


def spec_bench(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    """Draws drafts, and runs the verification."""
    names = ("LogitsProcessorList", "StoppingCriteriaList", "GreedySearchOutput", "ModelOutput")
    generation = types.SimpleNamespace(**dict.fromkeys(names, object))
    stubs = {"transformers__generation__utils": generation, "transformers__generation__candidate_generator": None}
    module = load_module(files / "model/sps/decoding.py", **stubs)
    target, draft = tables(case)
    propose = drawn(tempered(case), draft)

    def emit(last: int) -> list[int]:
        tokens = [last]
        for _ in range(case.K):
            tokens += propose(tokens[-1])
        ids = torch.tensor([tokens])
        proposed, scored = (x / case.temperature for x in (draft(ids[:, :-1]).logits, target(ids).logits))
        return module._speculative_sampling(ids, proposed, case.K, scored, False, case.K)[0][0].tolist()

    return emit, drawn(tempered(case), target)
