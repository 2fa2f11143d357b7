"""The joint distribution of completions, over several rounds and ragged rows, equals enumeration.

sampling/test_rules.py enumerates rules for all drafts. Three tokens after drafts of two also take
several rounds, in half the time of four after three.
"""

import numpy as np

from specsamp import ModelDrafter, TokenRule, chain, min_p, temperature, top_k
from support.fakes import (
    FALSE_ALARM,
    TableLM,
    decode,
    joint_distribution,
    p_value,
    samples_for,
    table_loop,
)
from support.loop_distributions import (
    FAR,
    FULL,
    NEAR,
    PROMPTS,
    TARGET,
    V,
    cut_at_stop,
    distribution_test,
)


def model(K):
    return ModelDrafter(TableLM(V), K)


def test_texts_have_the_distribution_of_the_target():
    """test_pairs.py covers further drafters, rules, warps and lengths."""
    loop = table_loop(TokenRule(), model(4))
    sampling = chain(temperature(1.5), top_k(2))
    assert distribution_test(loop, FAR, sampling, length=4) > FALSE_ALARM


def test_rows_with_parameters_of_their_own():
    """In one batch, a greedy row is certain and sampled rows keep their distributions."""
    temperatures, prompts = [0.0, 0.7, 1.5], [[1, 2], *PROMPTS]
    sampling = chain(temperature(temperatures), min_p([0.0, 0.1, 0.0]))
    loop = table_loop(TokenRule(), ModelDrafter(TableLM(V), 2))
    run = decode(loop, TARGET, NEAR, prompts, 3, sampling, samples=samples_for(V**3 - 1, 2))
    emitted = run.emitted(3).reshape(3, -1, 3)
    alone = [chain(temperature(t), min_p(p)) for t, p in zip(temperatures, [0.0, 0.1, 0.0])]
    distributions = [
        joint_distribution(TARGET, warp, prompt, 3) for warp, prompt in zip(alone, prompts)
    ]
    assert distributions[0].max() == 1
    assert np.all(emitted[0] == np.argwhere(distributions[0] == 1)[0])
    assert p_value(list(zip(emitted[1:], distributions[1:]))) > FALSE_ALARM


def test_stop_token_inside_a_block():
    """Completions have the distribution of texts that are cut after the stop token 0."""
    length, stop = 3, 0
    loop = table_loop(TokenRule(), ModelDrafter(TableLM(V), 2))
    run = decode(
        loop,
        TARGET,
        NEAR,
        [[1, 2]],
        length,
        FULL,
        samples=samples_for(V**3 - 1, 1),
        stop_ids=(stop,),
    )
    emitted, distribution = cut_at_stop(run, joint_distribution(TARGET, FULL, [1, 2], length), stop)
    assert p_value([(emitted, distribution)]) > FALSE_ALARM
