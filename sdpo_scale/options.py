"""Reading an SDPOConfig from a YAML file and the command line."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sdpo_scale import demo
from sdpo_scale.config import SDPOConfig, nearest
from sdpo_scale.memory.architectures import ARCHITECTURES
from sdpo_scale.trl_options import AUTO, REMOVED

__all__ = ["ALIASES", "parse_yaml", "read_config", "read_options"]

ALIASES = {
    "model_name_or_path": "model",
    "tokenizer_name_or_path": "tokenizer",
    "dataset_name": "train_dataset",
    "train_file": "train_dataset",
    "eval_file": "eval_dataset",
    "validation_file": "eval_dataset",
    "dataset_train_split": "train_split",
    "dataset_test_split": "eval_split",
    "ref_model_name_or_path": "ref_model",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Names that users of TRL, transformers and their examples type → the field here."""


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2: ``5e-7`` is a number, ``no`` is text, ``true`` a truth."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)
for _character in "yYnNoO":
    _Loader.yaml_implicit_resolvers[_character] = [
        (tag, pattern)
        for tag, pattern in _Loader.yaml_implicit_resolvers[_character]
        if tag != "tag:yaml.org,2002:bool"
    ]


def read_config(path: str, arguments: Sequence[str] = ()) -> SDPOConfig:
    """Reads a YAML file and command-line overrides into a config; see ``read_options``.

    Raises:
        ValueError: as there, or a failed check.
        FileNotFoundError: there is no such file.
    """
    return SDPOConfig(**read_options(path, arguments))


def read_options(path: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a YAML file and command-line overrides.

    Args:
        path: a YAML file, or ``demo`` for the demonstration's; or the name of an
            architecture, for a config of it alone.
        arguments: ``--field value`` or ``--field=value``; a field without a value is set to true.

    Returns:
        Fields of ``SDPOConfig`` → values of their types.

    Raises:
        ValueError: unknown option (with the nearest name), or a value of the wrong type.
        FileNotFoundError: there is no such file.
    """
    options = {"model": path} if path in ARCHITECTURES else _file_options(path)
    fields = {f.name: f.type for f in dataclasses.fields(SDPOConfig)}
    options.update(_parse_arguments(arguments, fields))
    return {n: _checked_value(n, v, annotation=fields[n]) for n, v in options.items()}


def _file_options(path: str) -> dict[str, Any]:
    file = demo.config_path() if path == "demo" else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"config file {path!r} does not exist")
    values = parse_yaml(file.read_text("utf-8"), where=str(file)) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{file}: a config is a mapping of options, got {type(values).__name__}")
    return {_field_name(str(name), where=str(file)): value for name, value in values.items()}


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text, with the scalars of YAML 1.2.

    Raises:
        ValueError: it is not YAML; ``where`` says which text it is.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {error}") from error


def _parse_arguments(arguments: Sequence[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        token = remaining.pop(0)
        if not token.startswith("--"):
            raise ValueError(f"expected --field value, got {token!r}")
        name, equals, text = token[2:].partition("=")
        if not equals:
            has_value = bool(remaining) and not remaining[0].startswith("--")
            text = remaining.pop(0) if has_value else "true"
        name = _field_name(name, where="command line")
        is_text = fields[name] in (str, str | None) and text not in ("null", "~")
        options[name] = text if is_text else parse_yaml(text, where=f"option {name}: {text!r}")
    return options


def _field_name(name: str, *, where: str) -> str:
    name = name.replace("-", "_")
    name = ALIASES.get(name, name)
    if name in REMOVED:
        raise ValueError(f"{where}: option {name!r} is refused: {REMOVED[name]}")
    known = [f.name for f in dataclasses.fields(SDPOConfig)]
    if name not in known:
        raise ValueError(f"{where}: unknown option {name!r}{nearest(name, [*known, *ALIASES])}")
    return name


def _checked_value(name: str, value: Any, *, annotation: Any) -> Any:
    """The value, with whole numbers made float where the field is one.

    Raises:
        ValueError: names the option and the value that does not have its type.
    """
    if value == "auto" and name in AUTO:
        return value
    is_union = isinstance(annotation, types.UnionType)
    accepted = typing.get_args(annotation) if is_union else (annotation,)
    if not all(isinstance(t, type) and t in (bool, int, float, str, type(None)) for t in accepted):
        return value
    if float in accepted and type(value) is int:
        return value if int in accepted or name.endswith("_steps") else float(value)
    if int in accepted and float not in accepted and type(value) is float and value.is_integer():
        return int(value)
    if type(value) not in accepted:
        wanted = " or ".join("nothing" if t is type(None) else t.__name__ for t in accepted)
        raise ValueError(f"option {name}: {value!r} is not {wanted}")
    return value
