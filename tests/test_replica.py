"""Parts of replicas, and their files."""

from specsamp.replica import Replica, files_of
from support.refusals import refusal


def test_parts_are_disjoint_and_together_everything():
    items = dict.fromkeys([0, 3, 4, 7, 11, 12], "text")
    parts = [Replica.parse(f"{index}/3").part(items, "prompts") for index in range(3)]
    assert [list(part) for part in parts] == [[0, 3, 12], [4, 7], [11]]
    assert (
        Replica.parse(None).part(items, "prompts")
        == Replica.parse("0/1").part(items, "prompts")
        == items
    )


def test_a_replica_with_a_space_is_refused():
    with refusal("0/ 2"):
        Replica.parse("0/ 2")


def test_a_replica_without_a_part_is_refused():
    with refusal("--replica=2/3 has none of the 2 prompts: .*; lower N"):
        Replica(2, 3).part({0: "a", 1: "b"}, "prompts")


def test_replica_files_are_found_beside_the_output(tmp_path):
    path = tmp_path / "a[1].b.jsonl"
    assert files_of(tmp_path / "none" / "a.jsonl") == [] and Replica().file(path) == str(path)
    for name in (
        "a[1].b.jsonl",
        "a[1].b.replica-0-of-2.jsonl",
        "a1.b.jsonl",
        "a[1].b.replica-x.jsonl",
        "c.jsonl",
    ):
        (tmp_path / name).touch()
    assert [one.name for one in files_of(path)] == ["a[1].b.jsonl", "a[1].b.replica-0-of-2.jsonl"]
    assert Replica(0, 2).file(path) == str(files_of(path)[1])
