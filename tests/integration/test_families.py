"""Runs of families whose files, layers or heads differ from a Llama's, from files to files."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sdpo_scale import SDPOTrainer
from sdpo_scale.modeling.loading import matmul_parameters
from tests.helpers.runs import config, read_lines, save_model, steps_of, text_rows, write_rows
from tests.helpers.tiny_models import build

FAMILIES = ("phi", "gpt2", "gpt_neox", "cohere2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_run_starts_at_margin_0_and_saves_what_it_trained(
    family: str, bf16: bool, tmp_path: Path
):
    args = config(
        tmp_path,
        model=save_model(tmp_path / "model", family=family),
        train_dataset=write_rows(tmp_path / "train.jsonl", text_rows(8)),
        pruning="exact-budget",
        bf16=bf16,
        activation_checkpointing=True,
        max_steps=2,
    )
    trainer = SDPOTrainer(args=args)
    trainer.train()
    trainer.save_model()
    first, _ = steps_of(read_lines(args.output_path / "metrics.jsonl"))
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-2 if bf16 else 1e-5)
    assert first["grad_norm"] > 0
    loaded, info = AutoModelForCausalLM.from_pretrained(args.output_path, output_loading_info=True)
    assert {name: set(keys) for name, keys in info.items() if keys} == {}
    state = trainer.model.state_dict()
    before = AutoModelForCausalLM.from_pretrained(args.model).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    unmoved = [n for n, p in loaded.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []


def test_SHD_10_layers_of_experts_are_recomputed_as_they_were_computed(tmp_path: Path):
    model = save_model(tmp_path / "model", family="mixtral", use_cache=True)
    changes = {
        "model": model,
        "train_dataset": write_rows(tmp_path / "train.jsonl", text_rows(8)),
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    saved = {}
    for recomputes in (False, True):
        folder = tmp_path / str(recomputes)
        trainer = SDPOTrainer(args=config(folder, activation_checkpointing=recomputes, **changes))
        trainer.train()
        saved[recomputes] = trainer.model.state_dict()
    for name, expected in saved[False].items():
        assert torch.allclose(saved[True][name], expected, rtol=1e-5, atol=1e-7), name


def test_a_run_without_the_routers_loss_takes_a_config_that_asks_for_it(tmp_path: Path):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    model = save_model(tmp_path / "model", family="mixtral", **options)
    rows = write_rows(tmp_path / "train.jsonl", text_rows(4))
    changes = {"model": model, "train_dataset": rows, "max_steps": 1}
    with pytest.raises(ValueError, match="output_router_logits: false"):
        SDPOTrainer(args=config(tmp_path, **changes))
    kwargs = {"output_router_logits": False}
    SDPOTrainer(args=config(tmp_path, model_init_kwargs=kwargs, **changes)).train()


@pytest.mark.parametrize("pruning", ["off", "exact-budget"])
def test_SHD_10_experts_are_recomputed_once_whatever_the_config_says_of_caches(
    pruning: str, tmp_path: Path
):
    """A cache of keys that grew in a recomputation, or another routing, would change its shapes."""
    model = save_model(tmp_path / "model", family="mixtral", use_cache=True)
    rows = write_rows(tmp_path / "train.jsonl", text_rows(8))
    numbers, forwards = {}, {}
    for recomputes in (False, True):
        args = config(
            tmp_path / str(recomputes),
            model=model,
            train_dataset=rows,
            pruning=pruning,
            pruning_kwargs={"branch_execution": "two_pass"} if pruning != "off" else None,
            activation_checkpointing=recomputes,
            max_steps=2,
        )
        trainer = SDPOTrainer(args=args)
        counts: list[bool] = []
        layer = trainer.model.model.layers[0].self_attn
        layer.register_forward_pre_hook(
            lambda *_, seen=counts: seen.append(torch.is_grad_enabled())
        )
        trainer.train()
        lines = steps_of(read_lines(args.output_path / "metrics.jsonl"))
        numbers[recomputes] = [(line["loss"], line["grad_norm"]) for line in lines]
        forwards[recomputes] = sum(counts)
    for with_it, without in zip(numbers[True], numbers[False], strict=True):
        assert with_it == pytest.approx(without, rel=1e-5)
    assert forwards[True] == 2 * forwards[False] > 0


def test_of_a_layers_experts_those_count_that_a_token_passes_through():
    found = matmul_parameters(build("mixtral", num_hidden_layers=1))["body_parameters"]
    experts = 4 * 3 * 64 * 32
    rest = matmul_parameters(build("mixtral", num_hidden_layers=1, num_experts_per_tok=4))
    assert rest["body_parameters"] - found == experts // 2
    assert math.isclose(found, experts // 2 + 32 * 32 * 2 + 32 * 16 * 2, rel_tol=0.05)


def test_position_tables_are_in_no_matrix_product():
    model = build("gpt2")
    found = matmul_parameters(model)["body_parameters"]
    assert found == sum(p.numel() for p in model.transformer.h.parameters()) + 2 * 32
