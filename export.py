"""Export a trained model to files that timm, PyTorch or ONNX Runtime can load without this repository.

    python export.py runs/train_cnn_b/fsdp_128_15_1_4 models/vit
    python export.py runs/train_cnn_a/single_128_10_1_1 models/cnn_a --onnx
    python export.py s3://bucket/prefix models/vit --push OWNER/NAME

MODEL is a run folder, a run's S3 prefix, or a checkpoint folder. For a run, the command exports the best
checkpoint, or the latest checkpoint with --which latest. All files are verified before they are used, and
nothing is unpickled. If a checkpoint contains averaged weights (EMA), the command exports them. Train script
flags, for example --data, are also accepted and override the recipe. The command writes these files to
FOLDER:

model.safetensors  the weights in fp32
config.json        the architecture, the preprocessing and the class names
model.py           code that builds and loads the model with torch alone (only for models not in timm)
model.onnx         the model and the contents of config.json, for ONNX Runtime (only with --onnx)
README.md          a model card with the data, the recipe and the metrics, but without a licence

To load a timm model, use `timm.create_model("local-dir:FOLDER", pretrained=True)`. To load a timm model from
the Hugging Face Hub, replace `local-dir:FOLDER` with `hf-hub:OWNER/NAME`. transformers loads timm models with
`pipeline("image-classification", model="FOLDER")`. Before FOLDER is created, the command loads the new files
and compares the loaded model's logits with the original model's logits on images from the data. The
logits must be bitwise identical. With ONNX Runtime, logits may differ by up to 1e-4. --push uploads FOLDER
and the run's curves with the Hugging Face Hub client. Before you use --push, log in with `hf auth login` or
set HF_TOKEN.
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
from onecurve.system.files import files_inside

SAMPLE = 16  # number of images on which the exported model is compared with the original
ONNX_BOUND = 1e-4  # maximum absolute difference between the two models' logits
OPTIONAL = "pip install -r requirements-onnx.txt"


def main() -> int:
    flags, words = parse_flags(sys.argv[1:])
    folder = Path(os.path.expanduser(flags.folder)).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{flags.folder} already exists. Choose a different folder, or remove the existing one."
        )
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if not find_spec(name)]
    if flags.onnx and missing:
        raise ValueError(f"--onnx needs {missing[0]}, which is not installed. Run: {OPTIONAL}")
    from tools.inference import exported as tool  # this import loads torch
    from tools.logbook.card import model_card, run_folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
        part = Path(scratch) / folder.name
        exported = tool.open_trained(flags.model, flags.which, flags.script, words, Path(scratch), SAMPLE)
        print(f"exporting {exported.trained_model.name}", flush=True)
        part.mkdir()
        config = tool.write_model(exported, part)
        tool.check_reloaded(exported, part)
        if flags.onnx:
            tool.write_onnx(exported, config, part / "model.onnx")
            tool.check_onnx(exported, part / "model.onnx", ONNX_BOUND)
        if flags.push:
            write_curves(run_folder(exported.trained_model.weights), part / "runs" / exported.script.__name__)
        (part / "README.md").write_text(model_card(folder.name, exported, config), encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        shutil.move(part, folder)
    print("\n".join(f"{folder / name}" for name in sorted(os.listdir(folder))))
    if flags.push:
        print(push(folder, flags.push))
    return 0


def parse_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return export.py's flags and the remaining words, which are train script flags."""
    parser = command_parser(__doc__, usage="export.py MODEL FOLDER [flags] [flags of the train script]")
    add = parser.add_argument
    add("model", metavar="MODEL", help="Run folder, s3:// prefix of a run, or checkpoint folder.")
    add("folder", metavar="FOLDER", help="New folder for the exported files.")
    which_help = "Checkpoint to export from a run. Default: best."
    add("--which", choices=("best", "latest"), default="best", help=which_help)
    script_help = (
        "Script that trained the model. --script is required only for a script outside this project."
    )
    add("--script", metavar="FILE", help=script_help)
    add(
        "--onnx",
        action="store_true",
        help=f"Also export the model to model.onnx. --onnx requires `{OPTIONAL}`.",
    )
    add("--push", metavar="OWNER/NAME", help="Hub repository to which FOLDER is uploaded.")
    flags, script_words = parser.parse_known_args(words)
    if flags.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", flags.push):
        parser.error(f"--push {flags.push}: expected OWNER/NAME")
    return flags, script_words


def write_curves(run: Path | None, folder: Path) -> None:
    """Write the run's curves as TensorBoard events. Leave out the run's recipe and images."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    for number, file in enumerate(files_inside(run, "tensorboard/events.*") if run else ()):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"events.out.tfevents.{number:04}", "wb") as target:
            for event in LegacyEventFileLoader(str(file)).Load():
                if all(value.WhichOneof("value") == "simple_value" for value in event.summary.value):
                    RecordWriter(target).write(event.SerializeToString())


def push(folder: Path, name: str) -> str:
    """Upload a folder to a Hub repository and return the repository's URL. Create it if needed."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the exported model")
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        retry = f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))}"
        remedy = f"{folder} contains all exported files. Log in with `hf auth login`, then run: {retry}"
        raise ValueError(f"--push {name} failed: {reason}. {remedy}") from None
    return str(url)


if __name__ == "__main__":
    sys.exit(run_command(main))
