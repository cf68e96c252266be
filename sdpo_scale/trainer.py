"""SDPOTrainer: the step's place in the transformers Trainer."""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from sdpo_scale.callbacks import (
    MetricsFile,
    PhaseNames,
    ProgressBar,
    StepLog,
    StopSignal,
    peak_memory_bytes,
    will_log,
)
from sdpo_scale.card import write_model_card
from sdpo_scale.checkpoints import Checkpoints, restore_history, saving_in
from sdpo_scale.checks import AdapterCheck, check_first_step, check_packed_pair
from sdpo_scale.config import SDPOConfig
from sdpo_scale.data.loader import StepPairs
from sdpo_scale.draws import PruningHistory, StepDraw
from sdpo_scale.inputs import prepare_inputs
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.export import check_whole_model, save_adapted
from sdpo_scale.modeling.loading import matmul_parameters, prepare_model
from sdpo_scale.modeling.logprobs import TokenLogprobs
from sdpo_scale.packing.layout import PackLayout
from sdpo_scale.record import Ranks, StepResult
from sdpo_scale.references import Reference
from sdpo_scale.scoring import RunPairs, ScoredError, sum_over_batches
from sdpo_scale.sharding import Sharding
from sdpo_scale.step import StepOptions, run_step
from sdpo_scale.token_limit import TokenLimit
from sdpo_scale.trl_options import PER_DEVICE, check_arguments, take_quantization
from sdpo_scale.tuning import Tuner

__all__ = ["SDPOTrainer"]

logger = logging.getLogger(__name__)


