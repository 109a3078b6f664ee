"""Flags from the fields of a dataclass: their declaration, parser, conversion, and files of them.

A field's type gives the conversion: int, float, str, bool, a tuple of them, each also with None.
"""

import argparse
import ast
import contextlib
import dataclasses
import math
import sys
import time
import types
import typing
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from onecurve.system.cli import EMPTY, CommandParser, tell_launchers, underscores
from onecurve.system.env import is_hosts_first
from onecurve.system.files import parse_json, read_yaml, unique_keys
from onecurve.system.paths import ROOT
from onecurve.system.text import did_you_mean, is_printable, message_text, shortened, some_of

LARGEST = 1e15  # of any flag's number
RECIPES = Path(__file__).with_name("recipe.py")  # declares the flags that scripts share

SYNONYMS = {"lr": ("learning_rate",)}  # further names of a flag
# Flags that have left: the value without effect, and the reason
LEFT = {"half_residual": (False, "it was slower and saved no memory")}


def without_left(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recorded recipe without the flags that have left, unless they changed the training."""
    return {name: value for name, value in recipe.items() if name not in LEFT or value != LEFT[name][0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Answers to the questions that other code asks about a flag. The defaults are safe for a new flag.

    A flag declares what differs from the defaults. Where a subclass declares the flag again, the facts of the
    first declaration remain.
    """

    part_of_recipe: bool = True  # changes what is trained: a resumed run must have the same value
    per_host: bool = False  # ranks may have different values; different values of other flags end the job
    is_path: bool = False  # may be a local path: two spellings of one path are equal
    locates: str = ""  # changes only where files are: "results" or "cache"
    measures_best: bool = False  # changes the metric or the images by which the best checkpoint is chosen
    decides_defaults: bool = False  # other flags' defaults depend on its value
    initial_weights: bool = False  # chooses weights to start from
    training_only: bool = False  # a trained model is built and used without it; can be switched off
    drawn_on_device: bool = False  # its random numbers differ between kinds of device
    changes_memory: bool = True  # the memory of a training step may depend on it
    replayed: bool = False  # a setting that verify.py repeats, because logged numbers or bits depend on it
    in_names: int = 0  # its position in the name that a comparison gives to a run; 0: only if names are equal


def flag(
    default: Any,
    help: str = "",
    *,
    choices: tuple = (),
    minimum: float = -math.inf,
    maximum: float = math.inf,
    per_script: bool = False,
    also: tuple[str, str] = ("", ""),
    part_of_recipe: bool = True,
    **facts: Any,
) -> Any:
    """Declares a field of a recipe as a flag about what is trained. facts: see Facts.

    help: empty where flags.yaml has it, as it takes more than a line. per_script: each script's
    recipe declares its own default. also: another name, and what its value means, as ("model_folder",
    "{}/*").
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "also": also}
    facts |= {"part_of_recipe": part_of_recipe}
    Facts(**facts)  # refuses an unknown fact
    return dataclasses.field(default=default, metadata=metadata | {"per_script": per_script, "facts": facts})


def setting(default: Any, help: str = "", **options: Any) -> Any:
    """Declares a flag about where or how to run, not about what is trained. options: see flag()."""
    return flag(default, help, part_of_recipe=False, **options)


@cache
def facts_of(recipe_class: type) -> dict[str, Facts]:
    """Return the facts about each flag of a recipe."""
    facts: dict[str, dict[str, Any]] = {}
    for base in filter(dataclasses.is_dataclass, reversed(recipe_class.__mro__)):
        for field in dataclasses.fields(base):
            facts[field.name] = facts.get(field.name, {}) | field.metadata["facts"]
    return {name: Facts(**known) for name, known in facts.items()}


def flags_where(recipe_class: type, fact: str) -> list[str]:
    """Return the flags of a recipe for which a fact is true."""
    return [name for name, facts in facts_of(recipe_class).items() if getattr(facts, fact)]


def switched_off(field: dataclasses.Field) -> Any:
    """Return the value with which a flag has no effect: False of a switch, None of others."""
    return False if _base_type(field) is bool else None


@cache
def _declarations(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the flags that a file's classes declare, with their facts: {class: {flag: {fact: value}}}.

    The text is parsed, because importing a script takes seconds. A file with a mistake declares nothing.
    """
    with contextlib.suppress(SyntaxError, ValueError):
        statements = ast.parse(file.read_text()).body
        return {part.name: _flags_in(part) for part in statements if isinstance(part, ast.ClassDef)}
    return {}


def _flags_in(recipe: ast.ClassDef) -> dict[str, dict[str, Any]]:
    facts, flags = {"also", *(fact.name for fact in dataclasses.fields(Facts))}, dict[str, dict[str, Any]]()
    for part in recipe.body:
        if not (isinstance(part, ast.AnnAssign) and isinstance(part.value, ast.Call)):
            continue
        if ast.unparse(part.value.func) in ("flag", "setting"):
            pairs = {word.arg: word.value for word in part.value.keywords if word.arg}
            values = {name: ast.literal_eval(value) for name, value in pairs.items() if name in facts}
            flags[ast.unparse(part.target)] = values
    return flags


@cache
def declared(fact: str) -> dict[str, Any]:
    """Return {name: value} for the flags of all recipes that declare a true fact, under all of their names.

    For readers of recorded runs, whose scripts are unknown, older, or slow to import.
    """
    values: dict[str, Any] = {}
    for file in (RECIPES, *sorted(ROOT.glob("train_*.py"))):
        for flags in _declarations(file).values():
            for name, facts in flags.items():
                if value := facts.get(fact):
                    names = (name, facts.get("also", ("",))[0])
                    values |= dict.fromkeys(filter(None, names), value)
    return values


@cache
def _texts() -> dict[str, str]:
    import yaml

    return yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text())


