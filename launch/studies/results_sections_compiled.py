"""Lists the sections of notebooks/results/README.md on what is foreseen and compiled for TPUs, see results_sections.py."""

from __future__ import annotations

from launch.studies import results_compiled as compiled
from launch.studies.results_tables import ESTIMATE, Section

COMPILED = (
    Section(
        "What a forecast of milliseconds is worth",
        "Published measurements of TPUs (`specsamp/tpu/measurements.json`), each predicted from the others: every layout "
        "(chip, slice and parallelism) and every source is left out once, and bands are made without it. On v5e collectives "
        "count only as far as they outlast the streaming: no share of it is fitted, and the backtest takes none from a "
        "trace. Smaller shares explain the steps nearly as well, from a half on; the upper edges of bands assume the least. "
        "A band reaches as far as the worst step of the worst layout that was left out. Rows of one layout err alike: the "
        "25 steps of v5e count as three layouts, and a fourth that is like them lies within with a chance of about three in four. "
        "One of the three is a single step of another model (2023, PyTorch/XLA), which takes a fifth longer than the other "
        "two say and is outside of the band made without it; the bands of v5e are widened until they hold it. Until "
        "November 2026 all chips had one formula, fitted on six steps of TPU v4 of 2022 and 2023, in which collectives "
        "and streaming add up. It says up to twice what has been published for TPU v5e with JAX of 2025, where "
        "collectives run under the streaming. All milliseconds below were made again from the same compiled programs. "
        "For v5e they rest on 25 steps and five traced collectives. No step of today that is one program was measured on another chip, v4 "
        "included: there they are a range, from streaming and cycles alone to the old sum, and the best K and the "
        "speedup are as open. Speedups of the paper's pair on v4 were given as 2.3x and 2.0x (batch 1 and 8), a step of "
        "Llama 3.1 70B on v5e-16 as 19.6 ms. Servers, programs that the host launches call by call, rounds of other "
        "drafters, experts and products on the vector unit are in no formula here: to hold nine of ten of them, both edges of the band would "
        "have to move out by the factor in the last column. The form of the formula was chosen with all steps in view; its "
        "numbers are fitted without those that are left out. A speedup is compared within each of several worlds: on chips "
        "without measurements all collectives hidden, all added, or the target's hidden and the draft's added (the rounds of "
        "Chen et al. lie within, and not one of them between the first two alone); on v5e other overlaps and the fits without "
        "each layout. No draft was measured on v5e. "
        "Public numbers that are in no row: a traced module of Llama 3.1 70B of 8.366 ms (batch 8, 8192 slots) beside the 6.85 ms "
        "that the table of its authors says, and later steps of the DFlash programs on v5p (7.3 ms for 6.3, 14.4 ms for 11).",
        compiled.backtest,
        ["tpu_backtest"],
        ["tpu_backtest"],
    ),
    Section(
        "What is prefetched while collectives run?",
        ESTIMATE
        + "Why collectives on v5e are taken to be hidden as far as the streaming lasts: at each all-reduce of a "
        "compiled step more is on its way to the chip than arrives while it runs, but for the first of the first row. Their time is that of the traced all-reduces. "
        "The last one, of the logits, has no layer after it and is left out.",
        compiled.in_flight,
        ["compile_in_flight"],
    ),
    Section(
        "Frozen forecasts",
        "Milliseconds of a round of the decoding loop, 2048 slots, bfloat16, top-p, forecast from shapes and frozen with "
        "their bands before anybody has measured them: plain decoding, and K = 4 with a draft model, with the first quarter "
        "of the target's layers (early exit), or with a head of EAGLE-3's shape. A batch is not changed when the fit "
        "changes: the next one stands beside it. Ranges of chips other than v5e go from all collectives hidden to all added "
        "and promise no share. The 90% that the first batch promises were too much: layouts left out allow three in four. With one of these slices `launch/score_forecasts.py` measures those that are of it in minutes "
        "and adds the verdict.",
        compiled.forecasts,
        ["forecasts"],
    ),
    Section(
        "The paper's pair on 16 TPU v4 chips",
        ESTIMATE + "Chinchilla's shapes, 70B and 4B, bfloat16, batch 1, 2048 slots, K = 4. What has been published are "
        "programs of 2023; two of these steps are among the twelve that the sum for such programs is fitted on, rounds "
        "are not. A round moves less than its calls one by one, because the compiler keeps some of the draft's weights "
        "on chip.",
        compiled.chinchilla,
        ["compile_chinchilla_v4"],
    ),
    Section(
        "The same pair on four slices, by batch",
        ESTIMATE + "Top-p, token rule, K = 4; ms per token over all rows at an acceptance rate of 0.8. Programs of two "
        "and four layers, continued in a straight line to all layers. A range goes from all collectives hidden to all "
        "added. Its speedup is lowest where the target hides them and the draft cannot. At every batch the compiler fetches most caches of a "
        "layer into on-chip memory, writes the new rows there and copies the caches back whole. At batch 1 this is "
        "nearly all that a step moves beyond its floor; at larger batches it is a larger share "
        "(`launch/studies/compile_variants.py`). These are programs without kernels, `--config.attention=plain`.",
        compiled.slices,
        ["compile_slices"],
    ),
    Section(
        "Caches that are read as far as they are alive",
        ESTIMATE
        + "Kernels append rows in place and fetch the blocks of a cache that a query sees; what they move is counted "
        "by their own index maps. Traffic per chip and call, over the floor of as many slots: all of them alive, and as many "
        "as the column says. Programs of two and four layers, continued in a straight line to all of them, those of more "
        "than sixteen chips with two; a call of one new token carries two. Cycles of the kernels are not known to the "
        "compiler. A round can go below its floor, because the compiler keeps weights of the draft on chip. On v5p it leaves in HBM "
        "what it keeps on chip elsewhere, scores of distances above all, so that calls with many rows are far beyond their floor: it "
        "fetches matrices of 34 MB whole there, and not in slices of 4 MB as on v6e, which may leave no room; nor is it known why Llama's calls, without distances, are up to 17% beyond. The draft of Llama's round has heads of 64 entries, which kernels do not take: its caches are "
        "read whole. "
        "On 256 chips the 64 heads take `--config.mesh.data=4` at least, with a draft of 48 heads 16.",
        compiled.kernels,
        ["compile_kernels"],
    ),
    Section(
        "What does a call for more tokens cost?",
        ESTIMATE
        + "One call of the target over a step, by its tokens, at batch 1; the figure has the middle of the range. The "
        "roofline's ridge lies far beyond what is free: the traffic of collectives and the work of attention grow with "
        "every token.",
        compiled.scoring,
        ["compile_scoring"],
        ["compile_scoring"],
    ),
    Section(
        "Which shape should a draft have?",
        ESTIMATE
        + "Drafts of about 4B parameters on TPU v4 at batch 1. They all stream alike. If collectives are added, "
        "the two of a layer cost more on 16 chips than its weights, and a shallow draft is faster. If all are hidden, "
        "hardly: how much faster is open until somebody measures it.",
        compiled.shapes,
        ["compile_shapes"],
        ["compile_shapes"],
    ),
    Section(
        "What int8, fewer kv heads and drafting save together",
        ESTIMATE
        + "Chinchilla's target on 16 TPU v4 chips, alone, with the paper's draft, and with a head of EAGLE-3's "
        "shape; what drafts is in int8 as far as the target is, with scales and conversions in the programs. 2048 slots, "
        "all alive and read by kernels; K = 4, top-p, token rule; at batch 16 a round is the sum of its calls. What a "
        "round emits depends on acceptance, which no compiler knows: a drafter pays where a round emits more tokens than it "
        "takes steps; the speedup is what an acceptance rate of 0.8 would give, for both alike. Every device has the only "
        "kv head of multi-query attention, so that its caches are no smaller than those of eight. Int8 halves what is "
        "streamed, and not the time: v4 has no int8 products, and converting weights takes more cycles than streaming them. "
        "With the draft model a round in int8 has 2.4 ms of cycles beyond its calls that one in bfloat16 has not: the compiler lays "
        "its distributions out with the vocabulary outermost when they are sampled. So the speedups of these rows are too low, and what "
        "int8 does to drafting is not settled here; the head's rounds have no such cycles. Cycles of the kernels are not known to the "
        "compiler, and with int8 caches the conversions of keys and values are among them: these rows are too fast, most at "
        "batch 16. Ranges as above.",
        compiled.complements,
        ["compile_complements"],
    ),
    Section(
        "Public pairs on TPU v5e",
        ESTIMATE + "2048 slots. The target of the last row in such a setting takes 6.29 ms as published, by another "
        "program: caches in int8 too, and how full they are is not stated; ours reads all of its slots. Of experts (A3B) the "
        "floor has those that the tokens of a call are expected to choose if they choose independently, divided evenly "
        "among the chips; the program waits for the chip that has most of them, and a step that feeds two tokens reads "
        "the experts of both. Such a step is bound by cycles and not by streaming, so drafting looks better beside it than it "
        "would beside a good one: `launch/plan.py`, which counts bytes, finds next to nothing to gain.",
        compiled.public_pairs,
        ["compile_qwen_3b_v5e", "compile_qwen_30b_a3b_v5e", "compile_llama_70b_v5e", "compile_llama_70b_int8_v5e"],
    ),
    Section(
        "Heads and early exits beside a draft model",
        ESTIMATE
        + "Batch 1, 2048 slots, bfloat16, top-p, token rule, K = 4. Targets of two and four layers, continued in a straight "
        "line to all of them; a head has one layer and is compiled as it is, of EAGLE-3's shape with a reduced vocabulary "
        "of 32,000. What a round emits depends on acceptance, which no compiler knows: a drafter pays where it emits more "
        "tokens than the last column says. A round can go below the floor of its calls, because the compiler keeps weights "
        "of what drafts on chip. What one run fetches at its end for the next is counted once here; files that are older "
        "count it twice.",
        compiled.heads,
        ["compile_heads"],
    ),
    Section(
        "A training step of an EAGLE-3 head",
        ESTIMATE
        + "Llama 3.1 8B is the target, on 16 TPU v5p chips, four data shards of four; AdamW in float32, activations "
        "made again, logits for 256 positions at a time. Without a gradient the target keeps nothing from layer to layer: "
        "arguments grow with its layers, temporaries with the steps of the test.",
        compiled.head_training,
        ["compile_head_training"],
    ),
    Section(
        "Why the loop is written as it is",
        ESTIMATE + "The same work in several forms, for 16 TPU v4 chips; `launch/studies/compile_variants.py` explains "
        "each question.",
        compiled.variants,
        ["compile_variants"],
    ),
)
