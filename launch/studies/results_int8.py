"""Makes the tables of what int8 changes, see results_tables.py."""

from __future__ import annotations

from launch.studies.results_tables import Documents, ratio, table


def int8_error(documents: Documents) -> str:
    """Returns what int8 weights and caches change of a pair's target, its acceptance, and of random weights."""
    document, rows = documents["int8_error"], []
    for name, found in document["pair"].items():
        target, random = found["target"], document["random weights"][name]
        shares = [
            part["logits, rms of the difference"] / part["logits, standard deviation"] for part in (target, random)
        ]
        rows.append(
            (
                name,
                f"{shares[0]:.2%}",
                f"{target['divergence, nats']:.1e}",
                f"{target['same likeliest token']:.1%}",
                f"{target['loss, nats per token']:.4f}",
                f"{found['acceptance']:.4f}",
                f"{shares[1]:.2%}",
                f"{random['divergence, nats']:.1e}",
            )
        )
    header = (
        "both sides in",
        "logits differ",
        "divergence, nats",
        "same likeliest token",
        "loss",
        "acceptance at T = 1",
    )
    return table((*header, "random weights: logits differ", "divergence, nats"), rows)


def int8_stored(documents: Documents) -> str:
    """Returns the held-out loss and the acceptance of the pair before its weights were stored in int8, and after."""
    rows = []
    for precision, sides in documents["int8_error"]["stored"].items():
        acceptance = sides["draft"]["acceptance (temperature 1)"]
        rows.append((precision, f"{sides['target']['loss']:.5f}", f"{sides['draft']['loss']:.5f}", f"{acceptance:.5f}"))
    return table(("stored in", "held-out loss of the target", "of the draft", "acceptance at T = 1"), rows)


def int8_speed(documents: Documents) -> str:
    """Returns the milliseconds of a call by what is in int8, beside float32 in the same turns."""
    document, rows = documents["int8_speed_cpu"], []
    lengths = list(document["models"]["random"]["settings"]["float32"]["calls"])
    for model, found in document["models"].items():
        for setting, measured in found["settings"].items():
            calls = [measured["calls"][length] for length in lengths]
            row = [model, setting, f"{measured['streamed, MB']:.0f}"]
            row += [f"{call['temporaries, MB']:.1f}" for call in calls]
            for call in calls:
                row += [f"{call['ms']['median']:.1f}", ratio(call["over float32"])]
            rows.append(row)
    header = ["model", "in", "streamed, MB"] + [f"temporaries, MB, tokens: {length}" for length in lengths]
    for length in lengths:
        header += [f"ms, tokens: {length}", "over float32"]
    return table(header, rows)
