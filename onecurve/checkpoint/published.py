"""Downloads timm models from the Hugging Face Hub, and reads the config.json stored with their weights."""

import contextlib
import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecurve.checkpoint.format import MODEL_FILE
from onecurve.models.preprocessing import data_config
from onecurve.models.timm_models import registered_config
from onecurve.system.env import check_hub_or_go_offline
from onecurve.system.files import read_json
from onecurve.system.text import printable

CONFIG_FILE = "config.json"
# Image preprocessing keys in timm's config.json
PREPROCESSING_KEYS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
EDGE_LENGTH_ARGUMENTS = ("img_size", "patch_size")  # model arguments in pixels
# Model arguments set by train_vit.py's flags, or not needed for evaluation
KNOWN_MODEL_ARGUMENTS = {*EDGE_LENGTH_ARGUMENTS, "in_chans", "num_classes", "global_pool", "depth"}
KNOWN_MODEL_ARGUMENTS |= {"drop_rate", "drop_path_rate"}


@dataclass(frozen=True)
class PublishedModel:
    """Description of a timm model's published weights: architecture, classes and data configuration."""

    architecture: str
    class_count: int
    preprocessing_settings: dict[str, Any]  # values of PREPROCESSING_KEYS in config.json
    model_arguments: dict[str, Any]  # model arguments in config.json
    label_names: list[str] | None = None
    test_image_size: int | None = None  # second image size for which the authors also report an accuracy
    test_crop_pct: float | None = None  # crop_pct for the second image size

    @property
    def image_size(self) -> int:
        """Edge length of the images in pixels."""
        return _edge_length(self.preprocessing_settings["input_size"])

    def preprocessing(self) -> dict[str, Any]:
        """Return the model's preprocessing record, with timm's defaults for missing settings."""
        from timm.data import resolve_data_config

        timm_data_config = resolve_data_config(pretrained_cfg=self.preprocessing_settings)
        return data_config(timm_data_config).to_json()

    def second_size_note(self) -> str:
        """Return a note about the second image size, or an empty string if the model has only one.

        timm's validate.py uses the second image size by default.
        """
        if self.test_image_size is None:
            return ""
        crop_flag = f" --crop_pct {self.test_crop_pct:g}" if self.test_crop_pct else ""
        size_flag = f"--image_size {self.test_image_size}"
        return f"The model's authors also report the accuracy for {size_flag}{crop_flag}."