class SDPOTrainer(Trainer):
    """Trains a causal language model with DPO on packed pairs.

    Gradient accumulation is 1 throughout: one batch of the data loader holds the pairs of a whole
    optimizer step, and micro-batches are made inside :meth:`training_step`. Overridden hooks of
    ``Trainer``:

    * ``get_..._dataloader``, ``get_total_train_batch_size``: a batch is all pairs of a step.
    * ``train``: fills the reference cache and runs the checks before the first step.
    * ``training_step``: one whole optimizer step, by ``step.run_step``.
    * ``evaluation_loop``, ``log``: TRL's metrics from sums over pairs, and those of pruning.
    * ``create_scheduler``: scores a sharded reference.
    * ``save_model``: the whole model, however it is sharded.
    * ``_save_checkpoint``: complete or absent.
    * ``floating_point_ops``, ``create_model_card``: say what was executed and how.
    """

    args: SDPOConfig
    model: PreTrainedModel
    only_tunes = False  # what `sdpo-scale tune` runs sets it: ``auto`` is not looked up

    def __init__(  # noqa: PLR0913  # TRL's
        self,
        model: PreTrainedModel | str | None = None,
        ref_model: PreTrainedModel | str | None = None,
        args: SDPOConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **others: Any,
    ) -> None:
        """Prepares data and model.

        Args:
            model: policy, its folder or its Hub name, or those of a LoRA adapter; ``args.model`` if
                not given.
            ref_model: reference, in the same forms; if not given, the model as it is now.
            args: options; defaults if not given.
            train_dataset: pairs in any form that ``args.train_dataset`` accepts, a
                ``datasets.Dataset`` or a list of rows.
            eval_dataset: pairs to evaluate on, in the same forms.
            processing_class: tokenizer; that of ``args`` if not given.
            quantization_config: of a model by name, as TRL's scripts give it.
            peft_config: ``peft.LoraConfig`` of a new adapter to train instead of the model.
            callbacks: as for ``Trainer``.
            optimizers: as for ``Trainer``.
            others: TRL's other arguments, which must be None.

        Raises:
            ValueError: an option or model that cannot be used.
            DataError: an unusable row.
        """
        args = args if args is not None else SDPOConfig()
        check_arguments(others, args)
        take_quantization(args, quantization_config, model)
        self.inputs = inputs = prepare_inputs(
            args,
            model=model,
            tokenizer=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            ref_model=ref_model,
            peft_config=peft_config,
        )
        if inputs.eval is None:
            args.eval_on_start = False
        super().__init__(
            model=inputs.model,
            args=args,
            train_dataset=inputs.train,
            eval_dataset=inputs.eval,
            processing_class=inputs.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._train_batch_size = PER_DEVICE  # what checkpoints compare it to
        self.remove_callback(PrinterCallback)
        self.add_callback(MetricsFile(args.output_path / "metrics.jsonl"))
        self._dtype: torch.dtype = args.compute_dtype or self.model.dtype
        prepare_model(self.model, device=args.device, compute_dtype=self._dtype)
        self._sharding = Sharding(self.accelerator, reduction=args.gradient_reduction)
        self._sharding.share_buffers(self.model)
        self._reference = Reference(inputs, args, self._sharding)
        self._sharding.check_same(inputs.fingerprints(args))
        self._pruning = args.pruning_options
        execution = self._pruning.execution(recomputes=bool(args.activation_checkpointing))
        self._recompute = PrunedRecompute.bind(self.model) if execution == "checkpoint" else None
        self._options = StepOptions(
            objective=args.objective,
            beta=args.beta,
            label_smoothing=args.label_smoothing,
            max_tokens=args.max_tokens,  # as ``run_pairs`` is told, or the limit
            recomputes=bool(args.activation_checkpointing) or execution == "checkpoint",
            hidden_size=self.model.config.hidden_size,
            device=args.device,
        )
        self.tuner = Tuner(args, inputs, self._sharding, run=self.run_pairs)
        if not self.only_tunes:
            self.tuner.complete(self.model)
        self._checkpoints = Checkpoints(
            args.output_path,
            ranks=self._sharding.ranks,
            keep=args.save_total_limit,
            options={**inputs.fingerprints(args), "sharding": self._sharding.name},
        )
        self.stop_signal = StopSignal(self._sharding.ranks, args.device)
        self.add_callback(self.stop_signal)
        if inputs.adapter is not None:
            self.add_callback(AdapterCheck(self._sharding.ranks.sum))
        self.add_callback(PhaseNames())
        self._limit = TokenLimit(
            args.output_path,
            configured=args.max_tokens,
            longest=int(inputs.train.lengths.sum(axis=1).max()),
            world_size=self._sharding.ranks.world_size,
        )
        self.step_log = StepLog(
            beta=args.beta,
            num_parameters=matmul_parameters(self.model),
            recomputes=self._options.recomputes,
            is_pruned=self._pruning.is_active,
        )
        self.add_callback(ProgressBar(lambda: self.step_log.numbers))
        self._history = PruningHistory()
        if self._pruning.is_active:
            logger.info("pruning: %s (%s)", args.pruning, execution)
        self._pairs = RunPairs(inputs, args)
        self._only_scores = self._is_rehearsed = False

    def score(self) -> dict[str, int]:
        """Fills the reference cache for the pairs of the run, with the model as it is now.

        Returns:
            ``pairs`` that the run uses and how many of them were ``scored`` in this call.

        Raises:
            NonFiniteError: a log-probability is NaN or infinite.
        """
        self._open_reference()
        num_scored = 0
        if not self._sharding.shards_parameters:
            num_scored = self._score(self.model)
        elif not self._pairs.is_scored:
            self._only_scores = True
            try:
                super().train()
            except ScoredError as scored:
                num_scored = scored.num_pairs
        return {"pairs": self._pairs.num_pairs, "scored": num_scored}

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Trains; arguments as for ``Trainer.train``; ``auto`` resumes where there is a checkpoint.

        Raises:
            ValueError: the checkpoint cannot be resumed from.
        """
        checkpoint = self._checkpoints.resolve(resume_from_checkpoint)
        if checkpoint is not None:
            self.args.eval_on_start = False  # "on start" is step 0, which the resumed run has had
            self._sharding.before_resume(checkpoint)
            if self._pruning.is_active:
                restore_history(checkpoint, self._history)
        self._open_reference()
        if not self._sharding.shards_parameters:
            self._before_training(self.model)
        return super().train(str(checkpoint) if checkpoint else None, *args, **kwargs)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Creates the scheduler; where parameters are sharded, the reference is scored here.

        ``Trainer`` calls it when shards have been made and no checkpoint has been loaded into them:
        the one moment when the policy is the reference and can run.
        """
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        sharded = self._sharding.sharded(self.model)
        if sharded is not None:
            self._before_training(sharded)
        return scheduler

    def get_train_dataloader(self) -> DataLoader:
        """Batches of ``train_batch_size`` pairs; their order is a function of seed and epoch."""
        return self._pairs.train_loader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The evaluation pairs in batches, in their order."""
        self._open_reference()
        loader = self._pairs.eval_loader(eval_dataset or self.eval_dataset)
        self.score()
        return loader

    def get_total_train_batch_size(self, args: Any) -> int:
        """Pairs of an optimizer step over all ranks."""
        return self.args.train_batch_size

    def training_step(
        self,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """One optimizer step's loss and gradient; ``Trainer`` then clips and updates.

        Args:
            model: the wrapped model.
            inputs: ``StepPairs``, the step's pairs and their reference log-probabilities.
            num_items_in_batch: unused; ``run_step`` owns the normalization.

        Returns:
            float [], the mean loss over the step's pairs.

        Raises:
            NonFiniteError: names the pairs.
        """
        model.train()
        is_first_update = self.state.global_step == 0 and not self._is_rehearsed
        if not self._is_rehearsed:
            self._rehearse(model)
        start = time.perf_counter()
        result = self._run_step(model, inputs)
        if result.observations is not None:
            self._history.observe(result.observations)
        if is_first_update and self.inputs.starts_at_reference(self.args):
            check_first_step(result.metrics, options=self._options, dtype=self._dtype)
        seconds = time.perf_counter() - start
        self.step_log.add(result, device=self.args.device, seconds=seconds)
        self.state.num_input_tokens_seen += sum(
            2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in inputs[0]
        )
        return torch.tensor(result.metrics.loss, device=self.args.device)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Metrics over all pairs of the loader, each pair weighing the same."""
        model = self.model_wrapped if self.is_in_train else self.model
        was_training = model.training
        model.eval()
        start = time.perf_counter()
        run = partial(self.run_pairs, model, weight=None, with_statistics=True)
        sums = sum_over_batches(dataloader, run)
        model.train(was_training)
        speed = sums.num_pairs / (time.perf_counter() - start)
        metrics = {"loss": sums.loss, **sums.means(beta=self.args.beta), "pairs_per_second": speed}
        return EvalLoopOutput(
            predictions=None,  # type: ignore[arg-type]  # metrics only, as with prediction_loss_only
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": v for name, v in metrics.items()},
            num_samples=sums.num_pairs,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics of the steps since the last call."""
        if "loss" in logs and self.step_log.has_steps:
            line = self.step_log.line(
                logs.get("grad_norm"),
                max_grad_norm=self.args.max_grad_norm,
                earlier=self.state.log_history,
            )
            logs.update(line)
            logs["num_tokens"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the whole model in Hugging Face layout, or the adapter in peft's, for any sharding.

        Raises:
            RuntimeError: what was written is not whole.
        """
        is_checkpoint = _internal_call and output_dir is not None
        folder = Path(output_dir or self.args.output_path)
        if self.inputs.adapter is not None:
            save_adapted(
                self.model,
                folder,
                gather=partial(self._sharding.gather, keeps=self.args.should_save),
                merges=self.args.merge_adapter and not is_checkpoint,
                tokenizer=self.inputs.tokenizer if self.args.should_save else None,
            )
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            return
        if not _internal_call:  # not a checkpoint's, which stay sharded
            self._sharding.export_whole()
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and not is_checkpoint:
            check_whole_model(folder, self.model.config)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves where nobody looks, and renames what is complete; no public hook surrounds it."""
        history = self._history if self._pruning.is_active else None
        best, step = self.state.best_model_checkpoint, self.state.global_step
        with (
            self._checkpoints.writing(step, history=history, protected=best) as aside,
            saving_in(aside, self.args, self.state),
        ):
            super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(self.args.output_path / f"checkpoint-{step}"))

    def floating_point_ops(self, inputs: Any) -> int:
        """FLOPs executed in the latest step."""
        return self.step_log.num_flops

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes README.md in the output folder: what was trained, on what, with which options.

        Args:
            args: not used.
            kwargs: of ``Trainer.create_model_card``, ``model_name`` (title), ``dataset`` and
                ``tags``.
        """
        if self.is_world_process_zero():
            known = {name: kwargs.get(name) for name in ("model_name", "dataset", "tags")}
            write_model_card(self.args, self.inputs, num_steps=self.state.global_step, **known)

    def run_pairs(
        self,
        model: nn.Module,
        inputs: StepPairs,
        *,
        weight: float | None,
        with_statistics: bool = False,
        draw: StepDraw | None = None,
        ranks: Ranks | None = None,
        max_tokens: int | None = None,
    ) -> StepResult:
        """A step whose gradient is multiplied by ``weight``: 0 is no step, None evaluates only."""
        pairs, reference = inputs
        return run_step(
            pairs,
            reference,
            options=replace(
                self._options,
                with_statistics=with_statistics,
                max_tokens=max_tokens or self._limit.max_tokens,
                score_max_tokens=self.args.score_max_tokens or 2 * self.args.max_tokens,
            ),
            forward=partial(self._forward, model, updates=bool(weight)),
            backward=partial(self._backward, model, weight) if weight is not None else None,
            draw=draw,
            recompute=self._recompute if weight is not None else None,
            ranks=self._sharding.ranks if ranks is None else ranks,
        )

    def _run_step(self, model: nn.Module, inputs: StepPairs | None) -> StepResult:
        """A step, or without pairs the rehearsal; repeated in smaller packs if it does not fit."""
        while True:
            try:
                if inputs is None:
                    longest = self._pairs.fullest_pack(self._limit.max_tokens)
                    # weight 0, since not every backend can take gradients back; the same on each
                    return self.run_pairs(
                        model, longest, weight=0.0, with_statistics=True, ranks=Ranks()
                    )
                logs = will_log(self.args, self.state)
                run = partial(self.run_pairs, model, inputs, with_statistics=logs)
                return run(weight=1.0, draw=self.step_draw())
            except torch.OutOfMemoryError as error:
                self._limit.lower(error, step=self.state.global_step + 1)
            model.zero_grad()  # outside of the handler, whose traceback holds the step's tensors

    def _forward(
        self,
        model: nn.Module,
        layout: PackLayout,
        *,
        updates: bool = False,
        is_last: bool = False,
        **options: bool,
    ) -> TokenLogprobs:
        # evaluation and scoring may come before Accelerate has wrapped the forward in autocast
        micro_batch = self._sharding.micro_batch(model, is_last=is_last and updates)
        with micro_batch, self.accelerator.autocast():
            return model(pack=layout, **options)

    def _backward(self, model: nn.Module, weight: float, loss: Tensor, is_last: bool) -> None:
        with self._sharding.micro_batch(model, is_last=is_last and weight > 0):
            self._sharding.backward(loss * weight)

    def _open_reference(self) -> None:
        self._pairs.open(self._reference.key)

    def _score(self, model: nn.Module) -> int:
        missing = self._pairs.num_missing(self._sharding.ranks)
        with self._reference.running(model, num_missing=missing) as reference:
            return self._pairs.score(
                partial(self._logprobs, reference),
                ranks=self._sharding.ranks,
                hidden_size=self._options.hidden_size,
            )

    def _before_training(self, model: nn.Module) -> None:
        """Scores the reference and checks packs, with the parameters of the start."""
        num_scored = self._score(model)
        if self._only_scores:
            raise ScoredError(num_scored)
        if len(self.inputs.train) > 1:
            forward = partial(self._logprobs, model)
            check_packed_pair(model, self._pairs.shortest_two(), forward=forward, dtype=self._dtype)

    def _logprobs(self, model: nn.Module, layout: PackLayout) -> Tensor:
        return self._forward(model, layout).logprobs_R

    def _rehearse(self, model: nn.Module) -> None:
        """Runs the run's longest pack once, so that running out of memory happens now or never."""
        result = self._run_step(model, None)
        model.zero_grad()
        self._sharding.before_first_step(self.optimizer, self.state.global_step)
        self._is_rehearsed = True
        logger.info(
            "check: longest pack rehearsed: %d pairs, %d tokens, peak memory %.2f GiB",
            result.metrics.num_pairs,
            result.counts.executed_tokens,
            peak_memory_bytes(self.args.device) / 2**30,
        )

    def step_draw(self) -> StepDraw | None:
        """The chance of the step that comes next; None if nothing is pruned."""
        if not self._pruning.is_active:
            return None
        return StepDraw(
            options=self._pruning,
            history=self._history,
            seed=self.args.seed,
            step=self.state.global_step,
        )
