"""Models as the hub has them: the config.json beside their weights, their class names, and their download."""

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
# Keys of config.json that describe the preparation of images, as timm names them
DATA_KEYS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
EDGES = ("img_size", "patch_size")
# Arguments of a model that flags of train_vit.py decide, or that an evaluation does not use
KNOWN_ARGUMENTS = {"in_chans", "num_classes", "global_pool", "img_size", "patch_size", "depth"}
KNOWN_ARGUMENTS |= {"drop_rate", "drop_path_rate"}


@dataclass(frozen=True)
class Published:
    """A model of timm that a folder holds: its architecture, classes and data configuration."""

    architecture: str
    classes: int
    data: dict[str, Any]  # of DATA_KEYS those that config.json has
    arguments: dict[str, Any]  # of the model
    label_names: list[str] | None = None
    test_size: int | None = None  # a second image size at which the authors measured, and its crop
    test_crop_pct: float | None = None

    @property
    def image_size(self) -> int:
        return _edge(self.data["input_size"])

    def preprocessing(self) -> dict[str, Any]:
        """The record of how the model's inputs are prepared, with timm's defaults."""
        from timm.data import resolve_data_config

        return data_config(resolve_data_config(pretrained_cfg=self.data)).to_json()

    def note(self) -> str:
        """Name the second size of a model, which timm's validate.py takes by default; empty without one."""
        if self.test_size is None:
            return ""
        crop = f" --crop_pct {self.test_crop_pct:g}" if self.test_crop_pct else ""
        return f"The model's authors also measured it with --image_size {self.test_size}{crop}."


def read_published(folder: Path) -> Published | None:
    """Read a folder's config.json; None where it is not a model of timm. ValueError for a damaged file."""
    import timm

    file = folder / CONFIG
    if not file.is_file():
        return None
    about = read_json(file)
    config = about.get("pretrained_cfg", about)  # older files have one level
    if not timm.is_model(str(about.get("architecture"))):
        return None
    try:
        return _published(about, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a model of timm: {error}") from None


def _published(about: dict[str, Any], config: dict[str, Any]) -> Published:
    arguments = about.get("model_args") or {}
    named = about.get("label_names") or config.get("label_names")
    size = config.get("test_input_size")
    data = {name: config[name] for name in DATA_KEYS if config.get(name) is not None}
    arguments = {name: _edge(value) if name in EDGES else value for name, value in arguments.items()}
    if edge := arguments.get("img_size"):
        data["input_size"] = (3, edge, edge)
    return Published(
        about["architecture"],
        int(about.get("num_classes", config.get("num_classes", 0))),
        {"input_size": (3, 224, 224)} | data,
        arguments,
        list(map(printable, named)) if isinstance(named, list) else None,
        _edge(size) if size else None,
        config.get("test_crop_pct"),
    )


def _edge(size: Any) -> int:
    """The edge of a square that is written as a number, or by its shape."""
    return int(size[-1] if isinstance(size, (list, tuple)) else size)


def of_name(name: str) -> Published:
    """Describe the weights that timm knows by a name. ValueError for an unknown name or tag."""
    config = dataclasses.asdict(registered(name))
    return _published({"architecture": name, "num_classes": config["num_classes"]}, config)


def class_names(published: Published) -> list[tuple[str, ...]] | None:
    """Return each class's names: the shown one, and others by which data may call it.

    They come from the folder, or by the number of classes from timm's lists of ImageNet's synsets. None where
    neither knows them.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if (named := published.label_names) and len(named) == published.classes:
        known = _descriptions(ImageNetInfo("imagenet-22k"))
        return _with_descriptions(named, known) if known.keys() >= {*named} else [(name,) for name in named]
    subset = infer_imagenet_subset({"num_classes": published.classes})
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    return _with_descriptions(info.label_names(), _descriptions(info))


def _descriptions(info: Any) -> dict[str, str]:
    return info.label_descriptions(as_dict=True)


def _with_descriptions(synsets: list[str], descriptions: dict[str, str]) -> list[tuple[str, ...]]:
    """A class is shown by its description, followed by the synset where two classes share one."""
    times = Counter(descriptions[synset] for synset in synsets)
    rows: list[tuple[str, ...]] = []
    for synset in synsets:
        text = descriptions[synset]
        shown = text if times[text] == 1 else f"{text} ({synset})"
        rows.append((shown, synset, text, text.partition(",")[0]))
    return rows


def download(name: str) -> Path:
    """Fetch config.json and the weights of a model of timm from the hub. Returns their folder.

    ValueError if timm has no weights for it, or the hub can't be reached.
    """
    from huggingface_hub import snapshot_download

    config = registered(name)
    if not config.hf_hub_id:
        raise ValueError(f"timm has no weights for {name} on the hub: give a file or a folder of weights")
    problem = hub_problem()
    try:
        return Path(snapshot_download(config.hf_hub_id, allow_patterns=[CONFIG, MODEL_FILE]))
    except OSError as error:
        fetch = f"hf download {config.hf_hub_id} {CONFIG} {MODEL_FILE} --local-dir DIR"
        raise ValueError(
            f"the hub can't be reached ({problem or error}). Fetch {name} where it can, with `{fetch}`, copy"
            " DIR here, and give DIR as the model"
        ) from None
