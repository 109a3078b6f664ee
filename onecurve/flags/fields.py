"""Turns a dataclass's fields into command-line flags and config-file keys.

A field's type determines how the flag's text is parsed. A field can have the type int, float, str or bool, a
tuple of these types, or one of these types combined with None.
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

from onecurve.system.cli import EMPTY_VALUE, CommandParser, tell_launchers, underscores
from onecurve.system.env import is_hosts_first
from onecurve.system.files import parse_json, read_yaml, unique_keys
from onecurve.system.paths import ROOT
from onecurve.system.text import did_you_mean, is_printable, message_text, shortened, some_of

MAX_NUMBER = 1e15  # Largest absolute value that any numeric flag accepts
RECIPES_FILE = Path(__file__).with_name("recipe.py")  # Declares the flags that all scripts share

FLAG_SYNONYMS = {"lr": ("learning_rate",)}  # Additional names of each flag
# {removed flag: (value that had no effect, reason for the removal)}
REMOVED_FLAGS = {"half_residual": (False, "this flag slowed down training and saved no memory")}


def without_removed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe without the removed flags that had no effect on training."""
    return {
        name: value
        for name, value in recipe.items()
        if name not in REMOVED_FLAGS or value != REMOVED_FLAGS[name][0]
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagFacts:
    """Properties of a flag that other code queries. The default properties are safe for a new flag.

    A flag declares only the properties that differ from the defaults. If a subclass declares the flag again,
    it keeps the properties from its first declaration.
    """

    part_of_recipe: bool = True  # The flag affects the trained model, so a resumed run must keep its value
    per_host: bool = False  # The flag may differ between ranks. A difference in another flag ends the job
    is_path: bool = False  # The value may be a local path. Different spellings of a path are the same value
    locates: str = ""  # "results" or "cache" if the flag only specifies where these files are stored
    measures_best: bool = False  # The flag affects the metric or images that select the best checkpoint
    decides_defaults: bool = False  # The flag determines the defaults of other flags
    initial_weights: bool = False  # The flag selects the initial weights
    training_only: bool = False  # A trained model can be built and used with the flag switched off
    drawn_on_device: bool = False  # The flag uses random numbers that differ between device types
    changes_memory: bool = True  # The flag may affect the memory use of a training step
    # verify.py reuses the recorded value, because the flag affects logged values or changes the weights
    # bitwise
    replayed: bool = False
    # Position of the flag in a comparison's run names. The names include a flag with position 0 only if
    # two names would otherwise be identical
    in_names: int = 0
    metavar: str = ""  # Placeholder in --help, derived from the flag's type and name if empty


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
        default: Value of the flag unless the user specifies one.
        help: Help text of the flag. The text is empty if flags.yaml contains a longer help text.
        choices: Allowed values of the flag. An empty tuple allows all values.
        minimum: Minimum value of a numeric flag.
        maximum: Maximum value of a numeric flag.
        per_script: True if each script's recipe sets a different default.
        also: Second name of the flag and a template for its value, for example ("model_folder", "{}/*").
        part_of_recipe: False for a flag that does not affect the trained model. See setting().
        facts: Properties that differ from the defaults in Facts.
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "also": also}
    facts |= {"part_of_recipe": part_of_recipe}
    FlagFacts(**facts)  # Raises TypeError for unknown properties
    return dataclasses.field(default=default, metadata=metadata | {"per_script": per_script, "facts": facts})


def setting(default: Any, help: str = "", **options: Any) -> Any:
    """Declare a flag that affects where or how a script runs, but not the trained model. See flag()."""
    return flag(default, help, part_of_recipe=False, **options)


@cache
def flag_facts_of(recipe_class: type) -> dict[str, FlagFacts]:
    """Return the properties of each flag in a recipe class."""
    facts: dict[str, dict[str, Any]] = {}
    for base in filter(dataclasses.is_dataclass, reversed(recipe_class.__mro__)):
        for field in dataclasses.fields(base):
            facts[field.name] = facts.get(field.name, {}) | field.metadata["facts"]
    return {name: FlagFacts(**declared_facts) for name, declared_facts in facts.items()}


