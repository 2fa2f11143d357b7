"""Verifiers of trees: two children of the root, each with its own continuation."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import torch

from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit, load_module
from launch.studies.conformance.torch_tables import drawn, tables, tempered


def paths(draft: Any, last: int, width: int, depth: int) -> Any:
    """Returns ``[width, depth + 1]``: the draft's ``width`` most probable children of ``last``, each continued greedily."""
    rows = []
    for child in draft.rows[last].topk(width).indices.tolist():
        rows.append([last, child])
        while len(rows[-1]) <= depth:
            rows[-1].append(draft.rows[rows[-1][-1]].argmax().item())
    return torch.tensor(rows)


def eagle(files: pathlib.Path, case: Case, *, width: int) -> tuple[Emit, Emit]:
    """Runs `evaluate_posterior` on the most probable drafts, and draws the token that follows as they do."""
    module = load_module(files / "eagle/model/utils.py")
    target, draft = tables(case)
    processor = module.prepare_logits_processor(case.temperature, top_p=case.top_p, top_k=case.top_k)

    def emit(last: int) -> list[int]:
        candidates = paths(draft, last, width, case.K)
        best, accepted, weights = module.evaluate_posterior(target.rows[candidates], candidates, processor)
        return [*candidates[best, 1 : accepted + 1].tolist(), torch.multinomial(weights, 1).item()]

    return emit, drawn(lambda logits: processor(None, logits).softmax(-1), target)


def medusa(files: pathlib.Path, case: Case, *, sampling: str) -> tuple[Emit, Emit]:
    """Runs `generate_candidates` and `evaluate_posterior`; heads are the draft's logits after the last token."""
    module = load_module(files / "medusa/model/utils.py")
    module.TOPK, fast = 2, sampling == "typical"
    target, draft = tables(case)
    settings = {"temperature": case.temperature, "top_p": case.top_p, "sampling": sampling, "fast": fast}
    nodes = torch.arange(1 + 2 * case.K)
    retrieve = torch.tensor([[0, *range(first, 1 + 2 * case.K, 2)] for first in (1, 2)])

    def emit(last: int) -> list[int]:
        heads = draft.rows[last].expand(case.K, 1, 1, -1)
        candidates = module.generate_candidates(heads, target.rows[last][None, None], nodes, retrieve, **settings)[0]
        best, accepted = module.evaluate_posterior(target.rows[candidates], candidates, **settings)
        return candidates[best, : accepted + 1].tolist()

    if fast:
        return emit, drawn(tempered(case), target)
    plain = module.get_nucleus_one_token
    return emit, lambda last: plain(target.rows[last][None].clone(), case.temperature, case.top_p)[0].tolist()


def sequoia(files: pathlib.Path, case: Case, *, width: int) -> tuple[Emit, Emit]:
    """Runs their draws without replacement and `accept_step`; the walk down the tree is ours."""
    stubs = {"Tree": types.SimpleNamespace(), "Tree__Tree": types.SimpleNamespace(Tree=object), "Engine__Engine": None}
    utils = load_module(files / "utils.py")
    module = load_module(files / "Tree/SpecTree.py", utils=utils, **stubs)
    target, draft = tables(case)

    def emit(last: int) -> list[int]:
        tree = object.__new__(module.SpecTree)
        tree.ground_truth_len, tree.temperature, tree.dtype = 1, case.temperature, torch.float64
        tree.residual_graph, tree.Successors = utils.get_residual, [[] for _ in range(1 + width * case.K)]
        tree.tokens, tree.r, parent = torch.full((1 + width * case.K,), last), torch.rand(1 + width * case.K), 0
        for depth in range(case.K):
            children = range(1 + width * depth, 1 + width * (depth + 1))
            rows, noise = draft.rows[tree.tokens[parent]], torch.rand(len(case.draft))
            tree.tokens[list(children)] = utils.sampling_without_replacement(rows, noise, width, case.temperature)
            tree.Successors[parent], parent = list(children), children[0]
        logits = utils.get_sampling_logits(target.rows[tree.tokens].clone(), case.top_p, case.temperature)
        tree.target_logits = torch.softmax(logits / case.temperature, -1)
        tree.draft_logits = draft.rows[tree.tokens].clone()
        place, tokens = 0, []
        while True:
            found, residual = tree.accept_step(place)
            if found == -1:
                return [*tokens, residual.multinomial(num_samples=1, replacement=True).item()]
            place = found
            tokens.append(tree.tokens[place].item())

    def weights(logits: Any) -> Any:
        cut = utils.get_sampling_logits(logits, case.top_p, case.temperature)
        return torch.softmax(cut / case.temperature, -1)

    return emit, drawn(weights, target)
