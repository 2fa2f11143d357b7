"""Loops in torch and NumPy, each in a checkout of its repository."""

from __future__ import annotations

import functools
import pathlib
import types
from unittest import mock

import numpy as np
import torch
from scipy import special

from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit, load_module
from launch.studies.conformance.torch_tables import drawn, tables


def gpt_fast(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    module = load_module(files / "generate.py", files, model=None, tokenizer=None)
    settings = {"temperature": case.temperature, "top_k": case.top_k or None}
    target, draft = (lambda x, position, table=table: table(x).logits for table in tables(case))
    one, cat = module.decode_one_token, torch.cat

    def step(model, x, position, **kwargs):
        token, probabilities = one(model, x, position, **kwargs)
        return token.view(1, 1), probabilities[0]

    module.decode_one_token = step

    def emit(last: int) -> list[int]:
        with mock.patch.object(torch, "cat", lambda tensors: cat([x.flatten() for x in tensors])):
            return module.speculative_decode(target, draft, torch.tensor([last]), 0, case.K, **settings).tolist()

    return emit, lambda last: module.sample(target(torch.tensor([[last]]), None), **settings)[0].flatten().tolist()


def lucidrains(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    module = load_module(
        files / "speculative_decoding/speculative_decoding.py", beartype=types.SimpleNamespace(beartype=lambda f: f)
    )
    settings = {"temperature": case.temperature, "filter_thres": 0.0}
    batch, calls = len(case.temperatures), []

    def network(table, rounds=0):
        def run(x, seq_start_pos=None, cache=None, return_cache=True):
            calls.append(rounds)
            if rounds and calls.count(1) > case.K:  # the next round drafts: the first is over
                raise EndOfRound([row[start + 1 :].tolist() for row, start in zip(x, seq_start_pos, strict=True)])
            return table(x).logits, (torch.zeros(len(x), 1, 1, x.shape[1], 1), None)

        return run

    target, draft = (network(table, rounds) for rounds, table in enumerate(tables(case)))

    def emit(last: int) -> list[int]:
        calls.clear()
        try:
            module.speculative_decoding(target, draft, torch.full((batch, 1), last), 99, gamma=case.K, **settings)
        except EndOfRound as end:
            return end.args[0][case.row]

    return emit, lambda last: module.base_decoding(target, torch.tensor([[last]]), 2, **settings)[0].tolist()


class EndOfRound(Exception):
    """Ends a loop after its first round, with the texts of its rows."""


def jaymody(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    softmax = functools.partial(special.softmax, axis=-1)
    gpt2 = types.SimpleNamespace(gpt2=lambda inputs, table, n_head: table[inputs], softmax=softmax)
    module = load_module(files / "main.py", gpt2=gpt2, utils=None, tqdm=None)
    target, draft = (
        module.create_model_fn({"table": table}, {"n_head": 1}, case.temperature) for table in (case.target, case.draft)
    )
    return (
        lambda last: module.speculative_sampling(np.array([last]), draft, target, 1, case.K)[1:],
        lambda last: module.autoregressive_sampling(np.array([last]), target, 1)[1:],
    )


def feifeibear(files: pathlib.Path, case: Case, *, name: str) -> tuple[Emit, Emit]:
    module = load_module(files / "sampling/speculative_sampling.py", files, globals=None)
    module.tqdm = functools.partial(module.tqdm, disable=True)
    settings = {"temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p if case.top_p < 1 else 0}
    target, draft = (_cached(table) for table in tables(case, shift=1))

    def emit(last: int) -> list[int]:
        function = getattr(module, name)
        out = function(torch.tensor([[last + 1]]), draft, target, 1, gamma=case.K, **settings)
        return [token - 1 for token in out[0, 1:].tolist()]

    plain = drawn(lambda logits: module.norm_logits(logits, **settings), target)
    return emit, lambda last: [token - 1 for token in plain(last + 1)]


def _cached(table):
    """Returns a table whose cache holds as many positions as it has seen."""
    forward = table.forward

    def run(input_ids, past_key_values=None, **_):
        seen = past_key_values[0][0].shape[2] if past_key_values else 0
        keys = torch.zeros(1, 1, seen + input_ids.shape[1], 1)
        out = forward(input_ids)
        out.past_key_values = [(keys, keys)]
        return out

    table.forward = run
    return table


def romsto(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    module = load_module(files / "sampling/speculative_decoding.py", files, utils__printing=None)
    processors = load_module(files / "utils/logits_processor.py")
    processor = processors.MultinomialProcessor(case.temperature)
    if case.top_k:
        processor = processors.TopKProcessor(case.temperature, case.top_k)
    if case.top_p < 1:
        processor = processors.NucleusProcessor(case.temperature, case.top_p)
    target, draft = tables(case)
    settings = {"gamma": case.K, "logits_processor": processor, "max_gen_len": case.K + 1, "eos_tokens_id": -1}

    def emit(last: int) -> list[int]:
        return module.speculative_generate([last], draft, target, first_target=False, **settings)[0]

    return emit, drawn(processor, target)


def layer_skip(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    module = load_module(files / "self_speculation/self_speculation_generator.py", files, colorama=None)
    target, draft = tables(case)

    def out(table):
        return lambda model, ids, *_: types.SimpleNamespace(**vars(table(ids)), exit_query_cache=None)

    module.forward_early, module.forward_remainder = out(draft), out(target)
    module.crop_past_key_values = lambda past, length: past
    strategy = module.SelfSpeculativeGenerationStrategy()
    warp = {"sample": True, "temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p}
    settings = {"num_speculations": case.K, "past_key_values": None, "eos_token_ids": [], "calls": 0, "exit_layer": 1}

    def emit(last: int) -> list[int]:
        tokens: list[int] = []
        given = {"input_ids": torch.tensor([[last]]), "input_ids_list": [last], "output_ids": tokens}
        strategy.single_step_speculation(model=None, **given, **settings, **warp)
        return tokens

    def plain(last: int) -> list[int]:
        logits = target(torch.tensor([[last]])).logits
        return module.decode_next_token(logits, token_idx=-1, **warp)[0].flatten().tolist()

    return emit, plain


def deep_spec(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    stubs = {"deepspec__utils__sampling": load_module(files / "deepspec/utils/sampling.py"), "deepspec__utils": None}
    module = load_module(files / "deepspec/eval/base_evaluator.py", files, deepspec__data__parser=None, **stubs)
    target, draft = tables(case)
    settings = {"temperature": case.temperature, "max_proposal_tokens": case.K, "past_key_values_target": None}
    settings |= {"position_ids": torch.arange(100)[None], "start": 0, "target_model": target}

    def weights(table: torch.nn.Module, last: int) -> torch.Tensor:
        return module.logits_to_probs(table(torch.tensor([[last]])).logits, case.temperature)

    def emit(last: int) -> list[int]:
        tokens, rows = [last], []
        for _ in range(case.K):
            rows.append(weights(draft, tokens[-1]))
            tokens.append(module.sample_from_probs(rows[-1]).item())
        drafted = {"verify_input_ids": torch.tensor([tokens]), "draft_probs": torch.cat(rows, 1)}
        proposal = module.DraftProposal(draft_token_count=case.K, **drafted)
        return module.verify_draft_tokens(proposal=proposal, **settings).committed_tokens[0].tolist()

    return emit, lambda last: module.sample_from_probs(weights(target, last))[0].tolist()


def dflash(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    module = load_module(files / "dflash/model.py")
    target, draft = tables(case)
    forward = target.forward

    def scored(input_ids, *_, **__):
        out = forward(input_ids)
        out.hidden_states = [torch.zeros(1, input_ids.shape[1], 1)] * 2
        return out

    def block_model(noise_embedding, **_):  # the draft's logits along its own argmax
        rows = [draft(noise_embedding[:, :1]).logits]
        for _ in range(case.K):
            rows.append(draft(rows[-1].argmax(-1)).logits)
        return torch.cat(rows[:1] + rows[:-1], 1)

    target.forward, target.lm_head = scored, lambda logits: logits
    target.model = types.SimpleNamespace(embed_tokens=lambda block: block)
    block_model.target_layer_ids = [0]
    settings = {"stop_token_ids": None, "temperature": case.temperature, "block_size": case.K + 1, "mask_token_id": 0}

    def emit(last: int) -> list[int]:
        ids = torch.tensor([[last]])
        return module.dflash_generate(block_model, target, ids, min(case.count, 2), **settings)[0, 1:].tolist()

    def plain(last: int) -> list[int]:
        return module.sample(forward(torch.tensor([[last]])).logits, case.temperature)[0].tolist()

    return emit, plain