def flags_where(recipe_class: type, fact: str) -> list[str]:
    """Return the names of the flags in a recipe class for which the property `fact` is truthy."""
    return [name for name, facts in flag_facts_of(recipe_class).items() if getattr(facts, fact)]


def switched_off(field: dataclasses.Field) -> Any:
    """Return the value that disables a flag: False for a boolean flag and None for all other flags."""
    return False if _base_type(field) is bool else None


@cache
def _flags_by_class(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {class: {flag: {property: value}}} for all flags that the classes in a file declare.

    The function parses the file instead of importing the script, because an import takes seconds. The
    function returns {} for a file with a syntax error.
    """
    with contextlib.suppress(SyntaxError, ValueError):
        classes = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
        return {node.name: _flags_declared_in(node) for node in classes}
    return {}


def _flags_declared_in(recipe_class: ast.ClassDef) -> dict[str, dict[str, Any]]:
    properties = {"also", *(field.name for field in dataclasses.fields(FlagFacts))}
    flags: dict[str, dict[str, Any]] = {}
    for statement in recipe_class.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call)):
            continue
        call = statement.value
        if ast.unparse(call.func) in ("flag", "setting"):
            declared_properties = {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in call.keywords
                if keyword.arg in properties
            }
            flags[ast.unparse(statement.target)] = declared_properties
    return flags


@cache
def declared_values(fact: str) -> dict[str, Any]:
    """Return {flag name: property value} for all flags that declare the property in any recipe.

    The result contains both names of a flag with two names. Code that reads recorded runs uses this function,
    because a run's script may be unknown, outdated or slow to import.
    """
    values_by_flag: dict[str, Any] = {}
    for file in (RECIPES_FILE, *sorted(ROOT.glob("train_*.py"))):
        for flags in _flags_by_class(file).values():
            for name, facts in flags.items():
                if value := facts.get(fact):
                    second_name = facts.get("also", ("",))[0]
                    values_by_flag |= dict.fromkeys(filter(None, (name, second_name)), value)
    return values_by_flag


@cache
def _long_help_texts() -> dict[str, str]:
    import yaml

    return yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text())


def help_of(field: dataclasses.Field, name: str = "") -> str:
    """Return a flag's help text, or the help text of its second name if `name` is the second name."""
    return field.metadata["help"] or _long_help_texts()[name or field.name]


class Parser(CommandParser):
    """Argument parser that prints help and errors from only one process per host."""

    def parse_known_args(self, args=None, namespace=None):
        """Refuse two names of one flag, such as `--lr 1 --learning_rate 2`, but allow a repeated name."""
        first_names: dict[str, str] = {}  # {field of the recipe: name of the flag on the command line}
        for word in sys.argv[1:] if args is None else args:
            name = underscores(word).partition("=")[0]
            parser_action = self._option_string_actions.get(name)
            if parser_action and (first_name := first_names.setdefault(parser_action.dest, name)) != name:
                self.error(two_names_message(first_name, name))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        """Print an error line from one process per host and exit with status 2.

        For an unknown flag, the line suggests a replacement.
        """
        if message.startswith("unrecognized arguments"):
            unknown_flag = message.split()[2].split("=")[0]
            suggestion = did_you_mean(unknown_flag, self._option_string_actions)
            advice = f": {suggestion}" if suggestion else ""
            if scripts := _scripts_with(unknown_flag):
                advice = f"{advice} {scripts}" if advice else f". {scripts}"
            else:
                advice = _equivalent_of(unknown_flag, self.prog) or advice
            advice = _why_removed(unknown_flag) or advice or ". --help lists all flags"
            message = f"unknown flag {shortened(unknown_flag)}{advice}"
        message = message_text(message)
        tell_launchers(message)
        self.print_once(f"{self.prog}: error: {message}\n", sys.stderr)
        # The launcher kills all processes as soon as one process exits, so wait until the error is printed
        if not is_hosts_first():
            time.sleep(5)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        self.print_once(self.format_help(), file)

    def print_once(self, text: str, file: Any = None) -> None:
        if is_hosts_first():
            print(text, end="", file=file or sys.stdout, flush=True)


def _why_removed(flag: str) -> str:
    """Return the reason why a flag was removed, or an empty string for a flag that was not removed."""
    name = flag.lstrip("-").removeprefix("no_")
    _, reason = REMOVED_FLAGS.get(name, (None, ""))
    return reason and f": {name} was removed because {reason}. Do not specify {name}"


def _scripts_with(unknown_flag: str) -> str:
    """Return a sentence that lists the train scripts with this flag, or an empty string without scripts."""
    name = unknown_flag.removeprefix("--")
    is_shared = name in _flags_by_class(RECIPES_FILE)["ImageRecipe"]
    scripts = [
        path.name
        for path in sorted(ROOT.glob("train_*.py"))
        if any(name in flags for flags in _flags_by_class(path).values())
        or (is_shared and "(ImageRecipe)" in path.read_text())
    ]
    return f"{some_of(scripts)} {'supports' if len(scripts) == 1 else 'support'} this flag" if scripts else ""


def two_names_message(first: str, second: str) -> str:
    return f"{first} and {second} are two names for the same setting. Specify only one of the two names"


@cache
def flags_elsewhere() -> list[dict[str, Any]]:
    """Return the content of elsewhere.yaml, which lists equivalents of other projects' flags."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text())


def _equivalent_of(unknown_flag: str, script: str) -> str:
    """Return a sentence with the equivalent of another project's flag, or "" if the flag is unknown."""
    projects = [project for project in flags_elsewhere() if project.get("script", script) == script]
    for project in sorted(projects, key=lambda project: "script" not in project):
        for row in project["rows"]:
            names = [underscores(name.split()[0]) for name in row["names"] if name.startswith("-")]
            if unknown_flag in names:
                equivalents = " or ".join(row.get("here", ()))
                return f". Use {equivalents} instead." if equivalents else f". {row['note']}"
    return ""


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, unit: str, metavar: str = "") -> None:
    """Add a field's flag to a parser.

    Args:
        parser: Parser or argument group that receives the flag.
        field: Field of a recipe that declares the flag.
        unit: Word for samples that replaces the word `images` in the help text.
        metavar: Placeholder for the flag's value in the help text, derived from the field if empty.
    """
    help = help_of(field).replace("%", "%%").replace("images", unit)
    if default := shown_default(field):
        help = f"{help.removesuffix('.')}. Default: {default}."
    if _base_type(field) is bool:
        # Sweeps write --padding=True. argparse uses `const` for a flag without a value.
        parser.add_argument(f"--{field.name}", nargs="?", const="true", metavar="true|false", help=help)
        parser.add_argument(
            f"--no_{field.name}", action="store_const", const="false", dest=field.name, help=argparse.SUPPRESS
        )
    else:
        placeholder = _placeholder(field, metavar)
        names = [field.name, *FLAG_SYNONYMS.get(field.name, ())]
        parser.add_argument(*(f"--{name}" for name in names), dest=field.name, metavar=placeholder, help=help)
        second_name, template = field.metadata["also"]
        if second_name:
            parser.add_argument(
                f"--{second_name}",
                dest=field.name,
                metavar=_PLACEHOLDERS_BY_ENDING.get(second_name.rpartition("_")[2], "PART"),
                type=template.format,
                help=help_of(field, second_name),
            )


