"""Splits work over replicas: runs with queues and files of their own, in a folder that
they share.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import TypeVar

from etils import epath

from specsamp import storage

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Replica:
    """Run ``index`` of ``count``; the default is a run that takes everything."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Replica:
        """Returns the replica of "i/N", counted from 0, or of None, the run that takes everything.

        Raises:
          ValueError: the text has another form.
        """
        if text is None:
            return cls()
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None or not int(found[1]) < int(found[2]):
            raise ValueError(f"--replica={text} must be i/N with 0 <= i < N, such as 0/2 and 1/2")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def is_whole(self) -> bool:
        """Returns whether it takes everything."""
        return self.count == 1

    def part(self, items: Mapping[int, T], name: str) -> dict[int, T]:
        """Returns the items whose id is ``index`` modulo ``count``.

        Args:
          items: by their ids.
          name: what they are, for the message.

        Raises:
          ValueError: there are none.
        """
        found = {id: item for id, item in items.items() if id % self.count == self.index}
        if not found:
            raise ValueError(
                f"--replica={self} has none of the {len(items)} {name}: no id leaves {self.index} "
                f"when it is divided by {self.count}; lower N"
            )
        return found

    def file(self, path: str | os.PathLike) -> str:
        """Returns the replica's own file for ``path``: "a.replica-0-of-2.json" for "a.json"."""
        if self.is_whole:
            return os.fspath(path)
        place = storage.place(path)
        part = f"replica-{self.index}-of-{self.count}"
        return os.fspath(place.with_name(f"{place.stem}.{part}{place.suffix}"))


def files_of(path: str | os.PathLike) -> list[epath.Path]:
    """Returns ``path`` and the files of its replicas, if they exist, in order of their names."""
    path = storage.place(path)
    if not path.parent.is_dir():
        return []
    name = rf"{re.escape(path.stem)}(\.replica-[0-9]+-of-[0-9]+)?{re.escape(path.suffix)}"
    return sorted(one for one in path.parent.iterdir() if re.fullmatch(name, one.name))