def help_of(field: dataclasses.Field, name: str = "") -> str:
    return field.metadata["help"] or _texts()[name or field.name]


class Parser(CommandParser):
    def parse_known_args(self, args=None, namespace=None):
        """Refuse two names of one setting, as `--lr 1 --learning_rate 2`. A repeated name is fine."""
        names: dict[str, str] = {}
        for word in sys.argv[1:] if args is None else args:
            name = underscores(word).partition("=")[0]
            action = self._option_string_actions.get(name)
            if action and (first := names.setdefault(action.dest, name)) != name:
                self.error(two_names(first, name))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        """Prints one line, from one process per host. For an unknown flag it names the nearest known one."""
        if message.startswith("unrecognized arguments"):
            unknown = message.split()[2].split("=")[0]
            meant = did_you_mean(unknown, self._option_string_actions)
            near = f": {meant}" if meant else ""
            if scripts := _of_our_scripts(unknown):
                near = f"{near} {scripts}" if near else f". {scripts}"
            else:
                near = _of_others(unknown, self.prog) or near
            advice = _why_left(unknown) or near or "; --help lists them all"
            message = f"unknown flag {shortened(unknown)}{advice}"
        message = message_text(message)
        tell_launchers(message)
        self.print_once(f"{self.prog}: error: {message}\n", sys.stderr)
        if not is_hosts_first():  # a launcher kills all when one exits: the first must have printed by then
            time.sleep(5)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        self.print_once(self.format_help(), file)

    def print_once(self, text: str, file: Any = None) -> None:
        if is_hosts_first():
            print(text, end="", file=file or sys.stdout, flush=True)


def _why_left(flag: str) -> str:
    """Return why a flag has left, or an empty text for all others."""
    name = flag.lstrip("-").removeprefix("no_")
    return f": {name} has left, as {LEFT[name][1]}. Remove it" if name in LEFT else ""


