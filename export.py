"""Exports a trained model to files that timm, plain PyTorch or ONNX Runtime load without this repository.

    python export.py runs/train_cnn_b/fsdp_128_15_1_4 models/vit
    python export.py runs/train_cnn_a/single_128_10_1_1 models/cnn_a --onnx
    python export.py s3://bucket/prefix models/vit --push OWNER/NAME

The model is a run's folder or S3 prefix (its best checkpoint, or --which latest), or a checkpoint's folder.
It is verified first, and nothing in it is unpickled. If the run has averaged weights they are used. Flags of
the script that trained it change the recipe, as --data. The folder gets:

model.safetensors  the weights in fp32
config.json        how to build the model and prepare images, and its classes
model.py           for models that timm does not have: build, load and prepare, with torch alone
model.onnx         with --onnx: the same model for ONNX Runtime; its metadata repeat config.json
README.md          a model card: data, recipe, metrics; add the licence yourself

timm loads its own models by `timm.create_model("local-dir:FOLDER", pretrained=True)`, and from the hub by
`hf-hub:OWNER/NAME`. transformers loads them by `pipeline("image-classification", model="FOLDER")`. Before the
folder appears, the model is loaded from the new files, and its logits on images of the data are compared:
equal bits, and within 1e-4 by ONNX Runtime. --push uploads the folder with the hub's own client, and the
run's curves, which the hub shows; `hf auth login` or HF_TOKEN gives it access.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from onecurve.system.cli import command_parser, run_command
from onecurve.system.files import own_files

SAMPLE = 16  # images on which the exported model is compared
ONNX_BOUND = 1e-4  # of logits
OPTIONAL = "pip install -r requirements-onnx.txt"


def main() -> int:
    flags, words = parse_flags(sys.argv[1:])
    folder = Path(os.path.expanduser(flags.folder)).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{flags.folder} is there already: give a new folder, or remove it")
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if not find_spec(name)]
    if flags.onnx and missing:
        raise ValueError(f"--onnx: {missing[0]} is not installed: {OPTIONAL}")
    from tools.inference import exported as tool  # imports torch
    from tools.logbook.card import model_card, run_folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
        part = Path(scratch) / folder.name
        exported = tool.open_trained(flags.model, flags.which, flags.script, words, Path(scratch), SAMPLE)
        print(f"exporting {exported.trained.name}", flush=True)
        part.mkdir()
        about = tool.write_model(exported, part)
        tool.check_reloaded(exported, part)
        if flags.onnx:
            tool.write_onnx(exported, about, part / "model.onnx")
            tool.check_onnx(exported, part / "model.onnx", ONNX_BOUND)
        if flags.push:
            write_curves(run_folder(exported.trained.weights), part / "runs" / exported.script.__name__)
        (part / "README.md").write_text(model_card(folder.name, exported, about), encoding="utf-8")
        if folder.exists():
            folder.rmdir()  # empty
        shutil.move(part, folder)
    print("\n".join(f"{folder / name}" for name in sorted(os.listdir(folder))))
    if flags.push:
        print(push(folder, flags.push))
    return 0


def parse_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the words of the script that trained the model."""
    parser = command_parser(__doc__, usage="export.py MODEL FOLDER [flags] [flags of the script, as --data]")
    add = parser.add_argument
    add("model", help="a run's folder, its s3:// prefix, or a checkpoint's folder")
    add("folder", help="a new folder for the files")
    add("--which", choices=("best", "latest"), default="best", help="checkpoint of a run (default: best)")
    add("--script", help="the script that trained the model, if not one of this project")
    add("--onnx", action="store_true", help=f"write model.onnx, too; needs: {OPTIONAL}")
    add("--push", metavar="OWNER/NAME", help="upload the folder to this repository of the hub")
    flags, others = parser.parse_known_args(words)
    if flags.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", flags.push):
        parser.error(f"--push {flags.push}: give OWNER/NAME")
    return flags, others


def write_curves(run: Path | None, folder: Path) -> None:
    """Writes the run's curves as TensorBoard events, without its recipe and pictures."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    for number, file in enumerate(own_files(run, "tensorboard/events.*") if run else ()):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"events.out.tfevents.{number:04}", "wb") as target:
            for event in LegacyEventFileLoader(str(file)).Load():
                if all(value.WhichOneof("value") == "simple_value" for value in event.summary.value):
                    RecordWriter(target).write(event.SerializeToString())


def push(folder: Path, name: str) -> str:
    """Uploads a folder's files to a repository of the hub, creating it if needed. Returns its url."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the exported model")
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        again = f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))}"
        remedy = f"{folder} is complete: log in (hf auth login), then: {again}"
        raise ValueError(f"--push {name}: {first}. {remedy}") from None
    return str(url)


if __name__ == "__main__":
    sys.exit(run_command(main))