# Placeholders for flag values in --help, by the last word of the flag's name
_PLACEHOLDERS_BY_ENDING = {
    "column": "COLUMN",
    "config": "FILE",
    "decay": "DECAY",
    "dir": "FOLDER",
    "fold": "K/N",
    "folder": "FOLDER",
    "gib": "GIB",
    "s": "SECONDS",
}


def _placeholder(field: dataclasses.Field, metavar: str) -> str:
    """Return the placeholder for a flag's value in --help. A placeholder in `declared` takes precedence."""
    if choices := field.metadata["choices"]:
        return "{" + ",".join(choices) + "}"
    if placeholder := metavar or _PLACEHOLDERS_BY_ENDING.get(field.name.rpartition("_")[2]):
        return placeholder
    if _is_range(field):
        return "MIN,MAX"
    base_type = _base_type(field)
    if base_type is tuple:
        return "N,N" if int in typing.get_args(field.type) else "NAME,NAME"
    if base_type is float:
        return "SHARE" if field.metadata["maximum"] <= 1 else "NUMBER"
    if base_type is int:
        return "N"
    return "PATH" if field.metadata["facts"].get("is_path") else "NAME"


def shown_default(field: dataclasses.Field) -> str:
    """Return the text in which --help shows a flag's default, or an empty string without a default."""
    if _base_type(field) is bool and field.default is not None:
        return "on" if field.default else "off"
    return "" if field.default is None else as_text(field.default)