def _of_our_scripts(unknown: str) -> str:
    """Return which other train scripts have this flag. Their text is searched, as imports take seconds."""
    name = unknown.removeprefix("--")
    is_shared = name in _declarations(RECIPES)["ImageRecipe"]
    scripts = [
        path.name
        for path in sorted(ROOT.glob("train_*.py"))
        if any(name in flags for flags in _declarations(path).values())
        or (is_shared and "(ImageRecipe)" in path.read_text())
    ]
    return f"{some_of(scripts)} {'has' if len(scripts) == 1 else 'have'} it" if scripts else ""


def two_names(first: str, second: str) -> str:
    return f"{first} and {second} are two names of one setting. Give one of them"


@cache
def elsewhere() -> list[dict[str, Any]]:
    """Return the names of other projects with their equivalents here, by project."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text())


def _of_others(unknown: str, script: str) -> str:
    """Return how this script does what another project's flag does; empty for a flag that none has."""
    projects = [project for project in elsewhere() if project.get("script", script) == script]
    for project in sorted(projects, key=lambda project: "script" not in project):
        for row in project["rows"]:
            if any(name[0] == "-" and underscores(name.split()[0]) == unknown for name in row["names"]):
                here = " or ".join(row.get("here", ()))
                return f". The equivalent here is {here}." if here else f". {row['note']}"
    return ""


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, unit: str) -> None:
    help = help_of(field).replace("%", "%%").replace("images", unit) + (
        "" if field.default is None else f" (default: {as_text(field.default)})"
    )
    if _base_type(field) is bool:
        # Sweeps write --padding=True; const is the value without one.
        parser.add_argument(f"--{field.name}", nargs="?", const="true", metavar="BOOL", help=help)
        parser.add_argument(
            f"--no_{field.name}", action="store_const", const="false", dest=field.name, help=argparse.SUPPRESS
        )
    else:
        choices = field.metadata["choices"]
        metavar = "MIN,MAX" if _is_range(field) else _base_type(field).__name__.upper()
        metavar = "{" + ",".join(choices) + "}" if choices else metavar
        names = [field.name, *SYNONYMS.get(field.name, ())]
        parser.add_argument(*(f"--{name}" for name in names), dest=field.name, metavar=metavar, help=help)
        if name := field.metadata["also"][0]:
            type, help = field.metadata["also"][1].format, help_of(field, name)
            parser.add_argument(f"--{name}", dest=field.name, metavar="STR", type=type, help=help)


def _names(field: dataclasses.Field) -> list[str]:
    """Return all names of a field's flag, except `no_NAME`."""
    names = (field.name, *SYNONYMS.get(field.name, ()), field.metadata["also"][0])
    return [name for name in names if name]


def without(words: Sequence[str], fields: Iterable[dataclasses.Field]) -> list[str]:
    """Return a command's words without these fields' flags, under any of their names, and their values."""
    names = {f"--{name}" for field in fields for name in (*_names(field), f"no_{field.name}")}
    kept, is_kept = list[str](), True
    for word in words:
        if word.startswith("--"):  # values follow their flag
            is_kept = underscores(word).partition("=")[0] not in names
        kept += [word] * is_kept
    return kept


def as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _base_type(field: dataclasses.Field) -> Any:
    """int for `int | None`, tuple for `tuple[int, ...]`."""
    kind = field.type
    if isinstance(kind, types.UnionType):
        kind = next(member for member in kind.__args__ if member is not types.NoneType)
    return typing.get_origin(kind) or kind


def _is_range(field: dataclasses.Field) -> bool:
    """Return True for `tuple[float, float]`, the type of flags that take MIN,MAX."""
    return typing.get_args(field.type) == (float, float)


def _converted(field: dataclasses.Field, value: Any) -> Any:
    """A flag's text or a config file's value as the field's type. Raises ValueError or TypeError."""
    kind = _base_type(field)
    if kind is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        if _is_range(field) and len(parts) != 2:
            raise ValueError
        return tuple(_of_type(typing.get_args(field.type)[0], part) for part in parts)
    if kind is bool:
        if (word := str(value).lower()) in ("true", "false"):
            return word == "true"
        raise ValueError
    if value is False and "no" in field.metadata["choices"]:
        return "no"  # as YAML reads it
    try:
        return _of_type(kind, value)
    except ValueError:
        if str in typing.get_args(field.type) and isinstance(value, str):
            return value  # of a `float | str`, as 2/5
        raise


