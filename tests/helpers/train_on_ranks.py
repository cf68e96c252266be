"""Trains from config files, one after the other, on this rank: what torchrun starts in the tests.

    torchrun --nproc-per-node 2 tests/helpers/train_on_ranks.py BACKEND CONFIG.yaml ...

On GPUs `sdpo-scale train` under the same launcher does all this by itself. On CPUs accelerate takes
FSDP2 and ZeRO only after what is done here: without it, runs are silently replicated.
"""

import json
import logging
import os
import sys
from typing import Any

_FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def main(arguments: list[str]) -> None:
    backend, paths = arguments[0], arguments[1:]
    from sdpo_scale.trainer import SDPOTrainer

    logging.getLogger("sdpo_scale").setLevel(logging.INFO)
    if os.environ.get("DROPS_EVERYTHING") == os.environ["RANK"]:
        _drop_everything()
    _run_out_of_memory_at(int(os.environ.get("OUT_OF_MEMORY_AT", "0")))
    called = _record_collectives() if "COLLECTIVES" in os.environ else []
    for path in paths:
        if "TUNES" in os.environ:
            _tune(os.environ["TUNES"], read_arguments(backend, path))
        args = read_arguments(backend, path)
        trainer = SDPOTrainer(args=args)
        if int(os.environ.get("STOP_AT", "0")):
            trainer.add_callback(_stop_after(int(os.environ["STOP_AT"])))
        trainer.train(args.resume_from_checkpoint)
        if called:
            with open(f"{os.environ['COLLECTIVES']}.{os.environ['RANK']}", "w") as file:
                json.dump(called, file)
        _check_backend(backend, trainer)
        if "UNITS" in os.environ:
            _append_units(os.environ["UNITS"], trainer)
        trainer.save_model()
        if trainer.inputs.eval is not None:
            trainer.evaluate()  # to compare with the saved model
        trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def read_arguments(backend: str, path: str) -> Any:
    """The config of a run under a backend, which is ready when this returns."""
    if backend == "fsdp2":
        os.environ.update({**_FSDP2, **os.environ})  # what a launcher has set wins
    changes = _prepare_deepspeed() if backend.startswith("zero") else []
    from accelerate.utils import DistributedType

    from sdpo_scale.options import read_config

    args = read_config(path, changes)
    if backend == "fsdp2":
        _ = args.device
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return args


def _tune(path: str, args: Any) -> None:
    """Measures first, and writes what this rank has found."""
    from sdpo_scale.reporting.tune import tune

    with open(f"{path}.{os.environ['RANK']}", "w") as file:
        json.dump(tune(args), file)


def _stop_after(step: int) -> Any:
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == step

    return StopAfter()


def _run_out_of_memory_at(step: int) -> None:
    """In a backward of the last rank, from then on."""
    import torch

    from sdpo_scale.trainer import SDPOTrainer

    backward = SDPOTrainer._backward

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step + 1 == step:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        backward(self, *args, **kwargs)

    if step and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        SDPOTrainer._backward = fail


def _record_collectives() -> list[str]:
    """Names of the collectives that are called from now on, in order."""
    import torch.distributed as dist

    called: list[str] = []

    def recorded(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        setattr(dist, name, recorded(name))
    return called


def _append_units(path: str, trainer: Any) -> None:
    """One line: names of the modules that gather their shards, and this rank's bytes of them."""
    from torch.distributed.fsdp import FSDPModule

    model = trainer.model_wrapped
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    own = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    with open(f"{path}.{os.environ['RANK']}", "a") as file:
        print(json.dumps({"units": units, "bytes": own}), file=file)


def _drop_everything() -> None:
    import numpy as np

    import sdpo_scale.draws

    sdpo_scale.draws.poisson = lambda probabilities, uniforms_N: np.zeros(len(probabilities), bool)


def _prepare_deepspeed() -> list[str]:
    import deepspeed
    from accelerate import PartialState

    # its shared-memory collectives are compiled at first use; gloo does without
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return ["--accelerator_config", "{use_configured_state: true}", "--use_cpu", "false"]


def _check_backend(backend: str, trainer: Any) -> None:
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    parameter = next(trainer.model_wrapped.parameters())
    found = {
        "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "fsdp2": isinstance(parameter, DTensor),
        "zero2": hasattr(trainer.model_wrapped, "zero_optimization_stage"),
        "zero3": hasattr(parameter, "ds_id"),
    }
    assert found[backend], f"this is not {backend}"


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's threads may abort a process, now and then, as Python finalizes
