"""The reading of scheduled HLO, on a program small enough to count by hand."""

import dataclasses
import functools
import pathlib

import pytest

from specsamp import storage
from specsamp.tpu.pair_report import Report
from specsamp.tpu.program import Program
from specsamp.tpu.schedules import Schedule
from specsamp.tpu.topology import CHIPS
from specsamp.tpu.traffic import traffic_of
from support.refusals import refused_calls

PROGRAM = pathlib.Path(__file__).with_name("hand_counted.hlo").read_text()


def test_bytes_of_a_program_counted_by_hand():
    traffic = traffic_of(PROGRAM)
    rows = 2 * 8 * 2  # a gather reads its rows, not the table
    prefetches = 4 * 16 * 4 + 10 * 8 * 2
    per_iteration = 2 * 4  # the counter, by the broadcast and by the fusion: it lies in HBM
    copied = 4_000_000
    assert traffic.read == rows + prefetches + 5 * per_iteration + copied
    assert traffic.written == 5 * 16 * 4 + copied  # an update in place writes the update
    assert traffic.cycles == 5 * 100
    assert traffic.parts == [
        (5 * (per_iteration + 16 * 4), 5 * 100),
        (rows + prefetches + 2 * copied, 0),
    ]
    assert traffic.collectives == {"all-reduce": 5}
    assert traffic.collective_bytes == {"all-reduce": 5 * 64}
    assert traffic.copies == [("jit(f)/score/copy", 4_000_000)]
    assert traffic.host_transfers == 0


def test_loop_under_a_prefetch_counts_once():
    """The prefetch streams while the loop computes, so a sum of both would be no lower bound."""
    done = next(line for line in PROGRAM.splitlines() if "%copy-done.1 =" in line)
    later = PROGRAM.replace(f"{done}\n", "").replace("  %out =", f"{done}\n  %out =")
    whole = traffic_of(later)
    assert whole.parts == [(whole.bytes, whole.cycles)] and whole.cycles == 5 * 100


def test_parts_of_a_program_do_not_overlap():
    chip = CHIPS["v5e"]
    second_of_each = [(chip.hbm_bytes_per_second, 0.0), (0.0, chip.clock_hz)]
    program = functools.partial(
        Program,
        name="round",
        tokens=1,
        floor_bytes=1.0,
        live_floor_bytes=1.0,
        memory=None,
        out_of_memory=None,
        hbm_bytes=chip.hbm_bytes_per_second,
        cycles=chip.clock_hz,
    )
    assert program().lower_bound_ms(chip) == pytest.approx(1000)
    assert program(parts=second_of_each).lower_bound_ms(chip) == pytest.approx(2000)


def test_round_calls_take_at_least_their_parts():
    path = "notebooks/results/compile_llama_70b_v5e.json"
    report = Report.from_json(storage.read_json(path)["report"])
    whole = report["round"]
    parts = [(whole.hbm_bytes, 0.0), (0.0, whole.cycles)]
    programs = [
        dataclasses.replace(one, parts=parts if one is whole else ()) for one in report.programs
    ]
    report = dataclasses.replace(report, programs=tuple(programs))
    calls = report.works("round")
    busy = [max(call.streaming_ms, call.cycles_ms) for call in calls]
    bound = whole.streaming_ms(report.chip) + whole.cycles_ms(report.chip)
    assert len(calls) == 5 and sum(busy) == pytest.approx(bound)


