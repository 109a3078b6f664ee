"""Accuracy of the recipes on CIFAR-10, and how long it takes; in a dry run on digits."""

from benchmarks.gpu.rows import OK, Result, Row, Setting, Skip, judged, small_images, train

GOALS = {"train_cnn_b": 0.94, "train_cnn_a": 0.75}


def rows() -> dict[str, Row]:
    return {f"{script} on CIFAR-10": trained(script, goal) for script, goal in GOALS.items()}


def trained(script: str, goal: float) -> Row:
    def row(setting: Setting) -> Result:
        if not setting.dry_run and setting.data == "synthetic":
            raise Skip("needs --data: a folder with CIFAR-10's parquet files")
        steps = ["--epochs", 1] if setting.dry_run else []
        _, result = train(setting, script, small_images(setting, script), *steps)
        accuracy, note = round(result["final_accuracy"], 4), f"{result['train_s']:.0f} s of training"
        return Result(accuracy, "", OK, note) if setting.dry_run else judged(accuracy, "", goal, note)

    return row
