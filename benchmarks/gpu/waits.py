"""Calls in a step of each train script that wait for the GPU; a dry run only takes the steps."""

import json

from benchmarks.gpu.rows import FAIL, OK, Result, Row, Setting, need_gpu, small_images, succeeds

SCRIPTS = ("train_hello", "train_cnn_a", "train_cnn_b", "train_vit")


def checks() -> dict[str, Row]:
    return {script: watched(script) for script in SCRIPTS}


def watched(script: str) -> Row:
    def row(setting: Setting) -> Result:
        hello = ["train_hello.py", "--data_size", 65536]
        words = hello if script == "train_hello" else small_images(setting, script)
        folder = ["--output_dir", setting.folder / script, "--trackers", "none", "--log_every", 1000]
        watch = ["speed", "--steps", 2] if setting.dry_run else ["waits", "--steps", 20]
        output = succeeds(setting, ["-m", "benchmarks.gpu.probe", *watch, *words, *folder])
        need_gpu(setting)
        found = json.loads(output.splitlines()[-1])
        places = ", ".join(f"{place} {count}" for place, count in found["places"].items())
        return Result(found["waits"], "waits a step", FAIL if found["waits"] else OK, places)

    return row
