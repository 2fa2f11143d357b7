"""Marks text by who wrote it: in colours, or in brackets where there are none."""

from rich.text import Text

DRAFTED, OWN, PROMPT = "green", "black on yellow", "dim"
BRACKETS = "⟦", "⟧"


def own(piece: str, coloured: bool) -> Text:
    """Returns a token of the target: on a background, or in brackets. Line breaks keep the background off the margin."""
    if not coloured:
        return Text(f"{BRACKETS[0]}{piece}{BRACKETS[1]}")
    head, line_break, tail = piece.partition("\n")
    return Text.assemble((head + ("↵" if line_break else ""), OWN), line_break, (tail, OWN))
