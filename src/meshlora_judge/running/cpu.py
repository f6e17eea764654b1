"""What makes a recipe for GPUs run on CPUs, and keeps a proof from saving, uploading or reporting anything."""

from __future__ import annotations

import functools
from typing import Any

from meshlora_judge.running.child import Run

# Arguments of transformers' and TRL's trainers -> what they are in a run.
_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "fp16": False,  # which accelerate has only on GPUs
    "tf32": None,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": "none",
    "use_vllm": False,
}
_WORTH_SAYING = ("fp16", "use_vllm")


def arguments_on_cpu(module: Any, run: Run) -> None:
    """module: transformers.training_args."""
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def after_init(self: Any) -> None:
        for name, value in _ARGUMENTS.items():
            given = getattr(self, name, value)
            if given != value:
                setattr(self, name, value)
                if name in _WORTH_SAYING:
                    run.say(f"{name}={given} is {value}, as on CPUs")
        original(self)

    module.TrainingArguments.__post_init__ = after_init


def group_on_cpu(module: Any, run: Run) -> None:
    """Process groups speak gloo, whatever backend is asked for. module: torch.distributed.distributed_c10d."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if "nccl" in f"{backend}":
            run.say(f"ranks communicate by gloo, where they were to by {backend}")
        kwargs.pop("device_id", None)
        return original("gloo", *args, **kwargs)

    module.init_process_group = init_process_group


def launch_on_cpu(module: Any, run: Run) -> None:
    """`accelerate launch --num_processes N` starts N processes, also where there are no N GPUs. module:
    accelerate.commands.launch.
    """
    original = module.launch_command

    @functools.wraps(original)
    def launch_command(args: Any) -> Any:
        # Its launcher of several processes is named for GPUs, and is torchrun's.
        elsewhere = (args.multi_gpu, args.use_fsdp, args.use_deepspeed, args.use_megatron_lm, args.tpu)
        if (args.num_processes or 1) > 1 and not any(elsewhere):
            args.multi_gpu, args.cpu = True, False
        return original(args)

    module.launch_command = launch_command
