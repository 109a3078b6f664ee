"""Turns the fields of a dataclass into command-line flags and config-file keys.

A field's type determines how text is converted. Supported types are int, float, str, bool and tuples of these
types, each optionally combined with None.
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

LARGEST = 1e15  # largest absolute value that any numeric flag accepts
RECIPES = Path(__file__).with_name("recipe.py")  # declares the flags that all scripts share

SYNONYMS = {"lr": ("learning_rate",)}  # additional names of a flag
# Removed flags: the value that had no effect, and the reason why the flag was removed
LEFT = {"half_residual": (False, "it was slower and saved no memory")}


def without_left(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe without removed flags, except removed flags that affected training."""
    return {name: value for name, value in recipe.items() if name not in LEFT or value != LEFT[name][0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of a flag that other code queries. The defaults are safe for a new flag.

    A flag declares only the properties that differ from the defaults. If a subclass declares the flag again,
    the properties of the first declaration are kept.
    """

    part_of_recipe: bool = True  # affects the trained model, so a resumed run must use the same value
    per_host: bool = False  # may differ between ranks; a difference in any other flag ends the job
    is_path: bool = False  # may be a local path; two spellings of one path count as equal
    locates: str = ""  # affects only where files are stored: "results" or "cache"
    measures_best: bool = False  # affects the metric or the images that select the best checkpoint
    decides_defaults: bool = False  # determines defaults of other flags
    initial_weights: bool = False  # selects the initial weights
    training_only: bool = False  # not needed to build or use a trained model; can be switched off
    drawn_on_device: bool = False  # uses random numbers that differ between device types
    changes_memory: bool = True  # may affect the memory of a training step
    # Setting that verify.py repeats, because it affects logged values or the bits of the weights
    replayed: bool = False
    # Position in the run names of a comparison; 0: used only if names would otherwise be equal
    in_names: int = 0
    metavar: str = ""  # placeholder of the value in --help; empty: derived from the flag's type and name


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
    """Declare a field of a recipe as a flag that affects the trained model.

    Args:
        default: Value if the flag is not given.
        help: Help text; empty if flags.yaml contains a longer text.
        choices: Allowed values; an empty tuple allows all values.
        minimum: Smallest allowed number.
        maximum: Largest allowed number.
        per_script: True if the default depends on the script's recipe.
        also: Second name of the flag, and a template for its value, for example ("model_folder", "{}/*").
        part_of_recipe: False for a flag that does not affect the trained model; see setting().
        facts: Fields of Facts whose values differ from the defaults.
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "also": also}
    facts |= {"part_of_recipe": part_of_recipe}
    Facts(**facts)  # refuses unknown facts
    return dataclasses.field(default=default, metadata=metadata | {"per_script": per_script, "facts": facts})


def setting(default: Any, help: str = "", **options: Any) -> Any:
    """Declare a flag that affects where or how to run, but not the trained model. For options, see flag()."""
    return flag(default, help, part_of_recipe=False, **options)


@cache
def facts_of(recipe_class: type) -> dict[str, Facts]:
    """Return the properties of each flag of a recipe."""
    facts: dict[str, dict[str, Any]] = {}
    for base in filter(dataclasses.is_dataclass, reversed(recipe_class.__mro__)):
        for field in dataclasses.fields(base):
            facts[field.name] = facts.get(field.name, {}) | field.metadata["facts"]
    return {name: Facts(**declared_facts) for name, declared_facts in facts.items()}


def flags_where(recipe_class: type, fact: str) -> list[str]:
    """Return the names of a recipe's flags that have a property."""
    return [name for name, facts in facts_of(recipe_class).items() if getattr(facts, fact)]


def switched_off(field: dataclasses.Field) -> Any:
    """Return the value that disables a flag: False for a switch, None for other types."""
    return False if _base_type(field) is bool else None


@cache
def _declarations(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the properties of all flags declared by a file's classes: {class: {flag: {fact: value}}}.

    The file is parsed, because importing a script takes seconds. A file with a syntax error declares nothing.
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
    """Return {name: value} for every flag in any recipe that declares a property, under all its names.

    Code that reads recorded runs uses this function, because a run's script may be unknown, outdated or slow
    to import.
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
    """Return a flag's help text. `name`: second name of the flag, if the text describes that name."""
    return field.metadata["help"] or _texts()[name or field.name]


class Parser(CommandParser):
    """Argument parser that prints help and errors from only one process per host."""

    def parse_known_args(self, args=None, namespace=None):
        """Refuse two names of one flag, such as `--lr 1 --learning_rate 2`. The same name may be repeated."""
        names: dict[str, str] = {}
        for word in sys.argv[1:] if args is None else args:
            name = underscores(word).partition("=")[0]
            action = self._option_string_actions.get(name)
            if action and (first := names.setdefault(action.dest, name)) != name:
                self.error(two_names(first, name))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        """Print one line from one process per host, with advice for an unknown flag. Exit with status 2."""
        if message.startswith("unrecognized arguments"):
            unknown = message.split()[2].split("=")[0]
            suggestion = did_you_mean(unknown, self._option_string_actions)
            advice = f": {suggestion}" if suggestion else ""
            if scripts := _scripts_with(unknown):
                advice = f"{advice} {scripts}" if advice else f". {scripts}"
            else:
                advice = _equivalent_of(unknown, self.prog) or advice
            advice = _why_removed(unknown) or advice or ". --help lists all flags"
            message = f"unknown flag {shortened(unknown)}{advice}"
        message = message_text(message)
        tell_launchers(message)
        self.print_once(f"{self.prog}: error: {message}\n", sys.stderr)
        # The launcher kills all processes when one exits, so wait until the first process has printed
        if not is_hosts_first():
            time.sleep(5)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        self.print_once(self.format_help(), file)

    def print_once(self, text: str, file: Any = None) -> None:
        if is_hosts_first():
            print(text, end="", file=file or sys.stdout, flush=True)


def _why_removed(flag: str) -> str:
    """Return why a flag was removed, or an empty string for all other flags."""
    name = flag.lstrip("-").removeprefix("no_")
    return f": {name} was removed, because {LEFT[name][1]}. Leave it out" if name in LEFT else ""


def _scripts_with(unknown: str) -> str:
    """Return a sentence that names the train scripts with this flag, or an empty string."""
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
    """Return the content of elsewhere.yaml: other projects' flags and the equivalent flags here."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text())


def _equivalent_of(unknown: str, script: str) -> str:
    """Return a sentence with this script's equivalent of another project's flag, or an empty string."""
    projects = [project for project in elsewhere() if project.get("script", script) == script]
    for project in sorted(projects, key=lambda project: "script" not in project):
        for row in project["rows"]:
            if any(name[0] == "-" and underscores(name.split()[0]) == unknown for name in row["names"]):
                here = " or ".join(row.get("here", ()))
                return f". The equivalent here is {here}." if here else f". {row['note']}"
    return ""


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, unit: str, metavar: str = "") -> None:
    """Add a field's flag to a parser.

    Args:
        parser: Parser or group of a parser.
        field: Field of a recipe.
        unit: Word for samples that replaces `images` in the help text.
        metavar: Placeholder of the value; if empty, the placeholder is derived from the field.
    """
    help = help_of(field).replace("%", "%%").replace("images", unit)
    if default := shown_default(field):
        help = f"{help.removesuffix('.')}. Default: {default}."
    if _base_type(field) is bool:
        # Sweeps write --padding=True. `const` is used if the flag is given without a value.
        parser.add_argument(f"--{field.name}", nargs="?", const="true", metavar="true|false", help=help)
        parser.add_argument(
            f"--no_{field.name}", action="store_const", const="false", dest=field.name, help=argparse.SUPPRESS
        )
    else:
        metavar = _metavar(field, metavar)
        names = [field.name, *SYNONYMS.get(field.name, ())]
        parser.add_argument(*(f"--{name}" for name in names), dest=field.name, metavar=metavar, help=help)
        if name := field.metadata["also"][0]:
            type, help = field.metadata["also"][1].format, help_of(field, name)
            metavar = _SUFFIXES.get(name.rpartition("_")[2], "PART")
            parser.add_argument(f"--{name}", dest=field.name, metavar=metavar, type=type, help=help)


# Placeholders of values, by the last word of a flag's name
_SUFFIXES = {
    "column": "COLUMN",
    "config": "FILE",
    "decay": "DECAY",
    "dir": "FOLDER",
    "fold": "K/N",
    "folder": "FOLDER",
    "gib": "GIB",
    "s": "SECONDS",
}


def _metavar(field: dataclasses.Field, declared: str) -> str:
    """Return the placeholder of a flag's value in --help. `declared`: the declared placeholder."""
    if choices := field.metadata["choices"]:
        return "{" + ",".join(choices) + "}"
    if placeholder := declared or _SUFFIXES.get(field.name.rpartition("_")[2]):
        return placeholder
    base = _base_type(field)
    if base is tuple:
        return "MIN,MAX" if _is_range(field) else "N,N" if int in typing.get_args(field.type) else "NAME,NAME"
    if base is float:
        return "SHARE" if field.metadata["maximum"] <= 1 else "NUMBER"
    if base is int:
        return "N"
    return "PATH" if field.metadata["facts"].get("is_path") else "NAME"


def shown_default(field: dataclasses.Field) -> str:
    """Return a flag's default as shown by --help, or an empty string for an unset flag."""
    if _base_type(field) is bool and field.default is not None:
        return "on" if field.default else "off"
    return "" if field.default is None else as_text(field.default)


def _names(field: dataclasses.Field) -> list[str]:
    """Return all names of a flag, except `no_NAME`."""
    names = (field.name, *SYNONYMS.get(field.name, ()), field.metadata["also"][0])
    return [name for name in names if name]


def without(words: Sequence[str], fields: Iterable[dataclasses.Field]) -> list[str]:
    """Return a command's words without these fields' flags, under any name, and without their values."""
    names = {f"--{name}" for field in fields for name in (*_names(field), f"no_{field.name}")}
    kept, is_kept = list[str](), True
    for word in words:
        if word.startswith("--"):  # a flag's values follow it
            is_kept = underscores(word).partition("=")[0] not in names
        kept += [word] * is_kept
    return kept


def as_text(value: Any) -> str:
    """Return a flag's value in the form that users write on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _base_type(field: dataclasses.Field) -> Any:
    """Return a field's type without None and without type arguments, for example int for `int | None`."""
    hint = field.type
    if isinstance(hint, types.UnionType):
        hint = next(member for member in hint.__args__ if member is not types.NoneType)
    return typing.get_origin(hint) or hint


def _is_range(field: dataclasses.Field) -> bool:
    """Return True for `tuple[float, float]`, the type of flags whose value is MIN,MAX."""
    return typing.get_args(field.type) == (float, float)


def _converted(field: dataclasses.Field, value: Any) -> Any:
    """Convert a flag's text or a config file's value to the field's type. Raises ValueError or TypeError."""
    base = _base_type(field)
    if base is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        if _is_range(field) and len(parts) != 2:
            raise ValueError
        return tuple(_of_type(typing.get_args(field.type)[0], part) for part in parts)
    if base is bool:
        if (word := str(value).lower()) in ("true", "false"):
            return word == "true"
        raise ValueError
    if value is False and "no" in field.metadata["choices"]:
        return "no"  # YAML parses an unquoted `no` as False
    try:
        return _of_type(base, value)
    except ValueError:
        if str in typing.get_args(field.type) and isinstance(value, str):
            return value  # text such as 2/5, for a `float | str`
        raise


def _of_type(target: type, value: Any) -> Any:
    """Convert a value to a type. Raises ValueError for a lossy conversion, such as 1.5 to an int."""
    if isinstance(value, bool) or (target is str and not isinstance(value, str)):
        raise ValueError
    if target is int and isinstance(value, float):
        raise ValueError
    return target(value)


def _checked(field: dataclasses.Field, value: Any, name: str) -> Any:
    """Return the value. Raises ValueError if the value, or a tuple item, violates the choices or bounds."""
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
    """Read and check flags from a YAML or JSON file. A ValueError names the file, and the key or line."""
    try:
        if path.suffix == ".json":
            content = parse_json(path.read_bytes(), f"--config {path}", unique_keys)
        else:
            content = read_yaml("--config", path)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    if "distributed_type" in content:
        start = f"accelerate launch --config_file {path} {Path(sys.argv[0]).name}"
        raise ValueError(f"--config {path} is an accelerate config. Pass it to the launcher: {start}")
    by_name = {name: field for field in fields for name in _names(field)}
    values, keys = {}, dict[str, str]()
    for key, value in without_left(content).items():
        name = str(key).replace("-", "_").strip("_")
        if name in LEFT:
            raise ValueError(f"--config {path}{_why_removed(name)}")
        if name not in by_name:
            suggestion = did_you_mean(name, by_name)
            shown = shortened(str(key))
            raise ValueError(f"--config {path}: unknown key {shown}" + (suggestion and f", {suggestion}"))
        field = by_name[name]
        if (first := keys.setdefault(field.name, key)) != key:
            raise ValueError(f"--config {path}: {two_names(first, key)}")
        if value is None and field.default is None:
            continue
        value = field.metadata["also"][1].format(value) if name == field.metadata["also"][0] else value
        values[field.name] = typed(field, value, f"--config {path}: {key}")
    return values


def typed(field: dataclasses.Field, value: Any, name: str) -> Any:
    """Convert and check a field's value. The message of a ValueError begins with `name`."""
    if value == "":
        raise ValueError(f"{name} {EMPTY}")
    try:
        converted = _converted(field, value)
    except (ValueError, TypeError):
        is_integers = int in typing.get_args(field.type)
        descriptions = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "tuple": "numbers such as 4,8,32" if is_integers else "words such as a,b",
        }
        expected = descriptions.get(_base_type(field).__name__, "text")
        if _is_range(field):
            expected = "two numbers such as 0.08,1"
        raise ValueError(f"{name} {shortened(str(value))}: must be {expected}") from None
    return _checked(field, converted, name)
