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
from onecurve.system.text import did_you_mean, is_printable, safe_message, shortened, some_of

MAX_NUMBER = 1e15  # Largest absolute value that any numeric flag accepts
RECIPES_FILE = Path(__file__).with_name("recipe.py")  # Declares the flags that all scripts share

FLAG_SYNONYMS = {"lr": ("learning_rate",)}  # Additional names of each flag
ERROR_LINE_WAIT_S = 5  # Seconds that a host's other processes wait while its first process prints an error


class RemovedFlag(typing.NamedTuple):
    """Flag that earlier versions supported."""

    value_without_effect: Any  # A run with this value trained as a run without the flag
    removal_reason: str


REMOVED_FLAGS = {"half_residual": RemovedFlag(False, "this flag slowed down training and saved no memory")}


def without_removed_flags(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe without the removed flags that had no effect on training."""
    return {
        flag_name: flag_value
        for flag_name, flag_value in recipe.items()
        if flag_name not in REMOVED_FLAGS or flag_value != REMOVED_FLAGS[flag_name].value_without_effect
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
    # verify.py replays a run with the recorded value, because the flag affects logged values or weights
    replayed: bool = False
    # Position of the flag in a comparison's run names. Names include a flag with position 0 only if two names
    # would otherwise be identical
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
    also: tuple[str, str] = ("", ""),  # (second name of the flag, template for the second name's value)
    part_of_recipe: bool = True,
    **declared_facts: Any,
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
        declared_facts: Properties that differ from the defaults in FlagFacts.
    """
    declared_facts |= {"part_of_recipe": part_of_recipe}
    FlagFacts(**declared_facts)  # Raises TypeError for unknown properties
    field_metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "also": also}
    field_metadata |= {"per_script": per_script, "facts": declared_facts}
    return dataclasses.field(default=default, metadata=field_metadata)


def setting(default: Any, help: str = "", **options: Any) -> Any:
    """Declare a flag that affects where or how a script runs, but not the trained model.

    `options` are the other arguments of flag().
    """
    return flag(default, help, part_of_recipe=False, **options)


@cache
def flag_facts_of(recipe_class: type) -> dict[str, FlagFacts]:
    """Return the properties of each flag in a recipe class."""
    facts_by_flag: dict[str, dict[str, Any]] = {}
    # From base classes to recipe_class, so that a later declaration adds or replaces properties
    for base_class in filter(dataclasses.is_dataclass, reversed(recipe_class.__mro__)):
        for field in dataclasses.fields(base_class):
            facts_by_flag[field.name] = facts_by_flag.get(field.name, {}) | field.metadata["facts"]
    return {flag_name: FlagFacts(**declared_facts) for flag_name, declared_facts in facts_by_flag.items()}


def flags_where(recipe_class: type, fact_name: str) -> list[str]:
    """Return the names of the flags in a recipe class for which the property `fact_name` is truthy."""
    facts_by_flag = flag_facts_of(recipe_class)
    return [flag_name for flag_name, flag_facts in facts_by_flag.items() if getattr(flag_facts, fact_name)]


def switched_off(field: dataclasses.Field) -> Any:
    """Return the value that disables a flag: False for a boolean flag and None for all other flags."""
    return False if _base_type(field) is bool else None


