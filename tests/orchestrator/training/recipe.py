"""A recipe with whatever draws random numbers of an image, in the model and in its data."""

RECIPE = {
    "model.drop_path": 0.3,
    "model.layer_scale": 0.1,
    "data.augment": "inception",
    "data.three_augment": True,
    "data.color_jitter": 0.3,
    "data.random_erasing": 0.5,
    "data.repeats": 3,
    "data.mixup": 0.8,
    "data.cutmix": 1.0,
    "task.loss": "sigmoid_mean",
    "task.binarised": True,
    "train.optimizer.kind": "lamb",
    "train.optimizer.layer_decay": 0.8,
    "train.ema.decay": 0.9,
}