def read_published(folder: Path) -> PublishedModel | None:
    """Return the timm model that a folder's config.json describes, or None without such a description.

    Raises:
        ValueError: If config.json is damaged.
    """
    import timm

    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        return None
    model_config = read_json(config_file)
    # Older files store the pretrained settings at the top level
    pretrained_config = model_config.get("pretrained_cfg", model_config)
    if not timm.is_model(str(model_config.get("architecture"))):
        return None
    try:
        return _parse_config(model_config, pretrained_config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{config_file} does not describe a timm model: {error}") from None


def _parse_config(model_config: dict[str, Any], pretrained_config: dict[str, Any]) -> PublishedModel:
    """Convert timm's configuration of published weights.

    Args:
        model_config: Content of config.json: the architecture, the number of classes and model arguments.
        pretrained_config: timm's pretrained_cfg: preprocessing, and defaults for missing model settings.

    Raises:
        KeyError, TypeError, ValueError: If the configuration is malformed.
    """
    label_names = model_config.get("label_names") or pretrained_config.get("label_names")
    test_input_size = pretrained_config.get("test_input_size")
    preprocessing_settings = {"input_size": (3, 224, 224)} | {
        key: pretrained_config[key] for key in PREPROCESSING_KEYS if pretrained_config.get(key) is not None
    }
    model_arguments = dict(model_config.get("model_args") or {})
    for edge_argument in EDGE_LENGTH_ARGUMENTS:
        if edge_argument in model_arguments:
            model_arguments[edge_argument] = _edge_length(model_arguments[edge_argument])
    if edge_pixels := model_arguments.get("img_size"):  # overrides the pretrained configuration
        preprocessing_settings["input_size"] = (3, edge_pixels, edge_pixels)
    return PublishedModel(
        architecture=model_config["architecture"],
        class_count=int(model_config.get("num_classes", pretrained_config.get("num_classes", 0))),
        preprocessing_settings=preprocessing_settings,
        model_arguments=model_arguments,
        label_names=list(map(printable, label_names)) if isinstance(label_names, list) else None,
        test_image_size=_edge_length(test_input_size) if test_input_size else None,
        test_crop_pct=pretrained_config.get("test_crop_pct"),
    )


def _edge_length(size_or_shape: Any) -> int:
    """Return the edge length of a square image, given as a number or a shape in config.json."""
    return int(size_or_shape[-1] if isinstance(size_or_shape, (list, tuple)) else size_or_shape)


def published_from_name(name: str) -> PublishedModel:
    """Return timm's description of the weights with this name, without downloading them.

    Raises:
        ValueError: If timm does not recognize the model name or the weight tag.
    """
    pretrained_config = dataclasses.asdict(registered_config(name))
    model_config = {"architecture": name, "num_classes": pretrained_config["num_classes"]}
    return _parse_config(model_config, pretrained_config)


def published_class_names(published: PublishedModel) -> list[tuple[str, ...]] | None:
    """Return each class's names: the displayed name, followed by alternative names used by data sets.

    The names come from config.json, or from timm's list of ImageNet synsets with the same number of classes.
    If neither source contains class names, the function returns None.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    label_names = published.label_names
    if label_names and len(label_names) == published.class_count:
        known_descriptions = _synset_descriptions(ImageNetInfo("imagenet-22k"))
        if known_descriptions.keys() >= {*label_names}:  # the class names are synsets, such as n01440764
            return _list_synset_names(label_names, known_descriptions)
        return [(label_name,) for label_name in label_names]
    imagenet_subset_name = infer_imagenet_subset({"num_classes": published.class_count})
    if imagenet_subset_name is None:
        return None
    imagenet_info = ImageNetInfo(imagenet_subset_name)
    return _list_synset_names(imagenet_info.label_names(), _synset_descriptions(imagenet_info))


def stored_class_names(weight_file: Path) -> list[list[str]] | None:
    """Return all names of each class from the config.json in a weight file's folder.

    export.py and timm write class names into config.json. For a timm model without class names, the function
    returns ImageNet's.
    """
    with contextlib.suppress(OSError, ValueError):
        if published := read_published(weight_file.parent):
            return class_name_lists(published)
        label_names = read_json(weight_file.with_name(CONFIG_FILE)).get("label_names")
        if isinstance(label_names, list) and all(isinstance(label_name, str) for label_name in label_names):
            return [[printable(label_name)] for label_name in label_names]
    return None


def class_name_lists(published: PublishedModel) -> list[list[str]] | None:
    """Return all names of each class as lists, which JSON can store, or None if the names are unknown."""
    names_by_class = published_class_names(published)
    return None if names_by_class is None else [list(class_names) for class_names in names_by_class]


def _synset_descriptions(imagenet_info: Any) -> dict[str, str]:
    """Map synsets, such as n01440764, to descriptions, such as `tench, Tinca tinca`."""
    return imagenet_info.label_descriptions(as_dict=True)


def _list_synset_names(synsets: list[str], description_by_synset: dict[str, str]) -> list[tuple[str, ...]]:
    """Return each class's names: displayed name, synset, description, and first name in the description.

    If several classes share a description, their displayed names also include the synset.
    """
    class_count_by_description = Counter(description_by_synset[synset] for synset in synsets)
    names_by_class: list[tuple[str, ...]] = []
    for synset in synsets:
        description = description_by_synset[synset]
        is_description_unique = class_count_by_description[description] == 1
        displayed_name = description if is_description_unique else f"{description} ({synset})"
        first_synonym, _, _ = description.partition(",")
        names_by_class.append((displayed_name, synset, description, first_synonym))
    return names_by_class


def download_from_hub(model_name: str) -> Path:
    """Download a timm model's config.json and weights from the Hugging Face Hub into the local Hub cache.

    Returns:
        The folder in the cache. If the Hub can't be reached, an earlier download is used.

    Raises:
        ValueError: If timm has no weights for the model, or the Hub can't be reached and the cache does not
            contain the model.
    """
    from huggingface_hub import snapshot_download

    hub_id = registered_config(model_name).hf_hub_id
    if not hub_id:
        raise ValueError(
            f"timm provides no weights for {model_name} on the Hub. Pass the path of a weight file or folder."
        )
    hub_problem = check_hub_or_go_offline()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=[CONFIG_FILE, MODEL_FILE]))
    except OSError as error:
        download_command = f"hf download {hub_id} {CONFIG_FILE} {MODEL_FILE} --local-dir DIR"
        raise ValueError(
            f"the Hub can't be reached ({hub_problem or error})."
            f" Run `{download_command}` on a machine with internet access,"
            " copy the folder DIR to this machine, and pass DIR as the model."
        ) from None
