"""What a run leaves behind is read by transformers alone, and by people."""

from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo_scale import SDPOTrainer
from tests.helpers.runs import (
    chat_rows,
    config,
    read_lines,
    save_model,
    text_rows,
    write_rows,
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> SDPOTrainer:
    """A run of two steps with checkpointing, saved as `sdpo-scale train` saves it."""
    folder = tmp_path_factory.mktemp("export")
    args = config(
        folder,
        model=save_model(folder / "model", "chatml"),
        train_dataset=write_rows(folder / "train.jsonl", chat_rows(6)),
        activation_checkpointing=True,
        save_strategy="steps",
        save_steps=1,
        max_steps=2,
    )
    trainer = SDPOTrainer(args=args)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(tags="tiny")
    return trainer


@pytest.mark.parametrize("place", [".", "checkpoint-2"], ids=["model", "checkpoint"])
def test_the_saved_model_has_the_logits_of_the_trained_one(place: str, trainer: SDPOTrainer):
    loaded, info = AutoModelForCausalLM.from_pretrained(
        trainer.args.output_path / place, output_loading_info=True
    )
    assert {name: set(keys) for name, keys in info.items() if keys} == {}
    expected = trainer.model.eval()
    assert type(loaded) is type(expected)
    ids = torch.randint(0, 108, (2, 30))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    base = AutoModelForCausalLM.from_pretrained(trainer.args.model)
    assert not torch.equal(loaded.lm_head.weight, base.lm_head.weight)
    assert loaded.config._attn_implementation == base.config._attn_implementation


def test_the_saved_model_generates_as_the_trained_one_does(trainer: SDPOTrainer):
    loaded = AutoModelForCausalLM.from_pretrained(trainer.args.output_path)
    prompt = {"input_ids": torch.tensor([[4, 20, 30]]), "attention_mask": torch.ones(1, 3).long()}
    texts = [
        model.generate(**prompt, max_new_tokens=8, do_sample=False)
        for model in (loaded, trainer.model.eval())
    ]
    assert torch.equal(*texts)


def test_the_saved_tokenizer_is_the_one_that_was_used(trainer: SDPOTrainer):
    loaded = AutoTokenizer.from_pretrained(trainer.args.output_path)
    used = trainer.inputs.tokenizer
    assert loaded.get_vocab() == used.get_vocab()
    assert loaded.special_tokens_map == used.special_tokens_map
    messages = chat_rows(1)[0]["prompt"]
    ids = [
        t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        for t in (loaded, used)
    ]
    assert ids[0] == ids[1]


def test_the_model_card_has_the_metadata_that_hubs_read(trainer: SDPOTrainer):
    text = (trainer.args.output_path / "README.md").read_text("utf-8")
    start, metadata, body = text.split("---\n", 2)
    assert start == ""
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "base_model": trainer.args.model,
        "tags": ["dpo", "sdpo_scale", "tiny"],
    }
    assert ModelCard(text).data.base_model == trainer.args.model
    for part in ("| preference pairs | 6 (", "sigmoid, beta 0.1", "| optimizer steps | 2 |"):
        assert part in body


def test_the_card_of_a_model_given_in_python_names_no_base_model(
    trainer: SDPOTrainer, tmp_path: Path
):
    model = AutoModelForCausalLM.from_config(trainer.model.config)
    model.config._name_or_path = ""
    other = SDPOTrainer(
        model=model,
        args=config(tmp_path),
        train_dataset=chat_rows(3),
        processing_class=trainer.inputs.tokenizer,
    )
    other.create_model_card()
    text = (tmp_path / "output" / "README.md").read_text("utf-8")
    assert ModelCard(text).data.base_model is None
    assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
    assert "None" not in text
    assert "\n, aligned" not in text


def test_rows_that_were_left_out_are_listed(tmp_path: Path):
    rows = text_rows(5)
    rows[1]["chosen"] = None
    rows[3]["rejected"] = rows[3]["chosen"]
    train = write_rows(tmp_path / "train.jsonl", rows)
    evaluation = write_rows(tmp_path / "eval.jsonl", [{"prompt": "a"}, *text_rows(2)])
    args = config(
        tmp_path,
        model=save_model(tmp_path / "model"),
        train_dataset=train,
        eval_dataset=evaluation,
        on_bad_row="skip",
    )
    trainer = SDPOTrainer(args=args)
    assert len(trainer.inputs.train) == 3
    listed = read_lines(tmp_path / "output" / "skipped_rows.jsonl")
    places = [(e["data"], e["file"], e["row"], e["line"], e["column"]) for e in listed]
    assert places == [
        ("train", str(train), 1, 2, "chosen"),
        ("train", str(train), 3, 4, "rejected"),
        ("eval", str(evaluation), 0, 1, "chosen"),
    ]
    assert "null" in listed[0]["reason"]
    assert "identical to chosen" in listed[1]["reason"]
