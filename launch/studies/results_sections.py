"""Lists the sections of notebooks/results/README.md: what must be known to read each table, and what makes it.

What was measured comes first, and behind it what is foreseen and compiled for TPUs (results_sections_compiled.py).
"""

from __future__ import annotations

from launch.studies import adaptive_points as adaptive
from launch.studies import lossy_curve
from launch.studies import results_drafters as drafted
from launch.studies import results_int8 as int8
from launch.studies import results_tables as measured
from launch.studies.results_sections_compiled import COMPILED
from launch.studies.results_tables import ESTIMATE, Section

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
    *COMPILED,
)
