"""Finds options, blocks and heads of timm models, and replaces some layers with faster ones.

This file contains no list of models. The code inspects the structure of any timm model, so that future models
are also supported.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from onecurve.models.attention import Attention
from onecurve.models.preprocessing import DataConfig, data_config
from onecurve.system.env import rank
from onecurve.system.output import log
from onecurve.upstream.accelerate_ import block_names
from onecurve.upstream.timm_ import replace_attention, replace_patch_convolution

TRIED_SIZES = 8  # number of nearby sizes to try if a model does not accept an image size


def data_config_of(model: nn.Module, recipe: Any = None) -> DataConfig:
    """Return the data configuration that the model's authors specify, modified by the recipe's flags."""
    from timm.data import resolve_model_data_config

    return data_config(resolve_model_data_config(model), recipe)


def registered_config(name: str) -> Any:
    """Return timm's configuration for named weights, or raise ValueError for an unknown name or tag."""
    import timm

    if not timm.is_model(name):
        raise ValueError(f"--model {name} is not in timm. timm.list_models('vit_*') lists the models.")
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:  # the tag is unknown
        architecture, _, tag = name.partition(".")
        tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{architecture}.*")]
        raise ValueError(
            f"--model {name}: {architecture} has no weights named {tag}. Choose one of {', '.join(tags)}"
        ) from None


@functools.cache  # cached because telemetry builds the model a second time
def fitting(name: str, size: int, **options: Any) -> dict[str, Any]:
    """Return the options that timm accepts to build the model for square images of this size.

    The function logs a message if the model does not support drop path or dropout.

    Raises:
        ValueError: If the model does not support a specified patch size or depth, or does not accept the
            image size. For an image size, the message lists the nearest accepted sizes.
    """

    accepted_options, accepts_size = _try_options(name, size, options)
    for option in options.keys() - accepted_options.keys():
        if option in ("patch_size", "depth"):
            raise ValueError(f"--{option} does not apply to --model {name}. Remove --{option}.")
        if options[option] and rank() == 0:
            log.info(f"{name} does not support {option} and is trained without {option}")
    if not accepts_size:
        default_size = registered_config(name).input_size[-1]

        def distance(candidate_size: int) -> tuple[int, int]:
            return abs(candidate_size - size), candidate_size

        nearest_sizes = sorted(range(32, 2 * max(size, default_size), 32), key=distance)[:TRIED_SIZES]
        candidate_sizes = sorted({default_size, *nearest_sizes})
        sizes = [str(candidate) for candidate in candidate_sizes if _try_options(name, candidate, options)[1]]
        if sizes:  # if no size is accepted, timm reports the actual error later
            raise ValueError(f"{name} does not accept --image_size {size}. Choose one of {', '.join(sizes)}.")
    return accepted_options


