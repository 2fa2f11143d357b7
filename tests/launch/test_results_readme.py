"""The texts that show measured numbers are what launch/studies/results_readme.py makes of the committed files."""

import copy
import pathlib
import re

import pytest

from configs.hf import HEADS, PAIRS
from support.run_script import module

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *(ROOT / folder / "README.md" for folder in ("launch", "notebooks", "notebooks/results"))]


@pytest.fixture(scope="module")
def script():
    return module("studies/results_readme")


def test_the_committed_page_is_what_the_command_makes(script):
    committed = (ROOT / "notebooks/results/README.md").read_text(encoding="utf-8")
    assert committed == script.page(script.read()), "run launch/studies/results_readme.py, see its first lines"


def test_the_numbers_of_the_main_readme_are_those_of_the_files(script):
    text, documents = README.read_text(encoding="utf-8"), script.read()
    assert script.headline(documents) in text and script.summary(documents) in text
    changed = copy.deepcopy(documents)  # the control: another measurement is another table
    for point in changed["python_pair_speedup"]["curves"]["greedy"]["points"]:
        point["speedup"]["median"] += 0.1
    assert script.headline(changed) not in text and script.summary(changed) not in text


def test_every_result_has_its_section(script):
    """A file that is added to notebooks/results appears on the page."""
    named = {name for section in script.SECTIONS for name in section.files}
    assert named == {path.stem for path in (ROOT / "notebooks/results").glob("*.json")}


def test_commands_that_measure_again_name_scripts_that_are_there(script):
    shown = re.findall(r"  - `python (\S+\.py) ", script.page(script.read()))
    assert len(shown) > 15 and not [path for path in shown if not (ROOT / path).is_file()]


def test_the_main_readme_takes_the_time_of_a_coffee_and_its_links_lead_somewhere():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
        assert links
        for path, heading in links:
            target = page.parent / path if path else page
            assert target.exists(), (page, path)
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


def test_commands_of_the_readmes_name_files_that_are_there():
    for page in (README, ROOT / "launch/README.md"):
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"\b((?:launch|configs)/[\w/]+\.(?:py|sh))", text)
        paths += re.findall(r"\b(specsamp/[\w/]+(?:\.py)?)\b", text)
        paths = [path for path in paths if path != "specsamp/xla" and "NAME" not in path]  # the cache, and placeholders
        assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_public_pairs_of_the_readme_are_those_of_their_configuration():
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\S+) \| (\S+) \| (\d+) \|$", (ROOT / "launch/README.md").read_text(), re.MULTILINE
    )
    assert rows == [
        (name, pair.target, pair.draft, str(pair.model_parallelism)) for name, pair in (PAIRS | HEADS).items()
    ]


def test_every_study_is_in_the_table_of_its_readme():
    text = (ROOT / "launch/README.md").read_text(encoding="utf-8")
    commands = [
        path for path in (ROOT / "launch/studies").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    ]
    assert len(commands) > 7 and not [path.name for path in commands if f"`{path.name}`" not in text]


def test_flags_of_the_commands_in_the_readmes_are_flags_of_those_commands():
    sharing = ("entry", "config", "price", "tracing")
    shared = "".join((ROOT / f"launch/lib/{name}.py").read_text(encoding="utf-8") for name in sharing)
    checked = 0
    for page in PAGES:
        for script, arguments in re.findall(r"python (launch/\S+\.py)([^\n`]*)", page.read_text(encoding="utf-8")):
            if "NAME" in script:
                continue
            source = (ROOT / script).read_text(encoding="utf-8") + shared
            for flag in re.findall(r" --(\w+)", arguments):
                assert flag == "config" or f'"{flag}"' in source, (page.name, script, flag)
                checked += 1
    assert checked > 60
