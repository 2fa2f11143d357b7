"""Makes acceptance rules from the words of configurations, such as "block", "ears:0.3" or
"bounded:0.01:typical".

A lossy rule's constants follow its name, in the order of its fields; missing constants have their
defaults. The kind of siblings follows the name of a rule for token trees: "recursive", or
"traversal:top".
"""

import dataclasses

from launch.lib.own_code import evaluate, is_own
from specsamp import (
    EARS,
    BlockRule,
    Bounded,
    CoupledRule,
    JointThreshold,
    KSeqRule,
    Lenience,
    RecursiveRule,
    Rule,
    TokenRule,
    TraversalRule,
    Typical,
    validate,
)

RULES = {"token": TokenRule, "block": BlockRule, "coupled": CoupledRule}
TREES = {"recursive": RecursiveRule, "traversal": TraversalRule, "kseq": KSeqRule}
BOUNDED = "bounded"
LOSSY = {
    "ears": EARS,
    "lenience": Lenience,
    "typical": Typical,
    "joint": JointThreshold,
    BOUNDED: Bounded,
}
KNOWN = RULES | TREES | LOSSY


def make_rule(word: str) -> Rule:
    """Returns the rule of a word, or of ``FILE.py:EXPRESSION``."""
    if is_own(str(word)):
        return evaluate("--config.rule", word, Rule)
    name, *constants = str(word).split(":")
    rule = KNOWN[validate.choice("rule", name, KNOWN)]
    if name in TREES and len(constants) <= 1:
        return rule(*constants)
    if name == BOUNDED:
        if len(constants) < 2:
            raise ValueError(
                f"rule {word!r} needs a budget and a lossy rule, such as bounded:0.01:ears:1.0"
            )
        return Bounded(make_rule(":".join(constants[1:])), _number(word, constants[0]))
    most = sum(field.compare for field in dataclasses.fields(rule))
    if len(constants) > most:
        raise ValueError(f"rule {word!r}: {name} takes {most or 'no'} constants after colons")
    return rule(*(_number(word, constant) for constant in constants))


def _number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"rule {word!r}: {text!r} is no number") from error