def entry(*lines, parameters="p0: f32[1000,1000], p1: f32[1,1000], p2: s32[]", before=""):
    """Returns a program with these lines after three parameters, of which p0 is in HBM."""
    return (
        f"""{before}
ENTRY %main ({parameters}) -> f32[] {{
  %p0 = f32[1000,1000]{{1,0}} parameter(0)
  %p1 = f32[1,1000]{{1,0:S(1)}} parameter(1)
  %p2 = s32[]{{:S(6)}} parameter(2)
"""
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def fused(name, *lines):
    parameters = (
        "%a = f32[1000,1000]{1,0} parameter(0)",
        "%b = f32[1,1000]{1,0:S(1)} parameter(1)",
        "%c = s32[]{:S(6)} parameter(2)",
    )
    inner = "".join(f"  {line}\n" for line in (*parameters, *lines))
    return f"%{name} (a: f32[1000,1000], b: f32[1,1000], c: s32[]) -> f32[] {{\n{inner}}}\n"


MADE = "%z = f32[1000,1000]{1,0} broadcast(%c), dimensions={}"
UPDATE = "%u = f32[1000,1000]{1,0} dynamic-update-slice(%a, %b, %c, %c)"


@pytest.mark.parametrize(
    "inner, result, read, written",
    [
        ([f"ROOT {UPDATE}"], "f32[1000,1000]{1,0}", 0, 4_000),
        # Two rows in turn.
        (
            [UPDATE, f"ROOT {UPDATE}".replace("%u", "%v").replace("%a", "%u")],
            "f32[1000,1000]{1,0}",
            0,
            8_000,
        ),
        # The updated array is used further, so all of it is read.
        (
            [UPDATE, "ROOT %r = f32[1000]{0} reduce(%u, %c), dimensions={0}"],
            "f32[1000]{0}",
            4_000_000,
            4_000,
        ),
        # Not in place: the updated array is made here, and written whole.
        ([MADE, f"ROOT {UPDATE}".replace("%a", "%z")], "f32[1000,1000]{1,0}", 0, 4_000_000),
    ],
)
def test_updates_in_a_fusion(inner, result, read, written):
    line = f"ROOT %f = {result} fusion(%p0, %p1, %p2), kind=kLoop, calls=%inner"
    traffic = traffic_of(entry(line, before=fused("inner", *inner)))
    assert (traffic.read, traffic.written) == (read, written)


@pytest.mark.parametrize(
    "view",
    [
        "bitcast(%a)",
        "fusion(%a), kind=kLoop, calls=%view, output_to_operand_aliasing={{}: (0, {})}",
    ],
)
def test_nested_fusion_reads_only_its_slice(view):
    """The TPU compiler reads one expert of many in this way; the controls read the whole table."""
    view_of = fused("view", "ROOT %w = f32[1000,1000]{1,0} copy(%a)")
    slicing = [
        f"%v = f32[1000,1000]{{1,0}} {view}",
        "ROOT %s = f32[1,1000]{1,0} dynamic-slice(%v, %c, %c)",
    ]
    line = "ROOT %f = f32[1,1000]{1,0:S(1)} fusion(%p0, %p1, %p2), kind=kOutput, calls=%outer"

    def read(*inner):
        nested = "%f = f32[1,1000]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%inner"
        outer = fused("outer", nested, "ROOT %n = f32[1,1000]{1,0} negate(%f)")
        return traffic_of(entry(line, before=view_of + fused("inner", *inner) + outer)).read

    assert read(*slicing) == 4_000
    assert read("ROOT %s = f32[1,1000]{1,0} reduce(%a, %c), dimensions={0}") == 4_000_000
    assert read("ROOT %s = f32[1000,1000]{1,0} bitcast(%a)") == 4_000_000


def test_expert_loop_counts_its_expected_steps():
    scope = 'metadata={op_name="jit(f)/experts_3_tokens_2_of_8_here_8_blocks_of_3/while"}'
    loop = "condition=%condition, body=%body"
    by_data = PROGRAM.replace("constant(5)", "parameter(1)")
    once = traffic_of(by_data)
    named = traffic_of(by_data.replace(loop, f"{loop}, {scope}"))
    times = 8 * (1 - (1 - 2 / 8) ** 3)
    assert named.open_loops == 0 and once.open_loops == 1
    assert named.cycles == pytest.approx(100 * times) and once.cycles == 100
    # A constant bound takes precedence.
    assert traffic_of(PROGRAM.replace(loop, f"{loop}, {scope}")).cycles == 500


def test_asynchronous_collective_counts_its_final_bytes():
    """The type of its start also contains its operand and two flags."""
    both = "f32[1000,1000]{1,0}, f32[1000,1000]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}"
    traffic = traffic_of(
        entry(
            f"%s = ({both}) collective-permute-start(%p0), source_target_pairs={{{{0,1}}}}",
            "ROOT %d = f32[1000,1000]{1,0} collective-permute-done(%s)",
        )
    )
    assert traffic.collective_bytes == {"collective-permute": 4_000_000}
    assert (traffic.read, traffic.written) == (4_000_000, 4_000_000)


def test_copy_through_chip_memory_is_counted():
    lines = (
        "%s = (f32[1000,1000]{1,0:S(3)}, f32[1000,1000]{1,0}, u32[]{:S(2)}) copy-start(%p0)",
        "%d = f32[1000,1000]{1,0:S(3)} copy-done(%s)",
    )
    assert traffic_of(entry(*lines)).copies == []  # a prefetch
    copied = traffic_of(entry(*lines, "ROOT %c = f32[1000,1000]{1,0} copy(%d)"))
    assert copied.copies == [("c", 4_000_000)] and copied.read == copied.written == 4_000_000
    # A result computed on the chip is written, not copied.
    changed = "%m = f32[1000,1000]{1,0:S(3)} negate(%d)"
    assert traffic_of(entry(*lines, changed, "ROOT %c = f32[1000,1000]{1,0} copy(%m)")).copies == []


def test_every_branch_is_searched_for_copies():
    """The branch with the most bytes counts; a copy and a transfer in another branch are found."""
    branches = (
        fused(
            "most",
            "%x = f32[1000,1000]{1,0} negate(%a)",
            "ROOT %y = f32[1000,1000]{1,0} negate(%x)",
        ),
        fused(
            "other",
            "%s = (f32[1,1000]{1,0}, u32[]) send(%b), is_host_transfer=true",
            "%t = token[] send-done(%s), is_host_transfer=true",
            "ROOT %x = f32[1000,1000]{1,0} copy(%a)",
        ),
    )
    line = (
        "ROOT %c = f32[1000,1000]{1,0} conditional(%p2, %p0, %p0), branch_computations={%other, "
        "%most}"
    )
    traffic = traffic_of(entry(line, before="".join(branches)))
    assert traffic.bytes == 16_000_000 and len(traffic.copies) == 1 and traffic.host_transfers == 1


def test_prefetch_for_the_next_run_counts_once():
    """A run begins with a fetch at the end of the previous run: it reads p2 once, not twice."""
    begin = "copy-start(%p2)"
    again = (
        "  %copy-start.9 = (f32[4,16]{1,0:T(4,128)S(1)}, f32[4,16]{1,0:T(4,128)}, u32[]{:S(2)}) "
        "copy-start(%p2)\n  %copy-done.9 = f32[4,16]{1,0:T(4,128)S(1)} copy-done(%copy-start.9)\n"
    )
    alone = PROGRAM.replace(begin, f"{begin}, cross_program_prefetch_index=0")
    ahead = alone.replace("  ROOT %done =", again + "  ROOT %done =")
    twice = PROGRAM.replace("  ROOT %done =", again + "  ROOT %done =")
    assert traffic_of(alone).read == traffic_of(ahead).read == traffic_of(PROGRAM).read
    assert traffic_of(twice).read == traffic_of(PROGRAM).read + 4 * 16 * 4  # the control


def test_equal_kernels_share_one_schedule():
    """Newer compilers name them append_rows.2.refs_1_, append_rows.3.refs_1_ and so on, and
    schedule the first alone.
    """
    cache = "bf16[2,1,64,128]{3,2,1,0}"
    new = "bf16[2,1,16,128]{3,2,1,0}"
    of_kernel = (
        'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/append_rows/pallas_call"}'
    )
    kernels = [
        f"  %append_rows.{n}.refs_1_ = {cache} custom-call(%s, %n, %c), {of_kernel}\n"
        for n in (2, 3)
    ]
    given = (
        f"  %s = s32[2]{{0}} parameter(0)\n  %n = {new} parameter(1)\n  %c = {cache} parameter(2)\n"
    )
    program = (
        "\nENTRY %main (s: s32[2], n: bf16[2,1,16,128], c: bf16[2,1,64,128]) -> f32[] "
        f"{{\n{given}{''.join(kernels)}}}\n"
    )
    schedule = Schedule(once=3, in_loop=5, cores=1)
    traffic = traffic_of(program, schedules={"append_rows.2.refs_1_": schedule})
    assert traffic.kernel_cycles == traffic.cycles == 2 * schedule.cycles(2)


test_refused_programs = refused_calls(
    {
        "no ENTRY computation": lambda: traffic_of("HloModule nothing"),
        "an array of c64, whose size": lambda: traffic_of(PROGRAM.replace("bf16[", "c64[")),
    }
)
