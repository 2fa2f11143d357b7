"""Lists the sections of notebooks/results/README.md: what must be known to read each table, and what makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import adaptive_points as adaptive
import lossy_curve
import results_compiled as compiled
import results_drafters as drafted
import results_int8 as int8
import results_tables as measured
from results_tables import Documents


@dataclasses.dataclass(frozen=True)
class Section:
    """A table with what must be known to read it."""

    title: str
    text: str
    make: Callable[[Documents], str]
    files: Sequence[str] = ()  # without .json: the first is where the numbers come from
    figures: Sequence[str] = ()


ESTIMATE = "A compiler estimate: nothing ran on a TPU. "
SECTIONS = (
    Section(
        "The pair that comes with the package",
        "Trained on two cores on the source of the Python standard library, as `specsamp/checkpoints/assets/python/"
        "pair.json` records. The loss and the acceptance are those of text that neither model was trained on.",
        measured.trained,
    ),
    Section(
        "Rounds as they went",
        "The first rounds of one completion of a held-out prompt, at T = 0.8, top-p 0.95, K = 4, token rule: an example, whose "
        "seed was chosen because every outcome occurs. Beside each drafted token is the chance that it is kept, min(1, q/p). "
        "A rejected token is followed by the target's correction, a draft that is kept whole by its bonus.",
        measured.one_round,
        ["one_round"],
        ["one_round"],
    ),
    Section(
        "Its head",
        "An EAGLE-3 head that reads the outputs of layers 1, 3 and 5 of six, counted from 0: `--config.drafter=head`. Acceptance "
        "of a token after the text's own, by position, on 24 held-out windows; nothing is drawn. It was trained in five runs, "
        "each begun with the head of the one before and with a learning rate that starts anew (the dips), on the text alone, "
        "three steps of the training-time test. The draft model is measured on the same windows.",
        measured.head,
        ["python_head"],
    ),
    Section(
        "Drafters of one target",
        "Ten held-out prompts of 128 new tokens, token rule, batch 1, each drafter in turn with plain decoding; all pay for one "
        "warp, greedy decoding too. Acceptance at a position is of the rounds that came so far. A draft, in steps of the target: "
        "what proposing a token and reading what was accepted take. The early exit is of a target that was tuned for it, from "
        "the pair's own, in 700 steps (`configs/python_pair.py:layer_skip`), and whose texts are its own; Medusa's heads were "
        "trained in 900 steps, two million tokens. On this CPU a head is not free; what its acceptance would be worth on a chip says the next table.",
        drafted.drafters,
        ["python_drafters"],
    ),
    Section(
        "The same acceptance on a chip",
        ESTIMATE
        + "What the acceptance above would give Llama 3.1 8B on four v5e chips, if its drafters were accepted as "
        "often: a forecast from the costs of rounds that were compiled for them (a range covers what is not known).",
        drafted.drafters_on_chips,
        ["python_drafters", "compile_heads"],
    ),
    Section(
        "Two drafters together",
        "The draft model and prompt lookup alone, chosen from past rounds before anything is drawn (lookup falls back to the "
        "model where it finds nothing), and voting by what each got accepted, its winner verified as a one-hot proposal. Token "
        "rule, K = 4, batch 1, 64 new tokens of each of six held-out prompts; repeated: the prompt is followed by the first half "
        "of its own text. Counts only, where plain decoding has one token per round: the machine was busy, so the files' "
        "milliseconds mean nothing, and speed waits for a quiet run of the same commands. At T = 1 a vote costs acceptance, since "
        "the draft model's token is then certain instead of drawn. Six texts tell large differences only, such as that one.",
        drafted.voting,
        ["python_voting", "python_voting_repeated"],
    ),
    Section(
        "Speedup by draft length and rule",
        "Held-out prompts at batch 1 in float32, on a shared machine; medians over prompts, with quartiles of the "
        "speedup. The best K of each rule is bold. `alone` is plain decoding of the same prompts, in turn with the "
        "speculative sides. Theory allows what the acceptance rate and the costs of the calls allow if nothing else "
        "cost anything. The costs are timed between the same prompts and scatter by a tenth on this machine, so a "
        "share can exceed 100%. What limits this machine is scoring K + 1 rows; on a TPU, Chen et al. report, a call "
        "for a few rows costs about as much as one for a single row.",
        measured.speedup,
        ["python_pair_speedup"],
    ),
    Section(
        "Best draft length by drafter, rule, batch and temperature",
        "The best K of each setting, and 0 where no draft pays. The cells were measured minutes to hours apart on a "
        "shared machine: compare ratios, and these loosely. The same setting can differ by a fifth from the table "
        "above, and the best of several is a little flattered. The draft model gains least at batch 4 on this CPU. "
        "`launch/studies/figures.py` draws both figures; the points of the first are those of Chen et al.",
        measured.grid,
        ["python_pair_grid"],
        ["figure_1", "speedup_by_batch"],
    ),
    Section(
        "Draft lengths that adapt",
        "160 texts of 48 tokens in each setting, each after a prompt of its own. Easy texts are greedy, after prompts that say "
        "everything twice; hard ones are sampled at T = 1, where prompt lookup finds little. Batches decode until their slowest "
        "row ends. Costs, the usual length and the acceptance that rows begin with were calibrated on 40 other prompts. Counted: "
        "the rounds of 32 of the texts, each at the milliseconds of its width in that table; the best fixed length, and the "
        "oracle's for each batch, are chosen afterwards. By the clock adaptive lengths and plain decoding take turns on all "
        "texts; a share below zero is a gain, and what a draft model reads after a pause is in the clock alone. The points of "
        "prompt lookup were added to those of `--drafters=model` by the command below.",
        adaptive.section,
        ["python_adaptive"],
    ),
    Section(
        "A draft with a temperature of its own",
        "Target at T = 0.8, top-p 0.95, token rule, K = 4. The output follows the target's distribution with any "
        "draft; only acceptance changes (± one standard error). From the same file as the table above.",
        measured.draft_temperatures,
    ),
    Section(
        "Lossy rules and their price",
        "Rules that accept more than the target's distribution allows, beside exact ones, on held-out prompts at batch 1; all "
        "take turns with plain decoding. Bias is metered while decoding: the total variation of a token's distribution under "
        "the rule from the target's. Its sums over texts, on average, bound the total variation between texts and the target's; "
        "a bound beyond 1 says nothing. Bought: the share of verified tokens that are accepted beyond what the token rule would "
        "accept there. Budgets (`bounded`) relax a token as far as the number says and no further. "
        "Sixteen texts a rule: differences of a few percent, such as between the exact rules, are chance.",
        lossy_curve.section,
        ["python_lossy"],
        ["python_lossy"],
    ),
    Section(
        "Do forecasts hold?",
        "Costs and acceptance are fitted on one half of the prompts and checked on the other half, K = 0 to 12. Errors "
        "are of ms per token, where the rounds of that K and batch were not timed. Noise is how far two passes over "
        "the same texts lie apart. `Lines alone` interpolates all costs, also those of the products with the target's "
        "matrices. The bands were called 95% and held 44 of the 52 points, because they knew the error of each median and "
        "not that a clock drifts between sessions; now they contain a drift of 1.6%, the least that holds 95% (found on "
        "three of the curves, it holds 50 of the 52 points left out). The file's bands were widened by it and nothing was "
        "measured again.",
        measured.agreement,
        ["python_pair_agreement", "python_prompts"],
    ),
    Section(
        "Audit of the pair",
        "Seven checks that the pair writes what its target would write alone; sampled texts are also read again for named "
        "mistakes in acceptance and residual (`specsamp/evaluation/audit/mistakes.py`).",
        measured.audit,
        ["python_pair_audit"],
    ),
    Section(
        "Quality of completions",
        "Held-out prompts of the pair, T = 0.8, top-p 0.95: the share of completions that parse as Python up to where the "
        "budget cut them, and the log-probability per token under the target. Ways to decode take turns, block by block of "
        "the prompts; speedups are medians over blocks, with their range. `always` accepts whatever was drafted: the control "
        "that must come out as different. Differences are from plain decoding on the same problems, with an interval of 95% "
        "and the size that four of five such runs would have seen. All of them share one run of plain decoding, so they "
        "err together: beside the table lies a second run, of 240 completions a way and another seed, whose difference of "
        "log-probabilities is a fifth as large.",
        measured.evaluation("python_pair_tasks"),
        ["python_pair_tasks", "python_pair_tasks_again"],
    ),
    Section(
        "HumanEval",
        "All problems in the setting of the paper (T = 0.8, top-p 0.95, its stop texts), ten completions of each. A model of "
        "20.7M parameters solves none of them, and equal zeros prove nothing: the share that parses and the "
        "log-probability per token are compared. Generated programs ran in isolation. Times are of a machine that ran tests "
        "beside it; ways take turns.",
        measured.evaluation("python_pair_humaneval"),
        ["python_pair_humaneval"],
        ["acceptance_by_task"],
    ),
    Section(
        "The queue beside fixed batches",
        "The prompts of HumanEval with its stop texts: a row that ends takes the next prompt, where a fixed batch waits for its "
        "slowest row. Times are those of a shared machine; ways take turns.",
        measured.refill,
        ["python_pair_refill"],
    ),
    Section(
        "Who goes first",
        "Requests that arrive at random times, first come first served beside shortest first, whose lengths are predicted from "
        "finished prompts, and beside an oracle that knows them. Latency is normalised: all the time that a text took, over "
        "its tokens, mean and 90th percentile. Of two kinds of requests three in four ask for an eighth of the budget and no "
        "text stops early, so budgets tell lengths; HumanEval's texts stop where they like, and nothing here tells when.",
        measured.scheduling,
        ["python_pair_scheduling", "python_pair_scheduling_humaneval"],
        ["scheduling"],
    ),
    Section(
        "The endpoint under load",
        "`launch/serve.py` with the shipped pair; clients that ask again as soon as they are answered, T = 0.8, top-p 0.95, the "
        "pair's held-out prompts. The clients share the two cores with the server.",
        measured.serve_load,
        ["python_pair_serve_load"],
    ),
    Section(
        "Beside Hugging Face transformers",
        "Plain decoding of a model of the same shape, in turn in one process.",
        measured.others,
        ["python_pair_transformers"],
    ),
    Section(
        "A random pair",
        "Random weights of 39.9M and 0.7M parameters, vocabulary 4096, float32, batch 1, K = 4. A random draft is "
        "hardly ever accepted, so speculation is slower here. The table shows what a round costs beside its calls. "
        "Measured before weights got their layout for CPUs.",
        measured.random_pair,
        ["random_38m_sampled", "random_38m_greedy"],
    ),
    Section(
        "Memory of the loop",
        "Temporaries beside weights and caches, as compiled for a CPU.",
        measured.memory,
        ["random_38m_memory"],
    ),
    Section(
        "Host memory of reading a checkpoint",
        "A synthetic checkpoint is read onto a mesh of one process, then converted to Orbax and read again. On a CPU "
        "the memory of the devices is the host's, so the process holds all parameters. The machine was shared, and busier while "
        "the second column was measured: its seconds say nothing about quantising.",
        measured.streaming,
        ["streaming_3gb", "streaming_3gb_int8"],
    ),
    Section(
        "What int8 changes",
        "Logits of the pair and of random weights (the shape of `configs/random_pair.py:38m`) beside those in float32, after 64 "
        "tokens of each of 15 held-out prompts; the difference as a share of the logits' standard deviation, and the "
        "Kullback-Leibler divergence of the distribution in float32 from the other. The pair's weights are stored in int8, "
        "so decoding with them changes nothing; what storing them did is the next table.",
        int8.int8_error,
        ["int8_error"],
    ),
    Section(
        "Where int8 helps on a CPU",
        "Calls at batch 1 with caches of 2048 slots, of which a call reads all; medians over turns. Int8 weights take less time "
        "than float32, for one token and for five, if far from a quarter. XLA has no product of an int8 matrix on a CPU: it writes "
        "the matrix in float32 before it multiplies, nine bytes of traffic for each weight where float32 has four. While that stays "
        "in the cache it costs little: so with the pair's matrices, of at most 5 MB in float32 (both rows of it are one program: "
        "their difference is chance). Those of the random model, up to 34 MB, do not fit, and are slower than float32 when they "
        "are widened whole. Hence the CPU's layout widens larger ones 2 MB at a time (`specsamp/models/cpu_layout.py`). Vocabularies "
        "far larger than these have not been measured here. Int8 caches gain no time: they are widened too, and small beside the "
        "weights. In bfloat16 one token is slowest: the compiler holds a float32 copy of all matrices (temporaries); five tokens "
        "are multiplied in bfloat16, which this CPU can.",
        int8.int8_speed,
        ["int8_speed_cpu"],
    ),
    Section(
        "What storing the pair in int8 changed",
        "Held-out text, nats per token, measured when the pair was made (`launch/export_pair.py`).",
        int8.int8_stored,
        ["int8_error"],
    ),
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
