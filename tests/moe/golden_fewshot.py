"""The golden case of few-shot ridge regression."""

import numpy as np
import torch

from orchestrator.training.fewshot import (
    STRENGTHS,
    Frozen,
    accuracies,
    best_strength,
    choose_shots,
    fit_ridge,
)
from tests.moe.golden_report import Arrays, Meta, Report

SEED = 123  # of the case's draws


def few_shot(z: Arrays, meta: Meta, report: Report) -> None:
    """Accuracies may differ by one test image: the reference has them in float32."""
    x_train, y_train, x_test, y_test = (
        z[name].numpy() for name in ("x_train", "y_train", "x_test", "y_test")
    )
    images, test = (Frozen(x=x, label=y, valid=y >= 0) for x, y in ((x_train, y_train), (x_test, y_test)))
    report.exact("l2_regs", list(STRENGTHS) == meta["l2_regs"])
    for row, shots in enumerate(meta["shots"]):
        train = choose_shots(y_train, shots=shots, seed=SEED)
        report.exact(f"train_indices_{shots}shot", train.tolist() == z[f"train_indices_{shots}shot"].tolist())
        ridge = fit_ridge(x_train[train], y_train[train], int(y_train.max()) + 1)
        for name, expected in z.items():
            if name.startswith(f"weights_{shots}shot_l2_"):
                strength = float(name.rsplit("_", 1)[1])
                report.close(name, torch.from_numpy(ridge.weights(strength)), expected)
        ours, theirs = accuracies(images, test, train), z["accuracy"][row].numpy()
        report.bound(f"accuracy_{shots}shot", float(np.abs(ours - theirs).max()), 1 / len(y_test) + 1e-6)
        best = STRENGTHS.index(meta["best_l2"][str(shots)])
        report.exact(f"best_l2 {shots} shot", best_strength(ours[None]) == best)
