"""The reading of scheduled HLO, on a program small enough to count by hand."""

import pytest

from specsamp.tpu import hlo

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%gathering (table: bf16[1000,8], rows: s32[2]) -> bf16[2,8] {
  %table = bf16[1000,8]{1,0:T(8,128)(2,1)} parameter(0)
  %rows = s32[2]{0:T(128)S(3)} parameter(1)
  ROOT %gather.1 = bf16[2,8]{1,0:T(8,128)(2,1)S(3)} gather(%table, %rows), offset_dims={1}
}

%updating (cache: f32[4,16], new: f32[1,16], at: s32[]) -> f32[4,16] {
  %cache = f32[4,16]{1,0:T(4,128)} parameter(0)
  %new = f32[1,16]{1,0:T(1,128)S(1)} parameter(1)
  %at = s32[]{:T(128)S(6)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dynamic-update-slice.1 = f32[4,16]{1,0:T(4,128)} dynamic-update-slice(%cache, %new, %at, %zero)
}

%condition (carry: (s32[], f32[4,16])) -> pred[] {
  %carry = (s32[]{:T(128)}, f32[4,16]{1,0:T(4,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %bound = s32[]{:T(128)} constant(5)
  ROOT %less = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%body (carry.1: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %carry.1 = (s32[]{:T(128)}, f32[4,16]{1,0:T(4,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %x = f32[4,16]{1,0:T(4,128)} get-tuple-element(%carry.1), index=1
  %new.1 = f32[1,16]{1,0:T(1,128)S(1)} broadcast(%i.1), dimensions={}
  %fusion.1 = f32[4,16]{1,0:T(4,128)} fusion(%x, %new.1, %i.1), kind=kLoop, calls=%updating, backend_config={"estimated_cycles":"100"}
  %all-reduce.1 = f32[1,16]{1,0:T(1,128)S(1)} all-reduce(%new.1), channel_id=1, to_apply=%sum
  ROOT %next = (s32[]{:T(128)}, f32[4,16]{1,0:T(4,128)}) tuple(%i.1, %fusion.1)
}

ENTRY %main (p0: bf16[1000,8], p1: s32[2], p2: f32[4,16], p3: f32[1000000]) -> (f32[4,16], f32[1000000]) {
  %p0 = bf16[1000,8]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[2]{0:T(128)S(3)} parameter(1)
  %p2 = f32[4,16]{1,0:T(4,128)} parameter(2)
  %p3 = f32[1000000]{0:T(1024)} parameter(3)
  %fusion.2 = bf16[2,8]{1,0:T(8,128)(2,1)S(3)} fusion(%p0, %p1), kind=kCustom, calls=%gathering
  %copy-start.1 = (f32[4,16]{1,0:T(4,128)S(1)}, f32[4,16]{1,0:T(4,128)}, u32[]{:S(2)}) copy-start(%p2)
  %copy-done.1 = f32[4,16]{1,0:T(4,128)S(1)} copy-done(%copy-start.1)
  %slice-start.1 = ((bf16[1000,8]{1,0:T(8,128)(2,1)}), bf16[10,8]{1,0:T(8,128)(2,1)S(3)}, s32[]{:S(2)}) slice-start(%p0), slice={[0:10], [0:8]}
  %slice-done.1 = bf16[10,8]{1,0:T(8,128)(2,1)S(3)} slice-done(%slice-start.1)
  %zero.1 = s32[]{:T(128)} constant(0)
  %tuple.1 = (s32[]{:T(128)}, f32[4,16]{1,0:T(4,128)}) tuple(%zero.1, %p2)
  %while.1 = (s32[]{:T(128)}, f32[4,16]{1,0:T(4,128)}) while(%tuple.1), condition=%condition, body=%body
  %out = f32[4,16]{1,0:T(4,128)} get-tuple-element(%while.1), index=1
  %copy.1 = f32[1000000]{0:T(1024)} copy(%p3), metadata={op_name="jit(f)/score/copy"}
  ROOT %done = (f32[4,16]{1,0:T(4,128)}, f32[1000000]{0:T(1024)}) tuple(%out, %copy.1)
}
"""


def test_bytes_of_a_program_counted_by_hand():
    traffic = hlo.measure(PROGRAM)
    rows = 2 * 8 * 2  # a gather reads its rows, not the table
    prefetches = 4 * 16 * 4 + 10 * 8 * 2
    per_iteration = 2 * 4  # the counter, by the broadcast and by the fusion: it lies in HBM
    copied = 4_000_000
    assert traffic.read == rows + prefetches + 5 * per_iteration + copied
    assert traffic.written == 5 * 16 * 4 + copied  # an update in place writes the update
    assert traffic.cycles == 5 * 100
    assert traffic.collectives == {"all-reduce": 5} and traffic.collective_bytes == {"all-reduce": 5 * 64}
    assert traffic.copies == [("jit(f)/score/copy", 4_000_000)]
    assert traffic.host_transfers == 0


def test_a_loop_whose_bound_is_data_counts_once():
    traffic = hlo.measure(PROGRAM.replace("constant(5)", "parameter(1)"))
    assert traffic.collectives == {"all-reduce": 1}


def test_the_transfer_to_a_host_is_seen():
    line = "  %out = f32[4,16]"
    sent = "  %send.1 = (f32[4,16]{1,0}, u32[], token[]) send(%p2, %p2), channel_id=9, is_host_transfer=true\n"
    assert hlo.measure(PROGRAM.replace(line, sent + line)).host_transfers == 1


def test_what_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.measure("HloModule nothing")
