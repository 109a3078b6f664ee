"""The features that a model computes before its head, for predict.py --embeddings."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from common.run import plots
from common.system.files import write_bytes

SEED = 0  # of t-SNE


def keep_features(model: Any) -> list[np.ndarray]:
    """The list to which each forward adds what its last linear layer gets: float32 [B, features].

    For a model of timm that is its classifier, of two the first.
    """
    if hasattr(model, "get_classifier"):
        head = model.get_classifier()
        head = head[0] if isinstance(head, tuple) else head
    else:
        head = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    kept: list[np.ndarray] = []
    head.register_forward_pre_hook(lambda _, given: kept.append(given[0].flatten(1).float().cpu().numpy()))
    return kept


def write_features(file: Path, features: np.ndarray) -> None:
    """Writes float32 [pictures, features] as a .npy file."""
    content = io.BytesIO()
    np.save(content, features, allow_pickle=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, content.getvalue())


def draw_features(file: Path, features: np.ndarray, names: list[str], way: str) -> None:
    """Draws each picture as a point, by its predicted class. way: `pca` or `tsne`. At least 3 pictures."""
    if way == "pca":
        from sklearn.decomposition import PCA

        found = PCA(2, random_state=SEED)
    else:
        from sklearn.manifold import TSNE

        found = TSNE(2, perplexity=min(30, (len(features) - 1) / 3), random_state=SEED)
    points, named = found.fit_transform(features), np.array(names)
    clouds = {name: points[named == name].T for name in sorted(set(names))}
    panel = plots.Panel(f"{way} 1", f"{way} 2", clouds, is_cloud=True)
    plots.panels(file, [[panel]], f"{len(names):,} pictures")
