"""Tests of figures of any size: confusion matrices, and sheets of images with long names."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from onecurve.run import plots


# A warning about a missing glyph is an error, because characters without a glyph must be shown escaped
@pytest.mark.filterwarnings("error:Glyph")
@pytest.mark.parametrize("classes", [2, 40, 1000])
def test_confusion_matrices_of_any_size(classes, tmp_path):
    names = [f"${i} _class_ \u732b \U0001f431 of a name that is longer than others" for i in range(classes)]
    matrix = [[i == j for j in range(classes)] for i in range(classes)]
    plots.draw_confusion_matrix(tmp_path / "c.png", matrix, names, "a $title")
    assert (tmp_path / "c.png").stat().st_size < 120_000


@pytest.mark.filterwarnings("error:constrained_layout:UserWarning")
@pytest.mark.parametrize("count", [1, 24])
def test_captions_are_whole_below_their_images(count, tmp_path, monkeypatch):
    """Check that ImageNet's long class names are shown in full, without overlaps or smaller images."""
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), savefig(self, *a, **k)))
    name = "American Staffordshire terrier, Staffordshire terrier, American pit bull terrier"
    captions = [f"{name}\nnot {name if i % 3 else 'ox'}\n0.123" for i in range(count)]
    images = np.full((count, 32, 32, 3), [0, 160, 80], np.uint8)
    title = "train_vit on imagenet256, test split: most confident mistakes of a long $title"
    plots.draw_image_sheet(tmp_path / "s.png", images, captions, title)
    sheet = np.asarray(Image.open(tmp_path / "s.png").convert("RGB"))
    assert (sheet == [0, 160, 80]).all(2).sum() > 15_000 * count
    (figure,) = drawn
    texts = [text for axes in figure.axes for text in axes.texts]
    assert [text.get_text().split() for text in texts] == [caption.split() for caption in captions]
    boxes = [text.get_window_extent() for text in (*texts, *figure.texts)]
    boxes += [image.get_window_extent() for axes in figure.axes for image in axes.images]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)
