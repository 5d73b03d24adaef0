"""A recipe with whatever draws random numbers of an image, in the model and in its data."""

RECIPE = {
    "model.drop_path": 0.3,
    "model.layer_scale": 0.1,
    "data.augment": "inception,three_augment,color_jitter,random_erasing,mixup,cutmix",
    "data.augment.mixup.alpha": 0.8,
    "data.repeats": 3,
    "task.loss": "sigmoid_mean",
    "task.binarised": True,
    "train.optimizer.kind": "lamb",
    "train.optimizer.layer_decay": 0.8,
    "train.ema.decay": 0.9,
}