def _of_type(kind: type, value: Any) -> Any:
    """The value as this type. Refuses conversions that nobody means, as of 1.5 to an int."""
    if isinstance(value, bool) or (kind is str and not isinstance(value, str)):
        raise ValueError
    if kind is int and isinstance(value, float):
        raise ValueError
    return kind(value)


def _checked(field: dataclasses.Field, value: Any, name: str) -> Any:
    """The value, if it is among the choices and within the bounds, and so is each part of a tuple."""
    meta = field.metadata
    if _is_range(field) and not 0 < value[0] <= value[1] <= meta["maximum"]:
        raise ValueError(
            f"{name} {as_text(value)}: must be MIN,MAX with 0 < MIN <= MAX <= {meta['maximum']:g}"
        )
    for part in value if isinstance(value, tuple) else (value,):
        if meta["choices"] and part not in meta["choices"]:
            choices = ", ".join(meta["choices"])
            raise ValueError(f"{name} {shortened(as_text(value))}: choose among {choices}")
        if isinstance(part, (int, float)) and not meta["minimum"] <= part <= meta["maximum"]:
            low, high = meta["minimum"], meta["maximum"]
            bounds = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise ValueError(f"{name} {as_text(value)}: must be {bounds}")
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError(f"{name} {value}: must be a finite number")
        if isinstance(part, (int, float)) and abs(part) > LARGEST:
            raise ValueError(f"{name} {shortened(as_text(value))}: must be at most {LARGEST:g}")
        if isinstance(part, str) and not is_printable(part):
            raise ValueError(f"{name} {part}: remove the characters that a terminal can't show")
    return value


def read_config(path: Path, fields: tuple[dataclasses.Field, ...]) -> dict[str, Any]:
    """Checked values from YAML or JSON. ValueError names the file and the key or the line."""
    try:
        if path.suffix == ".json":
            content = parse_json(path.read_bytes(), f"--config {path}", unique_keys)
        else:
            content = read_yaml("--config", path)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    if "distributed_type" in content:
        start = f"accelerate launch --config_file {path} {Path(sys.argv[0]).name}"
        raise ValueError(f"--config {path} is a launcher's file: {start}")
    by_name = {name: field for field in fields for name in _names(field)}
    values, keys = {}, dict[str, str]()
    for key, value in without_left(content).items():
        name = str(key).replace("-", "_").strip("_")
        if name in LEFT:
            raise ValueError(f"--config {path}{_why_left(name)}")
        if name not in by_name:
            meant = did_you_mean(name, by_name)
            shown = shortened(str(key))
            raise ValueError(f"--config {path}: unknown key {shown}" + (meant and f", {meant}"))
        field = by_name[name]
        if (first := keys.setdefault(field.name, key)) != key:
            raise ValueError(f"--config {path}: {two_names(first, key)}")
        if value is None and field.default is None:
            continue
        value = field.metadata["also"][1].format(value) if name == field.metadata["also"][0] else value
        values[field.name] = typed(field, value, f"--config {path}: {key}")
    return values


def typed(field: dataclasses.Field, value: Any, name: str) -> Any:
    if value == "":
        raise ValueError(f"{name} {EMPTY}")
    try:
        converted = _converted(field, value)
    except (ValueError, TypeError):
        kind = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "tuple": "numbers as 4,8,32" if int in typing.get_args(field.type) else "words as a,b",
        }
        expected = (
            "two numbers as 0.08,1" if _is_range(field) else kind.get(_base_type(field).__name__, "text")
        )
        raise ValueError(f"{name} {shortened(str(value))}: must be {expected}") from None
    return _checked(field, converted, name)
