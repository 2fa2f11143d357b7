"""The study of rounds: what it draws is what the loop writes."""

from launch.lib import study
from launch.studies import rounds
from specsamp import chain, generate, temperature, top_p
from specsamp.analysis.figures import to_png
from support import extras
from support.byte_tokenizer import ByteTokenizer
from support.fakes import table_pair


@extras.needs("matplotlib")
def test_the_committed_rounds_are_drawn_and_show_every_outcome():
    document = study.read_result("one_round")
    assert to_png(rounds.draw(document)).startswith(b"\x89PNG")
    assert {rounds.of_target(one, document["K"]) for one in document["rounds"]} == {"bonus", "correction"}


class Letters(ByteTokenizer):
    """Twelve letters, none of which ends a text."""

    vocab_size, eos_id = 12, None

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(token + ord("a")) for token in tokens)


def test_rounds_that_are_drawn_are_those_that_the_loop_writes():
    pair = table_pair(tokenizer=Letters())
    decoded = rounds.decode(pair, "abc", 2, 0, 8)["rounds"]
    written = "".join("".join(t["text"] for t in one["drafted"][: one["accepted"]]) + one["last"] for one in decoded)
    warp = chain(temperature(rounds.TEMPERATURE), top_p(rounds.TOP_P))
    (text,) = generate(pair, ["abc"], 24, sampling=warp, draft_length=2)
    assert text.text.startswith(written) and text.stats.rounds >= 8
    assert 0 < sum(one["accepted"] for one in decoded) < 16  # some are accepted, some are not