def _try_options(name: str, size: int, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options that the model accepts, and whether it can process images of this size.

    The model runs on the meta device, so that the trial needs little time and memory and draws no random
    numbers.
    """
    import timm

    options = {"img_size": size, **options}
    with torch.device("meta"), torch.no_grad():
        while True:
            try:
                timm.create_model(name, **options).eval()(torch.zeros(1, 3, size, size))
                return options, True
            except Exception as error:  # the exception type depends on the model
                message = str(error)
            unknown_options = [
                option for option in options if f"'{option}'" in message and "unexpected keyword" in message
            ]
            if not unknown_options:
                return options, False
            options.pop(unknown_options[0])


def block_classes(model: Any) -> tuple[str, ...]:
    """Return the sorted class names of the model's blocks, or () if the blocks can't be determined.

    The blocks are the model's `_no_split_modules`, or else the modules to which `group_matcher` assigns
    separate indices, or else the modules in the model's `stages` or `blocks`. The function replaces a stage
    with its `blocks`, and a torch container with its modules. Single layers and submodules of blocks are not
    blocks.

    Raises:
        ValueError: If the model's layers share parameters, because timm can't save such a model.
    """
    if len([*model.named_parameters(remove_duplicate=False)]) > len([*model.parameters()]):
        raise ValueError(f"{type(model).__name__}'s layers share parameters. Choose a different --model.")
    if names := block_names(model):
        return tuple(sorted(names))
    group_matcher = model.group_matcher(coarse=False) if hasattr(model, "group_matcher") else None
    if isinstance(group_matcher, dict):
        patterns: list[str] = []
        for group_name, group in group_matcher.items():
            if not group or group_name.startswith("stem"):
                continue
            if isinstance(group, str):
                patterns.append(group)
            else:  # a suffix marks layers that join a different group
                patterns += [pattern for pattern, suffix in group if suffix is None]
        candidates = [
            module
            for name, module in model.named_modules()
            if any(re.fullmatch(pattern, name) for pattern in patterns)
        ]
    else:
        candidates = list(getattr(model, "stages", getattr(model, "blocks", nn.Sequential())).children())
    blocks = [block for module in candidates for block in _blocks_in(module)]
    classes = {type(block) for block in blocks}
    inner_classes = {type(module) for block in blocks for module in block.modules() if module is not block}
    return tuple(sorted(cls.__name__ for cls in classes - inner_classes or classes))


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    inner_blocks = getattr(module, "blocks", None)
    container = inner_blocks if isinstance(inner_blocks, nn.Module) else module
    if container is inner_blocks or type(module).__module__.startswith("torch."):
        for child in container.children():
            yield from _blocks_in(child)
    elif next(module.children(), None):
        yield module


def head_names(name: str) -> tuple[str, ...]:
    """Return the names of a timm model's logit layers. Distilled DeiT models have two."""
    import timm

    return _layer_names(getattr(timm.get_pretrained_cfg(name), "classifier", None))


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that compute the logits, by default the last linear layer."""
    if config := getattr(model, "pretrained_cfg", None):
        return _layer_names(config.get("classifier"))
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))[-1:]


def _layer_names(classifier: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the layer names in timm's classifier configuration."""
    names = classifier or "head"
    return (names,) if isinstance(names, str) else tuple(names)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382) for tensors [B, ...].

    In training, this layer drops a residual branch for some samples and scales it for the remaining samples.
    timm's DropPath stores the rate as a Python number, which torch.compile turns into a constant, so that
    each block needs a separate graph. This class avoids separate graphs by storing the rate in a buffer.
    """

    UNITS = 2**24  # float32 represents every integer up to this number
    keep: Tensor

    def __init__(self, rate: float):
        super().__init__()
        # The buffer is an integer, because ZeRO rounds a model's floating-point buffers to bf16.
        self.register_buffer("keep", torch.tensor(round((1 - rate) * self.UNITS)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep / self.UNITS
        kept = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device) < keep
        return x * (kept / keep).to(x.dtype)


class PatchConv2d(nn.Conv2d):
    """Convolution with identical kernel size and stride, computed as one matrix product in training.

    The layer maps [B, C, H, W] to [B, out, H / kernel, W / kernel], channels_last.

    With cuDNN, the convolution took 7.4 ms of a 60 ms step (ViT-B/32, batch 512, one H200), mostly for the
    weight gradient. With the matrix product, and with attention that splits query, key and value in the
    projection's order, a step takes 48.5 ms. Evaluation and exported files use the convolution, so that their
    results are bitwise identical to timm's. Training also uses the convolution if the image size is not a
    multiple of the kernel size.
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        kernel_height, kernel_width = self.kernel_size
        if not self.training or height % kernel_height or width % kernel_width:
            return super().forward(x)
        rows, columns = height // kernel_height, width // kernel_width
        pixels = x.permute(0, 2, 3, 1).reshape(batch, rows, kernel_height, columns, kernel_width, channels)
        patches = pixels.transpose(2, 3)
        # [out, kernel_height * kernel_width * C], which is a view if the weight is channels_last
        matrix = self.weight.permute(0, 2, 3, 1).flatten(1)
        y = F.linear(patches.reshape(-1, matrix.shape[1]), matrix, self.bias)
        return y.view(batch, rows, columns, -1).permute(0, 3, 1, 2)


def speed_up(model: nn.Module, size: int | None = None) -> None:
    """Replace timm's patch embeddings, attention and DropPath with faster layers. The parameters do not
    change.

    size: Edge length of the training images, which determines the number of tokens in attention layers.
    """
    import timm.layers

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, timm.layers.DropPath):
                module.add_module(name, DropPath(child.drop_prob))
        if isinstance(module, timm.layers.PatchEmbed) and type(module.proj) is nn.Conv2d:
            replace_patch_convolution(module, PatchConv2d)
        elif type(module) is timm.layers.Attention and module.fused_attn and _is_plain(module):
            replace_attention(module, Attention)
    if size and any(isinstance(module, Attention) for module in model.modules()):
        _count_tokens(model, size)


def _is_plain(attention: nn.Module) -> bool:
    """Return True if the attention layer has no additional submodules, such as a gate."""
    parts = attention.named_children()
    return all(name in Attention.CHILD_NAMES or isinstance(part, nn.Identity) for name, part in parts)


def _count_tokens(model: nn.Module, size: int) -> None:
    """Set the number of tokens in each attention layer, measured in a forward pass on the meta device."""

    def record_tokens(module: Any, inputs: tuple[Tensor]) -> None:
        module.tokens = inputs[0].shape[1]

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_pre_hook(record_tokens) for layer in layers]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_training = model.training
    with torch.device("meta"), torch.no_grad():
        meta_tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
        functional_call(model.eval(), meta_tensors, torch.zeros(1, 3, size, size))
    model.train(is_training)
    for hook in hooks:
        hook.remove()
