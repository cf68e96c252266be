"""Tiny tokenizers built in memory, so that expected ids can be worked out by hand.

A character BPE without a pre-tokenizer: one token per printable ASCII character and newline, plus
four merges that can join characters across a prompt/response border: " $", ":)", "ab" and two
newlines. Ids: 0-7 special tokens, 8 newline, 9 space, then the other characters by code point,
104-107 the merges.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL_TOKENS = (
    *("<pad>", "<s>", "</s>", "<unk>"),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
)
MERGES = ((" ", "$"), (":", ")"), ("a", "b"), ("\n", "\n"))
_CHARACTERS = ("\n", *map(chr, range(32, 127)))
VOCABULARY = {
    token: number
    for number, token in enumerate((*SPECIAL_TOKENS, *_CHARACTERS, *map("".join, MERGES)))
}
# What the tokenizer adds to a text by itself.
_ADDED = {"bos": "<s> $A", "bos_eos": "<s> $A </s>"}
_DEFAULTS = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
_TURN_END = {"bos": None, "eos": "<|im_end|>"}  # no begin token, the end of a turn ends the text
_VARIANTS: dict[str, dict[str, str | None]] = {
    "plain": {},
    "bos": {"adds": "bos", "template": "chatml_bos"},
    "boseos": {"adds": "bos_eos", "template": "chatml"},
    "chatml": {**_TURN_END, "template": "chatml"},
    "think_strip": {**_TURN_END, "template": "think_strip"},
    "think_open": {**_TURN_END, "template": "think_open"},
    "tools": {**_TURN_END, "template": "tools"},
    "qwen3": {**_TURN_END, "template": "qwen3"},
    "strict": {"template": "strict_roles"},
    "no_eos_template": {"template": "no_eos"},
    "pad_is_eos": {"pad": "</s>"},
    "nopad": {"pad": None},
    "nothing": {"bos": None, "eos": None, "pad": None},
}


def build(name: str = "plain") -> PreTrainedTokenizerFast:
    """The toy tokenizer of that name; each call builds a new one."""
    variant = {**_DEFAULTS, **_VARIANTS[name]}
    backend = Tokenizer(models.BPE(vocab=VOCABULARY, merges=list(MERGES), unk_token="<unk>"))
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    backend.add_special_tokens(special)
    backend.decoder = decoders.Fuse()
    added = variant.get("adds")
    if added:
        backend.post_processor = processors.TemplateProcessing(
            single=_ADDED[added], special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    roles = {f"{role}_token": variant[role] for role in ("bos", "eos", "pad") if variant[role]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles
    )
    tokenizer.name_or_path = f"toy/{name}"
    template = variant.get("template")
    if template:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
    return tokenizer