@cache
def _parse_flags_by_class(script_path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {class: {flag: {property: value}}} for all flags that the classes in a file declare.

    The function parses the file instead of importing the script, because an import takes seconds. The
    function returns {} for a file with a syntax error.
    """
    with contextlib.suppress(SyntaxError, ValueError):
        script_nodes = ast.parse(script_path.read_text()).body
        class_nodes = (node for node in script_nodes if isinstance(node, ast.ClassDef))
        return {class_node.name: _flags_declared_in(class_node) for class_node in class_nodes}
    return {}  # the script has a syntax error


def _flags_declared_in(class_node: ast.ClassDef) -> dict[str, dict[str, Any]]:
    """Return {flag: {property: value}} from the calls of flag() and setting() in a class definition."""
    property_names = {"also", *(field.name for field in dataclasses.fields(FlagFacts))}
    properties_by_flag: dict[str, dict[str, Any]] = {}
    for statement in class_node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call)):
            continue  # not a flag declaration
        called_function = ast.unparse(statement.value.func)
        if called_function in ("flag", "setting"):
            flag_name = ast.unparse(statement.target)
            properties_by_flag[flag_name] = {
                flag_keyword.arg: ast.literal_eval(flag_keyword.value)
                for flag_keyword in statement.value.keywords
                if flag_keyword.arg in property_names
            }
    return properties_by_flag


@cache
def declared_values(fact_name: str) -> dict[str, Any]:
    """Return {flag name: property value} for all flags that declare the property in any script's recipe.

    The result contains both names of a flag with two names. Code that reads recorded runs uses this function,
    because a run's script may be unknown, outdated or slow to import. The scripts are parsed, not imported.
    """
    values_by_flag: dict[str, Any] = {}
    for script_path in (RECIPES_FILE, *sorted(ROOT.glob("train_*.py"))):
        for properties_by_flag in _parse_flags_by_class(script_path).values():
            for flag_name, flag_properties in properties_by_flag.items():
                if declared_value := flag_properties.get(fact_name):
                    second_flag, _ = flag_properties.get("also", ("", ""))
                    values_by_flag[flag_name] = declared_value
                    if second_flag:
                        values_by_flag[second_flag] = declared_value
    return values_by_flag


@cache
def _long_help_texts() -> dict[str, str]:
    """Return {flag name: help text} from flags.yaml."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text())


def help_of(field: dataclasses.Field, second_name: str = "") -> str:
    """Return a flag's help text, or the help text of its second name if `second_name` is not empty."""
    return field.metadata["help"] or _long_help_texts()[second_name or field.name]


class Parser(CommandParser):
    """Argument parser that prints help and errors from only one process per host."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does, but refuse two names of one flag, such as `--lr 1 --learning_rate 2`.

        A repeated name is allowed.
        """
        first_flag_by_field: dict[str, str] = {}  # {field of the recipe: first name on the command line}
        for command_word in sys.argv[1:] if args is None else args:
            flag_name, _, _ = underscores(command_word).partition("=")  # without the value in --lr=1
            if parser_action := self._option_string_actions.get(flag_name):
                first_flag_name = first_flag_by_field.setdefault(parser_action.dest, flag_name)
                if first_flag_name != flag_name:
                    self.error(two_names_message(first_flag_name, flag_name))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        """Print an error line from one process per host and exit with status 2.

        For an unknown flag, the line suggests a replacement.
        """
        if message.startswith("unrecognized arguments"):
            unknown_argument = message.removeprefix("unrecognized arguments:").split()[0]
            unknown_flag, _, _ = unknown_argument.partition("=")
            flag_suggestion = did_you_mean(unknown_flag, self._option_string_actions)
            flag_advice = f": {flag_suggestion}" if flag_suggestion else ""
            if scripts_sentence := _describe_scripts_with(unknown_flag):
                flag_advice = f"{flag_advice} {scripts_sentence}" if flag_advice else f". {scripts_sentence}"
            else:
                flag_advice = _describe_equivalent(unknown_flag, self.prog) or flag_advice
            # For a removed flag, the reason for the removal replaces all other advice
            flag_advice = _explain_removal(unknown_flag) or flag_advice or ". --help lists all flags"
            message = f"unknown flag {shortened(unknown_flag)}{flag_advice}"
        message = safe_message(message)
        tell_launchers(message)
        self.print_once_per_host(f"{self.prog}: error: {message}\n", sys.stderr)
        # The launcher kills all processes as soon as one process exits, so wait until the error is printed
        if not is_hosts_first():
            time.sleep(ERROR_LINE_WAIT_S)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        """Print the help text from one process per host."""
        self.print_once_per_host(self.format_help(), file)

    def print_once_per_host(self, printed_text: str, stream: Any = None) -> None:
        """Print a text to a stream, by default stdout, if this process is the first on its host."""
        if is_hosts_first():
            print(printed_text, end="", file=stream or sys.stdout, flush=True)


def _explain_removal(unknown_flag: str) -> str:
    """Return the end of an error message about a removed flag, or "" for a flag that was not removed."""
    flag_name = unknown_flag.lstrip("-").removeprefix("no_")
    if flag_name not in REMOVED_FLAGS:
        return ""
    removal_reason = REMOVED_FLAGS[flag_name].removal_reason
    return f": {flag_name} was removed because {removal_reason}. Do not specify {flag_name}"


def _describe_scripts_with(unknown_flag: str) -> str:
    """Return a sentence that lists the train scripts with this flag, or an empty string without scripts."""
    flag_name = unknown_flag.removeprefix("--")
    train_scripts = sorted(ROOT.glob("train_*.py"))
    script_names = [script.name for script in train_scripts if _script_supports(script, flag_name)]
    if not script_names:
        return ""  # no script supports the flag
    verb = "supports" if len(script_names) == 1 else "support"
    return f"{some_of(script_names)} {verb} this flag"


def _script_supports(script: Path, flag_name: str) -> bool:
    """Return True if a train script's source code declares the flag or inherits it from ImageRecipe."""
    is_declared = any(flag_name in class_flags for class_flags in _parse_flags_by_class(script).values())
    is_image_flag = flag_name in _parse_flags_by_class(RECIPES_FILE)["ImageRecipe"]
    return is_declared or (is_image_flag and "(ImageRecipe)" in script.read_text())


def two_names_message(first_name: str, second_name: str) -> str:
    """Return an error message about a flag that the user has specified under two names."""
    conflict_sentence = f"{first_name} and {second_name} are two names for the same setting"
    return f"{conflict_sentence}. Specify only one of the two names"


@cache
def flags_of_other_projects() -> list[dict[str, Any]]:
    """Return the content of elsewhere.yaml, which lists equivalents of other projects' flags."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text())


def _describe_equivalent(unknown_flag: str, script_name: str) -> str:
    """Return the end of an error message about another project's flag, or "" if the flag is unknown.

    The text names the equivalent flag in this project, or explains why there is none.
    """
    applicable_projects = [
        project for project in flags_of_other_projects() if project.get("script", script_name) == script_name
    ]
    # Search entries for this script before entries for all scripts
    for project in sorted(applicable_projects, key=lambda project: "script" not in project):
        for flag_row in project["rows"]:
            # The placeholder after a flag's name, as in `--opt NAME`, is removed
            foreign_flags = [alias.split()[0] for alias in flag_row["names"] if alias.startswith("-")]
            if unknown_flag in map(underscores, foreign_flags):
                equivalent_flags = " or ".join(flag_row.get("here", ()))
                return f". Use {equivalent_flags} instead." if equivalent_flags else f". {flag_row['note']}"
    return ""  # no project has this flag


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, unit: str, metavar: str = "") -> None:
    """Add a field's flag to a parser.

    Args:
        parser: Parser or argument group that receives the flag.
        field: Field of a recipe that declares the flag.
        unit: Word for samples that replaces the word `images` in the help text.
        metavar: Placeholder for the flag's value in the help text, derived from the field if empty.
    """
    help_text = help_of(field).replace("%", "%%").replace("images", unit)  # argparse expands a single %
    if default_text := shown_default(field):
        help_text = f"{help_text.removesuffix('.')}. Default: {default_text}."
    if _base_type(field) is bool:
        # Sweeps write --padding=True. argparse uses `const` for a flag without a value.
        parser.add_argument(f"--{field.name}", nargs="?", const="true", metavar="true|false", help=help_text)
        parser.add_argument(
            f"--no_{field.name}", action="store_const", const="false", dest=field.name, help=argparse.SUPPRESS
        )
    else:
        flag_names = [field.name, *FLAG_SYNONYMS.get(field.name, ())]
        flag_words = [f"--{flag_name}" for flag_name in flag_names]
        placeholder = _placeholder(field, metavar)
        parser.add_argument(*flag_words, dest=field.name, metavar=placeholder, help=help_text)
        second_flag_name, value_template = field.metadata["also"]
        if second_flag_name:
            parser.add_argument(
                f"--{second_flag_name}",
                dest=field.name,
                metavar=_PLACEHOLDER_BY_LAST_WORD.get(_last_word(second_flag_name), "PART"),
                type=value_template.format,  # for example, converts PATH to PATH/*
                help=help_of(field, second_flag_name),
            )


# Placeholders for flag values in --help, by the last word of the flag's name
_PLACEHOLDER_BY_LAST_WORD = {
    "column": "COLUMN",  # --label_column COLUMN
    "config": "FILE",  # --deepspeed_config FILE
    "decay": "DECAY",  # --weight_decay DECAY
    "dir": "FOLDER",  # --output_dir FOLDER
    "fold": "K/N",  # --fold K/N
    "folder": "FOLDER",  # --model_folder FOLDER
    "gib": "GIB",  # --cache_gib GIB
    "s": "SECONDS",  # --timeout_s SECONDS
}


def _last_word(flag_name: str) -> str:
    return flag_name.rpartition("_")[2]


def _placeholder(field: dataclasses.Field, metavar: str) -> str:
    """Return the placeholder for a flag's value in --help. `metavar` takes precedence if it is not empty."""
    if choices := field.metadata["choices"]:
        return "{" + ",".join(choices) + "}"
    if placeholder := metavar or _PLACEHOLDER_BY_LAST_WORD.get(_last_word(field.name)):
        return placeholder
    if _is_number_range(field):
        return "MIN,MAX"
    base_type = _base_type(field)
    if base_type is tuple:
        return "N,N" if int in typing.get_args(field.type) else "NAME,NAME"
    if base_type is float:
        return "SHARE" if field.metadata["maximum"] <= 1 else "NUMBER"
    if base_type is int:
        return "N"  # a whole number
    return "PATH" if field.metadata["facts"].get("is_path") else "NAME"


def shown_default(field: dataclasses.Field) -> str:
    """Return the text in which --help shows a flag's default, or an empty string without a default."""
    if _base_type(field) is bool and field.default is not None:
        return "on" if field.default else "off"
    return "" if field.default is None else flag_value_text(field.default)


def _flag_names(field: dataclasses.Field) -> list[str]:
    """Return all names of a flag except the negated name `no_NAME`."""
    second_flag_name, _ = field.metadata["also"]
    all_flag_names = (field.name, *FLAG_SYNONYMS.get(field.name, ()), second_flag_name)
    return [flag_name for flag_name in all_flag_names if flag_name]


def without_flags(command_words: Sequence[str], fields: Iterable[dataclasses.Field]) -> list[str]:
    """Return a command's words, excluding the fields' flags and the values of these flags."""
    excluded_options = set[str]()
    for field in fields:
        excluded_options |= {f"--{flag_name}" for flag_name in (*_flag_names(field), f"no_{field.name}")}
    kept_words = list[str]()
    is_word_kept = True
    for command_word in command_words:
        if command_word.startswith("--"):  # The values of a flag follow its name
            option_word, _, _ = underscores(command_word).partition("=")
            is_word_kept = option_word not in excluded_options
        if is_word_kept:
            kept_words.append(command_word)
    return kept_words


def flag_value_text(flag_value: Any) -> str:
    """Return the text with which a user specifies a flag's value on the command line."""
    return ",".join(map(str, flag_value)) if isinstance(flag_value, tuple) else str(flag_value)


def _base_type(field: dataclasses.Field) -> Any:
    """Return a field's type without None and without type arguments, such as int for `int | None`."""
    field_type = field.type
    if isinstance(field_type, types.UnionType):
        field_type = next(arg_type for arg_type in field_type.__args__ if arg_type is not types.NoneType)
    return typing.get_origin(field_type) or field_type


def _is_number_range(field: dataclasses.Field) -> bool:
    """Return True if the field has the type `tuple[float, float]`, which represents a range MIN,MAX."""
    return typing.get_args(field.type) == (float, float)


def _convert_value(field: dataclasses.Field, raw_value: Any) -> Any:
    """Convert a value from the command line or a config file.

    Raise ValueError or TypeError for an invalid value.
    """
    base_type = _base_type(field)
    if base_type is tuple:
        if isinstance(raw_value, str):
            raw_value = raw_value.split(",")
        raw_items = raw_value if isinstance(raw_value, list) else [raw_value]
        if _is_number_range(field) and len(raw_items) != 2:
            raise ValueError  # typed_value() adds a message
        item_type, *_ = typing.get_args(field.type)
        return tuple(_convert_without_loss(item_type, raw_item) for raw_item in raw_items)
    if base_type is bool:
        if (raw_word := str(raw_value).lower()) in ("true", "false"):
            return raw_word == "true"
        raise ValueError  # typed_value() adds a message
    if raw_value is False and "no" in field.metadata["choices"]:
        return "no"  # YAML reads an unquoted `no` as False
    try:
        return _convert_without_loss(base_type, raw_value)
    except ValueError:
        if str in typing.get_args(field.type) and isinstance(raw_value, str):
            return raw_value  # The text 2/5 is valid for a field of the type `float | str`
        raise


def _convert_without_loss(target_type: type, raw_value: Any) -> Any:
    """Convert a value to a type. Raise ValueError if the conversion loses information, such as 1.5 to int."""
    if isinstance(raw_value, bool) or (target_type is str and not isinstance(raw_value, str)):
        raise ValueError  # typed_value() adds a message
    if target_type is int and isinstance(raw_value, float):
        raise ValueError  # typed_value() adds a message
    return target_type(raw_value)


def _check_value(field: dataclasses.Field, flag_value: Any, flag_label: str) -> Any:
    """Return a converted value unchanged if it is a valid choice and within the field's range.

    Raise ValueError if the value or one of its tuple items is invalid. The error message begins with
    `flag_label`.
    """
    choices, minimum, maximum = (field.metadata[meta_key] for meta_key in ("choices", "minimum", "maximum"))
    flag_text = flag_value_text(flag_value)
    if _is_number_range(field):
        range_start, range_end = flag_value
        if not 0 < range_start <= range_end <= maximum:
            raise ValueError(
                f"{flag_label} {flag_text}: the value must be MIN,MAX with 0 < MIN <= MAX <= {maximum:g}"
            )
    flag_items = flag_value if isinstance(flag_value, tuple) else (flag_value,)
    for flag_item in flag_items:
        if choices and flag_item not in choices:
            allowed_values = ", ".join(choices)
            raise ValueError(
                f"{flag_label} {shortened(flag_text)}: the value must be one of {allowed_values}"
            )
        if isinstance(flag_item, (int, float)) and not minimum <= flag_item <= maximum:
            range_text = f"at least {minimum:g}"
            if not math.isinf(maximum):
                range_text = f"from {minimum:g} to {maximum:g}"
            raise ValueError(f"{flag_label} {flag_text}: the value must be {range_text}")
        if isinstance(flag_item, float) and not math.isfinite(flag_item):
            raise ValueError(f"{flag_label} {flag_value}: the value must be a finite number")
        if isinstance(flag_item, (int, float)) and abs(flag_item) > MAX_NUMBER:
            raise ValueError(f"{flag_label} {shortened(flag_text)}: the value must be at most {MAX_NUMBER:g}")
        if isinstance(flag_item, str) and not is_printable(flag_item):
            raise ValueError(f"{flag_label} {flag_item}: remove all characters that a terminal can't display")
    return flag_value


def read_config(config_path: Path, fields: tuple[dataclasses.Field, ...]) -> dict[str, Any]:
    """Read a --config file in YAML or JSON, and return {field name: checked value}.

    Raise ValueError for an invalid file. The error message names the file and the invalid key or line.
    """
    try:
        if config_path.suffix == ".json":
            config_content = parse_json(config_path.read_bytes(), f"--config {config_path}", unique_keys)
        else:
            config_content = read_yaml("--config", config_path)
    except OSError as config_error:
        raise ValueError(f"--config {config_path}: {config_error.strerror}") from None
    if "distributed_type" in config_content:
        launch_command = f"accelerate launch --config_file {config_path} {Path(sys.argv[0]).name}"
        raise ValueError(
            f"--config {config_path} is an accelerate config."
            f" Pass this file to the launcher: {launch_command}"
        )
    field_by_flag = {accepted_name: field for field in fields for accepted_name in _flag_names(field)}
    value_by_flag = dict[str, Any]()
    first_key_by_flag = dict[str, str]()  # detects a flag under two names
    for config_key, config_value in without_removed_flags(config_content).items():
        flag_name = str(config_key).replace("-", "_").strip("_")  # keys such as --batch-size are accepted
        if flag_name in REMOVED_FLAGS:
            raise ValueError(f"--config {config_path}{_explain_removal(flag_name)}")
        if flag_name not in field_by_flag:
            key_suggestion = did_you_mean(flag_name, field_by_flag)
            key_advice = f", {key_suggestion}" if key_suggestion else ""
            shown_key = shortened(str(config_key))
            raise ValueError(f"--config {config_path} contains the unknown key {shown_key}{key_advice}")
        field = field_by_flag[flag_name]
        if (first_key := first_key_by_flag.setdefault(field.name, config_key)) != config_key:
            raise ValueError(f"--config {config_path}: {two_names_message(first_key, config_key)}")
        if config_value is None and field.default is None:
            continue  # the default applies
        second_flag_name, value_template = field.metadata["also"]
        if flag_name == second_flag_name:
            config_value = value_template.format(config_value)
        value_by_flag[field.name] = typed_value(field, config_value, f"--config {config_path}: {config_key}")
    return value_by_flag


def typed_value(field: dataclasses.Field, raw_value: Any, flag_label: str) -> Any:
    """Convert the value of a field to the field's type, and check it.

    The value is a text from the command line or a value from a config file. Raise ValueError with a message
    that begins with `flag_label` if the value is invalid.
    """
    if raw_value == "":
        raise ValueError(f"{flag_label} {EMPTY_VALUE}")
    try:
        converted_value = _convert_value(field, raw_value)
    except (ValueError, TypeError):
        value_text = shortened(str(raw_value))
        expected_form = _expected_form(field)
        raise ValueError(f"{flag_label} {value_text}: the value must be {expected_form}") from None
    return _check_value(field, converted_value, flag_label)


def _expected_form(field: dataclasses.Field) -> str:
    """Describe the form of a field's values for an error message, for example as `a whole number`."""
    if _is_number_range(field):
        return "two numbers, for example 0.08,1"
    has_number_items = int in typing.get_args(field.type)
    list_example = "numbers, for example 4,8,32" if has_number_items else "words, for example a,b"
    value_form_by_type = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        tuple: f"a list of {list_example}",
    }
    return value_form_by_type.get(_base_type(field), "text")
