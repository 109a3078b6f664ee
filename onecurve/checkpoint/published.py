"""Downloads timm models from the Hugging Face Hub, and reads the config.json stored with their weights."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecurve.checkpoint.format import MODEL_FILE
from onecurve.models.preprocessing import data_config
from onecurve.models.timm_models import registered_config
from onecurve.system.env import hub_problem
from onecurve.system.files import read_json
from onecurve.system.text import printable

CONFIG_FILE = "config.json"
# Image preprocessing keys in timm's config.json
DATA_KEYS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
EDGES = ("img_size", "patch_size")
# Model arguments set by train_vit.py's flags, or not needed for evaluation
KNOWN_ARGUMENTS = {"in_chans", "num_classes", "global_pool", "img_size", "patch_size", "depth"}
KNOWN_ARGUMENTS |= {"drop_rate", "drop_path_rate"}


@dataclass(frozen=True)
class Published:
    """Description of a timm model in a folder: architecture, classes and data configuration."""

    architecture: str
    classes: int  # number of classes
    data: dict[str, Any]  # values of DATA_KEYS in config.json
    arguments: dict[str, Any]  # model arguments in config.json
    label_names: list[str] | None = None
    test_size: int | None = None  # second image size for which the authors also report an accuracy
    test_crop_pct: float | None = None  # crop_pct for the second image size

    @property
    def image_size(self) -> int:
        return _edge_length(self.data["input_size"])

    def preprocessing(self) -> dict[str, Any]:
        """Return the model's preprocessing record, with timm's defaults for missing settings."""
        from timm.data import resolve_data_config

        return data_config(resolve_data_config(pretrained_cfg=self.data)).to_json()

    def note(self) -> str:
        """Return a note about the second image size, or an empty string if the model has only one.

        timm's validate.py uses the second image size by default.
        """
        if self.test_size is None:
            return ""
        crop = f" --crop_pct {self.test_crop_pct:g}" if self.test_crop_pct else ""
        return f"The model's authors also report the accuracy for --image_size {self.test_size}{crop}."


def read_published(folder: Path) -> Published | None:
    """Return the timm model that a folder's config.json describes, or None without such a description.

    Raises:
        ValueError: If config.json is damaged.
    """
    import timm

    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    content = read_json(file)
    config = content.get("pretrained_cfg", content)  # older files store these settings at the top level
    if not timm.is_model(str(content.get("architecture"))):
        return None
    try:
        return _published_from_config(content, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a timm model: {error}") from None


def _published_from_config(content: dict[str, Any], config: dict[str, Any]) -> Published:
    arguments = content.get("model_args") or {}
    label_names = content.get("label_names") or config.get("label_names")
    test_size = config.get("test_input_size")
    data = {name: config[name] for name in DATA_KEYS if config.get(name) is not None}
    arguments = {name: _edge_length(value) if name in EDGES else value for name, value in arguments.items()}
    if edge_pixels := arguments.get("img_size"):
        data["input_size"] = (3, edge_pixels, edge_pixels)
    return Published(
        content["architecture"],
        int(content.get("num_classes", config.get("num_classes", 0))),
        {"input_size": (3, 224, 224)} | data,
        arguments,
        list(map(printable, label_names)) if isinstance(label_names, list) else None,
        _edge_length(test_size) if test_size else None,
        config.get("test_crop_pct"),
    )


def _edge_length(size: Any) -> int:
    """Return the edge length of a square image, given as a number or a shape in config.json."""
    return int(size[-1] if isinstance(size, (list, tuple)) else size)


def of_name(name: str) -> Published:
    """Return the description of the timm weights with this name.

    Raises:
        ValueError: If timm does not recognize the model name or the weight tag.
    """
    config = dataclasses.asdict(registered_config(name))
    return _published_from_config({"architecture": name, "num_classes": config["num_classes"]}, config)


def class_names(published: Published) -> list[tuple[str, ...]] | None:
    """Return each class's names: the displayed name, followed by alternative names used by data sets.

    The names come from config.json, or from timm's list of ImageNet synsets with the same number of classes.
    If neither source contains class names, the function returns None.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if (names := published.label_names) and len(names) == published.classes:
        known = _synset_descriptions(ImageNetInfo("imagenet-22k"))
        return _with_descriptions(names, known) if known.keys() >= {*names} else [(name,) for name in names]
    subset = infer_imagenet_subset({"num_classes": published.classes})
    if subset is None:
        return None
    imagenet_info = ImageNetInfo(subset)
    return _with_descriptions(imagenet_info.label_names(), _synset_descriptions(imagenet_info))


def _synset_descriptions(info: Any) -> dict[str, str]:
    return info.label_descriptions(as_dict=True)


def _with_descriptions(synsets: list[str], descriptions: dict[str, str]) -> list[tuple[str, ...]]:
    """Return each class's displayed name, synset, description, and first name in the description.

    If several classes share a description, their displayed names also include the synset.
    """
    counts = Counter(descriptions[synset] for synset in synsets)
    names_by_class: list[tuple[str, ...]] = []
    for synset in synsets:
        description = descriptions[synset]
        displayed = description if counts[description] == 1 else f"{description} ({synset})"
        names_by_class.append((displayed, synset, description, description.partition(",")[0]))
    return names_by_class


def download(name: str) -> Path:
    """Download a timm model's config.json and weights from the Hugging Face Hub, and return the folder.

    Raises:
        ValueError: If timm has no weights for the model, or the Hub can't be reached.
    """
    from huggingface_hub import snapshot_download

    config = registered_config(name)
    if not config.hf_hub_id:
        raise ValueError(
            f"timm provides no weights for {name} on the hub. Pass the path of a weight file or folder."
        )
    problem = hub_problem()
    try:
        return Path(snapshot_download(config.hf_hub_id, allow_patterns=[CONFIG_FILE, MODEL_FILE]))
    except OSError as error:
        command = f"hf download {config.hf_hub_id} {CONFIG_FILE} {MODEL_FILE} --local-dir DIR"
        raise ValueError(
            f"the hub can't be reached ({problem or error}). Run `{command}` on a machine with internet"
            " access, copy the folder DIR to this machine, and pass DIR as the model."
        ) from None