def _flag_names(field: dataclasses.Field) -> list[str]:
    """Return all names of a flag except the negated name `no_NAME`."""
    names = (field.name, *FLAG_SYNONYMS.get(field.name, ()), field.metadata["also"][0])
    return [name for name in names if name]


def without_flags(words: Sequence[str], fields: Iterable[dataclasses.Field]) -> list[str]:
    """Return a command's words, excluding the fields' flags and the values of these flags."""
    removed_flags = {f"--{name}" for field in fields for name in (*_flag_names(field), f"no_{field.name}")}
    kept_words, is_kept = list[str](), True
    for word in words:
        if word.startswith("--"):  # The values of a flag follow its name
            is_kept = underscores(word).partition("=")[0] not in removed_flags
        if is_kept:
            kept_words.append(word)
    return kept_words


def as_text(value: Any) -> str:
    """Return the text with which a user specifies a flag's value on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _base_type(field: dataclasses.Field) -> Any:
    """Return a field's type without None and without type arguments, such as int for `int | None`."""
    field_type = field.type
    if isinstance(field_type, types.UnionType):
        field_type = next(member for member in field_type.__args__ if member is not types.NoneType)
    return typing.get_origin(field_type) or field_type


def _is_range(field: dataclasses.Field) -> bool:
    """Return True if the field has the type `tuple[float, float]`, which represents a range MIN,MAX."""
    return typing.get_args(field.type) == (float, float)


def _converted_value(field: dataclasses.Field, value: Any) -> Any:
    """Convert a value from the command line or a config file.

    Raise ValueError or TypeError for an invalid value.
    """
    base_type = _base_type(field)
    if base_type is tuple:
        if isinstance(value, str):
            value = value.split(",")
        items = value if isinstance(value, list) else [value]
        if _is_range(field) and len(items) != 2:
            raise ValueError
        item_type = typing.get_args(field.type)[0]
        return tuple(_without_loss(item_type, item) for item in items)
    if base_type is bool:
        if (word := str(value).lower()) in ("true", "false"):
            return word == "true"
        raise ValueError
    if value is False and "no" in field.metadata["choices"]:
        return "no"  # YAML reads an unquoted `no` as False
    try:
        return _without_loss(base_type, value)
    except ValueError:
        if str in typing.get_args(field.type) and isinstance(value, str):
            return value  # The text 2/5 is valid for a field of the type `float | str`
        raise


def _without_loss(target_type: type, value: Any) -> Any:
    """Convert a value to a type. Raise ValueError if the conversion loses information, such as 1.5 to int."""
    if isinstance(value, bool) or (target_type is str and not isinstance(value, str)):
        raise ValueError
    if target_type is int and isinstance(value, float):
        raise ValueError
    return target_type(value)


