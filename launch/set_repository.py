"""Writes the address of this checkout's git remote into the notebooks, which install from it on Colab.

    python launch/set_repository.py                            # of the remote "origin"; then commit what changed
    python launch/set_repository.py --remote=upstream
    python launch/set_repository.py --repository=someone/specsamp

A fork runs it once: until then the notebooks, and the links of their README, name nobody's repository.
"""

import pathlib
import re
import subprocess

from absl import flags

from launch.lib import entry
from specsamp import storage

_REMOTE = flags.DEFINE_string("remote", "origin", "Take the address of this remote.")
_REPOSITORY = flags.DEFINE_string(
    "repository", None, "Take this OWNER/NAME on GitHub instead, where git knows no remote."
)

CHECKOUT = pathlib.Path(__file__).parents[1]
NAME = r"[\w.-]+/[\w.-]+"
# What is written over: an address in a notebook's first cell, whose quotes are escaped in the .ipynb, and links to Colab.
PLACES = (
    re.compile(rf'(?<=REPOSITORY = "https://github\.com/){NAME}(?=")'),
    re.compile(rf'(?<=REPOSITORY = \\"https://github\.com/){NAME}(?=\\")'),
    re.compile(rf"(?<=https://colab\.research\.google\.com/github/){NAME}(?=/blob/)"),
)


def main() -> None:
    console = entry.make_console()
    repository = named(_REPOSITORY.value) if _REPOSITORY.value else of_remote(CHECKOUT, _REMOTE.value)
    changed = [path for path in files(CHECKOUT) if write(path, repository)]
    for path in changed:
        console.print(f"{path.relative_to(CHECKOUT)}: {repository}", markup=False)
    told = "commit these" if changed else "all files name it already"
    console.print(f"https://github.com/{repository}: {told}", markup=False)


def files(checkout: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that may name a repository.

    Raises:
      ValueError: this is an installed copy.
    """
    if not (checkout / ".git").exists():
        raise ValueError(f"{checkout} is no checkout of git: run this in a clone, whose remote it reads")
    return sorted(path for ending in ("py", "ipynb", "md") for path in (checkout / "notebooks").glob(f"*.{ending}"))


def named(repository: str) -> str:
    """Returns OWNER/NAME if it is one; raises ValueError otherwise."""
    if not re.fullmatch(NAME, repository):
        raise ValueError(f"--repository={repository}: write OWNER/NAME, as in the address on GitHub")
    return repository


def of_remote(checkout: pathlib.Path, remote: str) -> str:
    """Returns OWNER/NAME of a remote on GitHub.

    Raises:
      ValueError: there is no such remote, or it is elsewhere; with its address.
    """
    asked = ["git", "-C", str(checkout), "remote", "get-url", remote]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"git cannot be run ({error}): give --repository=OWNER/NAME") from error
    if done.returncode:
        raise ValueError(
            f"no remote {remote!r} ({done.stderr.strip()}): push to GitHub first, or give --repository=OWNER/NAME"
        )
    address = done.stdout.strip()
    found = re.search(rf"(?:^|[/@])github\.com[:/]({NAME}?)(?:\.git)?/?$", address)
    if found is None:
        address = re.sub(r"(?<=://)[^/@]*@", "", address)  # where a password or a token may stand
        raise ValueError(
            f"the remote {remote!r} is {address}, not on GitHub: Colab opens nothing else; give --repository=OWNER/NAME"
        )
    return found[1]


def write(path: pathlib.Path, repository: str) -> bool:
    """Writes the repository's name into a file, and returns whether that changed it."""
    before = after = path.read_text(encoding="utf-8")
    for place in PLACES:
        after = place.sub(repository, after)
    if after != before:
        storage.write(path, after)
    return after != before


if __name__ == "__main__":
    entry.run(main)
