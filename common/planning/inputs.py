"""What the input lets through: images decoded by worker processes during the training, and read from S3.

Images that fit in memory are decoded once, before the training: nothing limits there. Shards, and what lies
in S3, are decoded during it.
"""

from dataclasses import dataclass
from pathlib import Path

from common.data.shards import MANIFEST, parse_manifest

# Processor time of a worker to decode and crop a photograph at 224 pixels: 1.12 ms for 104 kB, 0.39 ms for
# 29 kB (benchmarks/decoding.py, one core of an AMD EPYC of family 26): a line through both.
DECODING_S, DECODING_S_PER_KB = 0.11e-3, 9.7e-6
IMAGE_KB = 104  # a photograph of ImageNet as it is published
DECODING, S3 = "decoding", "S3"


@dataclass(frozen=True)
class Input:
    """The images that a training reads. image_kb: 10^3 bytes of each as it is stored."""

    in_s3: bool
    image_kb: float
    images: int | None  # to train on; None where it is not known without S3

    def images_per_s(
        self, processes: int, workers: int, hosts: int, s3_gb_s: float | None
    ) -> dict[str, float]:
        """The most that decoding and S3 let through, of all devices together.

        workers: decoding processes of a device; 0: the training's own process decodes. s3_gb_s: of a host, in
        10^9 bytes a second; None: not known, and no limit.
        """
        of_worker = 1 / (DECODING_S + DECODING_S_PER_KB * self.image_kb)
        limits = {DECODING: of_worker * max(1, workers) * processes}
        if self.in_s3 and s3_gb_s:
            limits[S3] = s3_gb_s * 1e6 / self.image_kb * hosts
        return limits


def input_of(data: str, image_kb: float | None) -> Input | None:
    """What --data needs during the training; None where images are decoded before it.

    image_kb: as the user knows it, else the mean of local shards, else a photograph's.
    """
    in_s3, images, file = data.startswith("s3://"), None, Path(data) / MANIFEST
    if not in_s3:
        if not file.is_file():
            return None
        manifest = parse_manifest(file.read_bytes(), str(file))
        shards = manifest.splits["train"].shards
        in_s3, images = manifest.store is not None, sum(shard.images for shard in shards)
        image_kb = image_kb or sum(shard.bytes for shard in shards) / images / 1e3
    return Input(in_s3, image_kb or IMAGE_KB, images)
