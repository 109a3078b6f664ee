"""From encoded images to uint8 pixels: decoding, crops, and the file of encoded images that a cache holds."""

import io
import json
import math
import os
from pathlib import Path

import numpy as np

SPLITS = ("train", "val")


def decode(data: bytes) -> np.ndarray:
    """Decodes one image, turned upright by its EXIF tag: uint8 [H, W, 3]. Raises ValueError with the reason.

    torchvision's JPEG decoder is the fastest; PIL does what it refuses (a PNG named .jpg) and other formats.
    Both refuse a file that is cut short. On JPEG they agree within 2 of 255 (both use libjpeg-turbo).
    """
    if data[:2] == b"\xff\xd8":
        # A JPEG of too many pixels, at 1 bit per block of 8x8 or more, has at least this many bytes.
        if len(data) > 250_000:
            _open(data)
        pixels = _decode_jpeg(data)
        if pixels is not None:
            return pixels
    return _decode_by_pil(data)


def _decode_jpeg(data: bytes) -> np.ndarray | None:
    """None where torchvision refuses: PIL then decodes, or knows the better reason."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    # bytearray: torch warns about memory that may not be written
    encoded = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    try:
        pixels = decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:
        return None
    return pixels.permute(1, 2, 0).numpy()  # [3, H, W] -> [H, W, 3], which is how it lies in memory


def _decode_by_pil(data: bytes) -> np.ndarray:
    from PIL import ImageOps

    image = _open(data)
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # convert("RGB") would clip all above 255 to white
            return np.repeat((np.asarray(image) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels have 32 bits (PIL's mode {image.mode}), not 8 or 16")
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # PIL warns about the direct way
        return np.array(image.convert("RGB"))  # a copy, as torch warns about memory that may not be written
    except ValueError:
        raise
    except Exception as error:  # what PIL raises on a broken file has no common class
        raise ValueError(f"{error}" or type(error).__name__) from None


def _open(data: bytes):
    """PIL's lazy image. Raises ValueError where it is none, or so large that PIL warns of a bomb."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ValueError("the file is empty")
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("not an image that PIL can read") from None
    except Exception as error:  # above twice the limit; what a broken file raises has no common class
        raise ValueError(str(error) or type(error).__name__) from None
    # Not by turning its warning into an error: filters of warnings are not safe to change with threads.
    if image.width * image.height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels: could be a decompression bomb")
    return image


class Encoded:
    """The encoded images of one split, by number: bytes in a memory-mapped file, or paths of image files."""

    def __init__(self, folder: Path, split: str):
        self.offsets = np.load(folder / f"{split}_offsets.npy", mmap_mode="r")
        self.items = np.memmap(folder / f"{split}_items.bin", np.uint8, "r")
        about = json.loads((folder / f"{split}_items.json").read_text())
        self.root, self.parts = about["root"], about["parts"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def where(self, i: int) -> str:
        """What to call image i in a message: its path, or the row of its table."""
        if self.root is not None:
            return os.path.join(self.root, os.fsdecode(self._item(i)))
        for name, rows in self.parts:
            if i < rows:
                return f"row {i} of {name}"
            i -= rows
        raise AssertionError("no such image")

    file = where

    def decode(self, i: int) -> np.ndarray:
        """uint8 [H, W, 3]. Raises ValueError that names the image, OSError where its file can't be read."""
        data = self._item(i) if self.root is None else Path(self.where(i)).read_bytes()
        try:
            return decode(data)
        except ValueError as error:
            raise ValueError(f"{self.where(i)}: {error}") from None

    def _item(self, i: int) -> bytes:
        return self.items[self.offsets[i] : self.offsets[i + 1]].tobytes()


def random_resized_crop(image: np.ndarray, size: int, draws: np.ndarray) -> np.ndarray:
    """Inception's crop (Szegedy et al. 2014), to uint8 [size, size, 3].

    As torchvision's RandomResizedCrop: area 0.08 to 1 of the image, aspect ratio 3/4 to 4/3, ten attempts,
    then the largest central crop within these ratios. draws: float64 [40] in [0, 1), four for each attempt.
    """
    height, width = image.shape[:2]
    for area, ratio, down, right in draws.reshape(-1, 4):
        target = height * width * (0.08 + 0.92 * area)
        aspect = math.exp(math.log(3 / 4) + ratio * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(down * (height - h + 1)), int(right * (width - w + 1))
            break
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top, left = (height - h) // 2, (width - w) // 2
    return _resize(image[top : top + h, left : left + w], size, size)


def central_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Shorter side to size * 256 / 224, then the middle: uint8 [size, size, 3]; ImageNet's usual way."""
    height, width = image.shape[:2]
    short = round(size * 256 / 224)
    h, w = (short, short * width // height) if height <= width else (short * height // width, short)
    top, left = round((h - size) / 2), round((w - size) / 2)
    return _resize(image, h, w)[top : top + size, left : left + size]


def _resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear with antialiasing on uint8, as torchvision's resize does it."""
    import torch
    import torch.nn.functional as F

    # [1, 3, H, W], channels last in memory. With the batch added after the permutation its stride would deny
    # that, and torch would take a way that is more than twice as slow, to the same pixels.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return pixels[0].permute(1, 2, 0).numpy()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