def _checked_value(field: dataclasses.Field, value: Any, name: str) -> Any:
    """Return a valid value unchanged.

    Raise ValueError if the value or one of its tuple items is not a valid choice or is out of range.
    """
    choices, minimum, maximum = (field.metadata[name] for name in ("choices", "minimum", "maximum"))
    if _is_range(field) and not 0 < value[0] <= value[1] <= maximum:
        raise ValueError(
            f"{name} {as_text(value)}: the value must be MIN,MAX with 0 < MIN <= MAX <= {maximum:g}"
        )
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item not in choices:
            allowed = ", ".join(choices)
            raise ValueError(f"{name} {shortened(as_text(value))}: the value must be one of {allowed}")
        if isinstance(item, (int, float)) and not minimum <= item <= maximum:
            bounds = f"at least {minimum:g}"
            if not math.isinf(maximum):
                bounds = f"from {minimum:g} to {maximum:g}"
            raise ValueError(f"{name} {as_text(value)}: the value must be {bounds}")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{name} {value}: the value must be a finite number")
        if isinstance(item, (int, float)) and abs(item) > MAX_NUMBER:
            raise ValueError(f"{name} {shortened(as_text(value))}: the value must be at most {MAX_NUMBER:g}")
        if isinstance(item, str) and not is_printable(item):
            raise ValueError(f"{name} {item}: remove all characters that a terminal can't display")
    return value


def read_config(path: Path, fields: tuple[dataclasses.Field, ...]) -> dict[str, Any]:
    """Read flags from a YAML or JSON file.

    Raise ValueError that names the file and the invalid key or line.
    """
    try:
        if path.suffix == ".json":
            content = parse_json(path.read_bytes(), f"--config {path}", unique_keys)
        else:
            content = read_yaml("--config", path)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    if "distributed_type" in content:
        command = f"accelerate launch --config_file {path} {Path(sys.argv[0]).name}"
        raise ValueError(
            f"--config {path} is an accelerate config. Pass this file to the launcher: {command}"
        )
    fields_by_name = {name: field for field in fields for name in _flag_names(field)}
    values, first_keys = dict[str, Any](), dict[str, str]()
    for key, value in without_removed(content).items():
        name = str(key).replace("-", "_").strip("_")
        if name in REMOVED_FLAGS:
            raise ValueError(f"--config {path}{_why_removed(name)}")
        if name not in fields_by_name:
            suggestion = did_you_mean(name, fields_by_name)
            advice = f", {suggestion}" if suggestion else ""
            raise ValueError(f"--config {path} contains the unknown key {shortened(str(key))}{advice}")
        field = fields_by_name[name]
        if (first_key := first_keys.setdefault(field.name, key)) != key:
            raise ValueError(f"--config {path}: {two_names_message(first_key, key)}")
        if value is None and field.default is None:
            continue
        second_name, template = field.metadata["also"]
        if name == second_name:
            value = template.format(value)
        values[field.name] = typed_value(field, value, f"--config {path}: {key}")
    return values


def typed_value(field: dataclasses.Field, value: Any, name: str) -> Any:
    """Convert and check the value of a field. Raise ValueError with a message that begins with `name`."""
    if value == "":
        raise ValueError(f"{name} {EMPTY_VALUE}")
    try:
        converted = _converted_value(field, value)
    except (ValueError, TypeError):
        example = (
            "numbers, for example 4,8,32" if int in typing.get_args(field.type) else "words, for example a,b"
        )
        descriptions = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "tuple": f"a list of {example}",
        }
        expected_form = descriptions.get(_base_type(field).__name__, "text")
        if _is_range(field):
            expected_form = "two numbers, for example 0.08,1"
        raise ValueError(f"{name} {shortened(str(value))}: the value must be {expected_form}") from None
    return _checked_value(field, converted, name)
