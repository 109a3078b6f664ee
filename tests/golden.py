"""The record of what must not change while the code becomes smaller: stores it in a file, or compares.

    python -m tests.golden store golden.json
    python -m tests.golden compare golden.json

Losses, rates and accuracies of all scripts under all strategies, the hashes of two checkpoints of each
run, and the hashes of shards, index and manifest of a miniature ILSVRC. It goes once the house is small.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from tests.conftest import CNN, ROOT, STRATEGIES, VIT

COMMON = ["--batch_size=16", "--max_steps=8", "--checkpoint_every=4", "--log_every=1", "--epochs=1"]
SCRIPTS = {
    "hello": ["train_hello.py", *COMMON],
    "cnn_a": [*CNN, "--data", "digits", *COMMON],
    "cnn_b": ["train_cnn_b.py", "--width", "16", "--data", "digits", *COMMON],
    "vit": [*VIT, "--data", "digits", *COMMON],
}
CHANGING = ("wall_s", "images_per_s", "mfu_pct")  # parts of names of times and speeds
ILSVRC = Path(os.environ.get("GOLDEN_ILSVRC", "/nowhere"))  # of tests/support/imagenet.py, made once


def run(words: list[str]) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def hashes(folder: Path, pattern: str) -> dict[str, str]:
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}


def record_run(script: str, strategy: str, folder: Path) -> dict:
    run([*STRATEGIES[strategy], *SCRIPTS[script], "--output_dir", str(folder)])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{k: v for k, v in line.items() if not any(c in k for c in CHANGING)} for line in lines],
        "result": sorted(json.loads((folder / "result.json").read_text())),
        "recipe": sorted(json.loads((folder / "recipe.json").read_text())),
        "checkpoints": hashes(folder / "checkpoints", "*.safetensors"),
    }


def record_shards(folder: Path, *flags: str) -> dict[str, str]:
    words = ["prep_imagenet.py", "--data", str(ILSVRC), "--no_verify", "--subset", "--out", str(folder)]
    run([sys.executable, *words, *flags])
    return hashes(folder, "*")


def record(tmp: Path) -> dict:
    found = {}
    for script, strategy in product(SCRIPTS, ("single", "ddp", "fsdp", "zero2", "zero3")):
        print(script, strategy, flush=True)
        found[f"{script} {strategy}"] = record_run(script, strategy, tmp / f"{script}_{strategy}")
    if ILSVRC.exists():
        found["shards"] = record_shards(tmp / "shards", "--shard_mib", "0.1")
        found["shards resized"] = record_shards(tmp / "resized", "--shard_mib", "0.1", "--resize", "64")
        found["index"] = record_shards(tmp / "index", "--format", "index")
    return found


def main() -> None:
    action, file = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as tmp:
        now = json.loads(json.dumps(record(Path(tmp))))
    if action == "store":
        file.write_text(json.dumps(now, indent=1))
        return
    before = json.loads(file.read_text())
    differing = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    for name in differing:
        then, new = before.get(name) or {}, now.get(name) or {}
        print(name, "differs in", [key for key in sorted(then | new) if then.get(key) != new.get(key)])
    print(f"{len(before) - len(differing)} of {len(before)} records are equal")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
