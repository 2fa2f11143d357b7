"""Programs kept on disk are found without tracing, and never prevent decoding."""

import dataclasses

import jax
import pytest

from specsamp import NgramDrafter
from specsamp.analysis.workload import Workload, decoders
from specsamp.decoding import kept_loop
from specsamp.decoding.kept_loop import KeptLoop
from specsamp.decoding.method import make_method
from specsamp.jax_names import compilation_cache
from support.fakes import counting_pair

PAIR = counting_pair()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Yields an empty folder for programs, in a process without any. JAX's own cache is off, since
    programs from it are not kept.
    """
    monkeypatch.setattr(kept_loop, "find_compilation_cache", lambda: str(tmp_path))
    monkeypatch.setattr(kept_loop, "_KNOWN", (*kept_loop._KNOWN, "support"))
    monkeypatch.setattr(kept_loop, "_programs", {})
    for is_on in (False, True):
        jax.config.update("jax_enable_compilation_cache", is_on)
        compilation_cache.reset_cache()
        kept_loop._installed.cache_clear()  # its value depends on JAX's settings
        if not is_on:
            yield tmp_path


def decoder(K=3):
    work = Workload(prompt_length=8, max_new_tokens=12, prompts=((3, 4, 5), (9, 10)))
    return decoders(PAIR, {K: make_method(PAIR, draft_length=K)}, work)[K]


def with_kept(plain):
    return dataclasses.replace(
        plain, engine=dataclasses.replace(plain.engine, loop=KeptLoop.of(plain.engine.loop))
    )


def texts(decoder):
    return [decoder.decode(turn).texts for turn in range(2)]


def forget(monkeypatch):
    """Drops all programs that this process has read or compiled, as in a new process."""
    monkeypatch.setattr(kept_loop, "_programs", {})
    kept_loop._installed.cache_clear()


def has_compiled(compiled, expected):
    """Returns whether the texts are as expected, and two programs were compiled."""
    return texts(with_kept(decoder())) == expected and len(compiled) == 2


def traced(monkeypatch):
    """Returns a list that grows with each program that is compiled, and not found on disk."""
    found, compiled = [], kept_loop._compiled
    monkeypatch.setattr(
        kept_loop,
        "_compiled",
        lambda path, lowered: found.append(path.name) or compiled(path, lowered),
    )
    return found


@pytest.mark.slow
def test_second_process_traces_nothing(folder, monkeypatch):
    expected, compiled = texts(decoder()), traced(monkeypatch)
    assert has_compiled(compiled, expected)
    assert sorted(compiled) == sorted(path.name for path in folder.iterdir())
    forget(monkeypatch)
    assert has_compiled(compiled, expected)
    assert texts(with_kept(decoder(K=2))) == texts(decoder(K=2))
    assert len(compiled) == 4  # another K is another program


def test_outdated_kept_program_is_replaced(folder, monkeypatch):
    expected, compiled = texts(decoder()), traced(monkeypatch)
    texts(with_kept(decoder()))
    for name in ("source_digest", "cpu_flags", "host_facts"):
        forget(monkeypatch)
        monkeypatch.setattr(kept_loop.machine, name, lambda *_: "another")
        compiled.clear()
        assert has_compiled(compiled, expected), name
    forget(monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", "--xla_another")
    compiled.clear()
    assert has_compiled(compiled, expected)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-1], lambda whole: b"", lambda whole: b"x" + whole[1:]]
)
def test_a_damaged_file_is_compiled_anew(folder, monkeypatch, damage):
    expected = texts(with_kept(decoder()))
    for path in folder.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    forget(monkeypatch)
    compiled = traced(monkeypatch)
    assert has_compiled(compiled, expected)
    forget(monkeypatch)
    assert has_compiled(compiled, expected)


@pytest.mark.slow
def test_program_of_the_jax_cache_is_not_kept(folder, monkeypatch):
    """A CPU program that XLA read and wrote again lacks code, and fails in the next process."""
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    expected = texts(decoder())
    for _ in range(2):  # the first pass fills JAX's cache, unless an earlier test has
        for path in folder.iterdir():
            path.unlink()
        forget(monkeypatch)
        jax.clear_caches()
        assert texts(with_kept(decoder())) == expected
    assert not list(folder.iterdir())


def test_full_disk_does_not_prevent_decoding(folder, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_loop.storage, "write", full)
    assert texts(with_kept(decoder())) == texts(decoder())
    assert not list(folder.iterdir())


def test_unkeepable_program_still_runs(folder, monkeypatch):
    loop = decoder().engine.loop
    assert isinstance(KeptLoop.of(loop), KeptLoop)
    with jax.disable_jit():
        assert KeptLoop.of(loop) is loop

    @dataclasses.dataclass(frozen=True, repr=False)
    class Unnamed(NgramDrafter):
        __repr__ = object.__repr__  # an address, which differs between processes

    unnamed = dataclasses.replace(loop, drafter=Unnamed(2))
    assert KeptLoop.of(unnamed) is unnamed
    monkeypatch.setattr(kept_loop, "find_compilation_cache", lambda: None)
    assert KeptLoop.of(loop) is loop


class Own(NgramDrafter):
    """A drafter whose file is none of the package's."""


def test_loop_with_foreign_class_is_not_kept(folder):
    loop = decoder().engine.loop
    assert not isinstance(KeptLoop.of(dataclasses.replace(loop, drafter=Own(3))), KeptLoop)
    assert isinstance(KeptLoop.of(dataclasses.replace(loop, drafter=NgramDrafter(3))), KeptLoop)
