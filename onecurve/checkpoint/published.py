"""Downloads and describes timm models from the hub, using the config.json next to their weights."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecurve.checkpoint.format import MODEL_FILE
from onecurve.models.preprocessing import data_config
from onecurve.models.timm_models import registered
from onecurve.system.env import hub_problem
from onecurve.system.files import read_json
from onecurve.system.text import printable

CONFIG = "config.json"
# timm's keys in config.json that describe the preprocessing of images
DATA_KEYS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
EDGES = ("img_size", "patch_size")
# Model arguments that flags of train_vit.py set or that evaluations do not need
KNOWN_ARGUMENTS = {"in_chans", "num_classes", "global_pool", "img_size", "patch_size", "depth"}
KNOWN_ARGUMENTS |= {"drop_rate", "drop_path_rate"}


@dataclass(frozen=True)
class Published:
    """Description of a timm model in a folder: architecture, classes and data configuration."""

    architecture: str
    classes: int  # number of classes
    data: dict[str, Any]  # the DATA_KEYS that config.json contains
    arguments: dict[str, Any]  # arguments of the model
    label_names: list[str] | None = None
    test_size: int | None = None  # second image size, for which the authors also report an accuracy
    test_crop_pct: float | None = None  # crop_pct for the second image size

    @property
    def image_size(self) -> int:
        return _edge(self.data["input_size"])

    def preprocessing(self) -> dict[str, Any]:
        """Return the record of the model's preprocessing, with timm's defaults for missing values."""
        from timm.data import resolve_data_config

        return data_config(resolve_data_config(pretrained_cfg=self.data)).to_json()

    def note(self) -> str:
        """Describe the second image size, or return an empty string if there is none.

        timm's validate.py uses the second size by default.
        """
        if self.test_size is None:
            return ""
        crop = f" --crop_pct {self.test_crop_pct:g}" if self.test_crop_pct else ""
        return f"The model's authors also measured it with --image_size {self.test_size}{crop}."


def read_published(folder: Path) -> Published | None:
    """Read the config.json in a folder. Return None if the file does not describe a timm model.

    Raises:
        ValueError: If the file is damaged.
    """
    import timm

    file = folder / CONFIG
    if not file.is_file():
        return None
    content = read_json(file)
    config = content.get("pretrained_cfg", content)  # older files are not nested
    if not timm.is_model(str(content.get("architecture"))):
        return None
    try:
        return _published(content, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a timm model: {error}") from None


def _published(content: dict[str, Any], config: dict[str, Any]) -> Published:
    arguments = content.get("model_args") or {}
    label_names = content.get("label_names") or config.get("label_names")
    size = config.get("test_input_size")
    data = {name: config[name] for name in DATA_KEYS if config.get(name) is not None}
    arguments = {name: _edge(value) if name in EDGES else value for name, value in arguments.items()}
    if edge := arguments.get("img_size"):
        data["input_size"] = (3, edge, edge)
    return Published(
        content["architecture"],
        int(content.get("num_classes", config.get("num_classes", 0))),
        {"input_size": (3, 224, 224)} | data,
        arguments,
        list(map(printable, label_names)) if isinstance(label_names, list) else None,
        _edge(size) if size else None,
        config.get("test_crop_pct"),
    )


def _edge(size: Any) -> int:
    """Return the edge length of a square that is given as a number or as a shape."""
    return int(size[-1] if isinstance(size, (list, tuple)) else size)


def of_name(name: str) -> Published:
    """Describe the weights with this timm name. Raise ValueError for an unknown name or tag."""
    config = dataclasses.asdict(registered(name))
    return _published({"architecture": name, "num_classes": config["num_classes"]}, config)


def class_names(published: Published) -> list[tuple[str, ...]] | None:
    """Return the names of each class: the displayed name, then other names that data sets may use.

    The names come from the folder, or from timm's list of ImageNet synsets with the same number of classes.
    Return None if neither source is available.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if (names := published.label_names) and len(names) == published.classes:
        known = _descriptions(ImageNetInfo("imagenet-22k"))
        return _with_descriptions(names, known) if known.keys() >= {*names} else [(name,) for name in names]
    subset = infer_imagenet_subset({"num_classes": published.classes})
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    return _with_descriptions(info.label_names(), _descriptions(info))


def _descriptions(info: Any) -> dict[str, str]:
    return info.label_descriptions(as_dict=True)


def _with_descriptions(synsets: list[str], descriptions: dict[str, str]) -> list[tuple[str, ...]]:
    """Return each class's names. If two classes share a description, the displayed names add the synset."""
    counts = Counter(descriptions[synset] for synset in synsets)
    rows: list[tuple[str, ...]] = []
    for synset in synsets:
        text = descriptions[synset]
        displayed = text if counts[text] == 1 else f"{text} ({synset})"
        rows.append((displayed, synset, text, text.partition(",")[0]))
    return rows


def download(name: str) -> Path:
    """Download config.json and the weights of a timm model from the hub, and return the folder.

    Raises:
        ValueError: If timm has no weights for the model, or the hub can't be reached.
    """
    from huggingface_hub import snapshot_download

    config = registered(name)
    if not config.hf_hub_id:
        raise ValueError(f"timm has no weights for {name} on the hub. Pass a file or folder of weights.")
    problem = hub_problem()
    try:
        return Path(snapshot_download(config.hf_hub_id, allow_patterns=[CONFIG, MODEL_FILE]))
    except OSError as error:
        command = f"hf download {config.hf_hub_id} {CONFIG} {MODEL_FILE} --local-dir DIR"
        raise ValueError(
            f"the hub can't be reached ({problem or error}). Run `{command}` on a machine with access, copy"
            " DIR here, and pass DIR as the model."
        ) from None
