"""The papers, a folder each: they import the product, which finds what is here by its name.

``sweeps.py`` of a folder has functions with the names of its sweeps. At scales without the sizes of the paper
they are the nearest that the scale's sizes allow.

``published.csv`` has fractions and FLOPs, where the paper has percent and exaFLOPs. Soft MoE counts 3 FLOPs
of training for a multiply-add of the forward pass, V-MoE 6: the tables have both. V-MoE counts core-days, two
for a chip-day of TPUv3. JFT-300M and JFT-4B are two metrics, because their classes differ. `imagenet/acc1` is
after fine-tuning. Slots per token are k * c, c, or, for one slot per expert of Soft MoE, experts / tokens.

Sources of the tables: Soft MoE (Puigcerver et al., 2024), tables 1 to 3 and 7 to 9; Routers in Vision MoE
(Liu et al., 2024), tables 1 to 8; V-MoE (Riquelme et al., 2021), tables 1 and 2.
"""

MEMBERS = ("papers.implicit_bias.astroformer",)  # modules that add members to families
SWEEPS = {  # name -> module with a function of that name, in the order of `--list`
    "routers": "papers.routers.sweeps",
    "slots_experts": "papers.soft_moe.sweeps",
    "ablations": "papers.soft_moe.sweeps",
    "pareto": "papers.soft_moe.sweeps",
    "long_runs": "papers.soft_moe.sweeps",
    "capacity": "papers.vmoe.sweeps",
    "vmoe": "papers.vmoe.sweeps",
    "expert_count": "papers.implicit_bias.sweeps",
    "expert_count_cifar": "papers.implicit_bias.sweeps",
    "softmax_combine": "papers.routers.sweeps",
    "slots": "papers.soft_moe.sweeps",
    "moe_layers": "papers.soft_moe.sweeps",
    "token_choices": "papers.soft_moe.sweeps",
    "topk": "papers.vmoe.sweeps",
    "priority": "papers.vmoe.sweeps",
    "last_layers": "papers.vmoe.sweeps",
    "fixed_routing": "papers.routers.sweeps",
    "choice_experts": "papers.soft_moe.sweeps",
    "augmentation": "papers.soft_moe.sweeps",
    "normalization": "papers.soft_moe.sweeps",
    "lit": "papers.soft_moe.contrastive.sweeps",
    "laion": "papers.soft_moe.contrastive.sweeps",
    "augmentation_contrastive": "papers.soft_moe.contrastive.sweeps",
    "mixtures": "papers.calmops.sweeps",
}
SCALES = {  # name -> module with the scale in its `SCALES`
    "in1k": "papers.scales",
    "deit3": "papers.scales",
    "in21k": "papers.scales",
    "jft": "papers.scales",
    "laion": "papers.soft_moe.contrastive.scales",
}
COMMANDS = {  # command -> module with its `main`
    "duplicates": "papers.jobs.duplicates",
    "inspect-routing": "papers.jobs.inspect_routing",
    "study": "papers.jobs.study",
}
COSTS = {"papers": "papers.costs"}  # whose models' published parameters and FLOPs `plan` compares
ROWS = {"papers": "papers.rows"}  # what `--list` prints at its end
STUDIES = {  # name -> what it shows, and its function of a number of seeds and a `ProgressFn`
    "capacity": (
        "batch prioritized routing against vanilla where room is short (V-MoE, figures 5-6)",
        "papers.vmoe.inference:capacity",
    ),
    "k": (
        "another number of experts per token than in training (V-MoE, appendix E.4)",
        "papers.vmoe.inference:choices",
    ),
    "random-router": (
        "what a random router in one layer costs (V-MoE, appendix E.1)",
        "papers.vmoe.inference:random_router",
    ),
    "specialisation": (
        "subsets of 2 to 16 experts: best, algorithm 1, random (Implicit Bias, figures 1-3, 5)",
        "papers.implicit_bias.specialisation:specialise",
    ),
    "l2norm": (
        "one expert cannot learn the length of a vector, five can (Implicit Bias, figure 4)",
        "papers.implicit_bias.l2norm:learn_length",
    ),
    "faster-inference": (
        "time against the experts that run, batch 1 and 100 (Implicit Bias, table 3)",
        "papers.implicit_bias.faster_inference:time_experts",
    ),
}
TITLES = {  # of metrics in `published.csv`, with the unit
    "cost/train_flops_3mac": "Training (FLOP, 3 \N{MULTIPLICATION SIGN} MAC)",
    "cost/tpuv3_days": "Training TPUv3 days (chips)",
    "perf/tpuv3_ms_per_image": "Inference time per image (ms, TPUv3)",
    "imagenet/acc1": "ImageNet accuracy @1, fine-tuned",
    **{f"imagenet/acc_{shots}shot": f"ImageNet accuracy, {shots}-shot" for shots in (1, 5, 10)},
    "jft300m/prec1": "JFT-300M precision @1",
    "jft4b/prec1": "JFT-4B precision @1",
}
_SOFT, _VMOE = "Soft MoE (2024), table", "V-MoE (2021), table"
_ROUTERS = "Routers in Vision MoE (2024), tables"
FIGURES = {  # name -> source, quality and cost of its points in `published.csv`
    "softmoe-figure3": (f"{_SOFT} 9", "imagenet/acc_10shot", "cost/tpuv3_days"),
    "softmoe-figure3-jft": (f"{_SOFT} 9", "jft4b/prec1", "cost/tpuv3_days"),
    "softmoe-table8": (f"{_SOFT} 8", "imagenet/acc_10shot", "cost/train_flops_3mac"),
    "softmoe-table8-jft": (f"{_SOFT} 8", "jft4b/prec1", "cost/train_flops_3mac"),
    "softmoe-table8-finetuned": (f"{_SOFT} 8", "imagenet/acc1", "cost/train_flops_3mac"),
    "softmoe-table1": (f"{_SOFT} 1", "imagenet/acc_10shot", "perf/tpuv3_ms_per_image"),
    "routers-figure1": (f"{_ROUTERS} 1-8", "jft300m/prec1", "cost/tpuv3_days"),
    "routers-figure2": (f"{_ROUTERS} 1-8", "imagenet/acc_10shot", "cost/tpuv3_days"),
    "vmoe-table2": (f"{_VMOE} 2", "imagenet/acc_5shot", "cost/tpuv3_days"),
    "vmoe-table2-jft": (f"{_VMOE} 2", "jft300m/prec1", "cost/tpuv3_days"),
    "vmoe-table2-finetuned": (f"{_VMOE} 2", "imagenet/acc1", "cost/tpuv3_days"),
}
