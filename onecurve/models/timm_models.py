"""Finds options, blocks and heads of timm models, and replaces some layers with faster ones.

This file contains no list of models. The code inspects the structure of each timm model, so future models are
also supported.
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

TRIED = 8  # number of nearest sizes to try if a model does not accept a size


def data_config_of(model: nn.Module, recipe: Any = None) -> DataConfig:
    """Return the data configuration from the model's authors, as changed by the recipe's flags."""
    from timm.data import resolve_model_data_config

    return data_config(resolve_model_data_config(model), recipe)


def registered(name: str) -> Any:
    """Return timm's configuration of the named weights. Raise ValueError for an unknown name or tag."""
    import timm

    if not timm.is_model(name):
        raise ValueError(f"--model {name} is not in timm. timm.list_models('vit_*') lists the models.")
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:  # unknown tag
        architecture, _, tag = name.partition(".")
        tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{architecture}.*")]
        raise ValueError(
            f"--model {name}: {architecture} has no weights {tag}. Choose among {', '.join(tags)}"
        ) from None


@functools.cache  # cached, because telemetry builds the model a second time
def fitting(name: str, size: int, **options: Any) -> dict[str, Any]:
    """Return the options with which timm can build the model for square images of this size.

    Logs a message if the model does not support drop path or dropout.

    Raises:
        ValueError: If the model has no option for a given patch size or depth, or does not accept the image
            size. For an image size, the message lists the nearest accepted sizes.
    """

    accepted, is_possible = _try_options(name, size, options)
    for option in options.keys() - accepted.keys():
        if option in ("patch_size", "depth"):
            raise ValueError(f"--{option} does not apply to --model {name}. Remove it.")
        if options[option] and rank() == 0:
            log.info(f"{name} has no {option} and trains without it")
    if not is_possible:
        default_size = registered(name).input_size[-1]
        near = sorted(range(32, 2 * max(size, default_size), 32), key=lambda n: (abs(n - size), n))[:TRIED]
        sizes = [str(n) for n in sorted({default_size, *near}) if _try_options(name, n, options)[1]]
        if sizes:  # otherwise, another option is the reason, and timm reports the error
            raise ValueError(f"{name} does not accept --image_size {size}. Choose {', '.join(sizes)}.")
    return accepted


def _try_options(name: str, size: int, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options that the model accepts, and True if the model can process images of this size.

    The trial runs on the meta device, so it needs little time and memory and draws no random numbers.
    """
    import timm

    options = {"img_size": size, **options}
    with torch.device("meta"), torch.no_grad():
        while True:
            try:
                timm.create_model(name, **options).eval()(torch.zeros(1, 3, size, size))
                return options, True
            except Exception as error:  # each model raises different exceptions
                text = str(error)
            unknown = [option for option in options if f"'{option}'" in text and "unexpected keyword" in text]
            if not unknown:
                return options, False
            options.pop(unknown[0])


def block_classes(model: Any) -> tuple[str, ...]:
    """Return the sorted class names of the model's blocks, or () if the model does not describe blocks.

    The blocks are the model's `_no_split_modules`, or else the modules to which `group_matcher` assigns
    separate indices, or else the modules in the model's `stages` or `blocks`. A stage is replaced by its
    `blocks`, and a torch container is replaced by its modules. Single layers and parts of blocks do not count
    as blocks.

    Raises:
        ValueError: If layers of the model share parameters, because timm can't save the model.
    """
    if len([*model.named_parameters(remove_duplicate=False)]) > len([*model.parameters()]):
        raise ValueError(f"{type(model).__name__}'s layers share parameters. Choose another --model.")
    if names := block_names(model):
        return tuple(sorted(names))
    matcher = model.group_matcher(coarse=False) if hasattr(model, "group_matcher") else None
    if isinstance(matcher, dict):
        parts = [part for name, part in matcher.items() if part and not name.startswith("stem")]
        pairs = [pair for part in parts for pair in ([(part, None)] if isinstance(part, str) else part)]
        # A suffix marks layers that join another group
        patterns = [p for p, suffix in pairs if suffix is None]
        modules = dict(model.named_modules())
        candidates = [modules[n] for n in modules if any(re.fullmatch(p, n) for p in patterns)]
    else:
        candidates = list(getattr(model, "stages", getattr(model, "blocks", nn.Sequential())).children())
    blocks = [block for module in candidates for block in _blocks_in(module)]
    classes = {type(block) for block in blocks}
    parts_of_blocks = {type(part) for block in blocks for part in block.modules() if part is not block}
    return tuple(sorted(cls.__name__ for cls in classes - parts_of_blocks or classes))


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    inner = getattr(module, "blocks", None)
    if isinstance(inner, nn.Module) or type(module).__module__.startswith("torch."):
        for child in (inner if isinstance(inner, nn.Module) else module).children():
            yield from _blocks_in(child)
    elif next(module.children(), None):
        yield module


def head_names(name: str) -> tuple[str, ...]:
    """Return the names of the layers that compute the logits. Distilled DeiT models have two such layers."""
    import timm

    return _names_in(getattr(timm.get_pretrained_cfg(name), "classifier", None))


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that compute the logits. The default is the last linear layer."""
    if config := getattr(model, "pretrained_cfg", None):
        return _names_in(config.get("classifier"))
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))[-1:]


def _names_in(classifier: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the layer names in timm's description of a classifier."""
    names = classifier or "head"
    return (names,) if isinstance(names, str) else tuple(names)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382) for tensors [B, ...].

    In training, this layer drops a residual branch for some samples and scales the branch for the remaining
    samples. timm's DropPath stores the rate as a Python number, which torch.compile turns into a constant, so
    each block would need a separate graph. This class stores the rate in a buffer instead.
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
    """Convolution whose kernel size equals its stride, computed as one matrix product in training.

    [B, C, H, W] -> [B, out, H / kernel, W / kernel], channels_last.

    With cuDNN, this layer took 7.4 ms of a 60 ms step (ViT-B/32, batch 512, one H200), mostly for the
    gradient of the weights. With the matrix product, and with query, key and value split in the projection's
    order in attention, the step takes 48.5 ms. Evaluation and exported files use the convolution, so their
    results are bitwise identical to timm's. Training also uses the convolution if the image size is not a
    multiple of the kernel size.
    """

    def forward(self, x: Tensor) -> Tensor:
        (batch, channels, height, width), (p, q) = x.shape, self.kernel_size
        if not self.training or height % p or width % q:
            return super().forward(x)
        rows, columns = height // p, width // q
        patches = x.permute(0, 2, 3, 1).reshape(batch, rows, p, columns, q, channels).transpose(2, 3)
        matrix = self.weight.permute(0, 2, 3, 1).flatten(1)  # [out, p * q * C]; a view if channels_last
        y = F.linear(patches.reshape(-1, matrix.shape[1]), matrix, self.bias)
        return y.view(batch, rows, columns, -1).permute(0, 3, 1, 2)


def speed_up(model: nn.Module, size: int | None = None) -> None:
    """Replace timm's patch embeddings, attention and DropPath with faster layers. Parameters stay the same.

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
    """Return True if the layer has no additional parts, such as a gate."""
    parts = attention.named_children()
    return all(name in Attention.PARTS or isinstance(part, nn.Identity) for name, part in parts)


def _count_tokens(model: nn.Module, size: int) -> None:
    """Set the number of tokens of each attention layer, using a forward pass on the meta device."""

    def count(module: Any, inputs: tuple[Tensor]) -> None:
        module.tokens = inputs[0].shape[1]

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_training = model.training
    with torch.device("meta"), torch.no_grad():
        on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        functional_call(model.eval(), on_meta, torch.zeros(1, 3, size, size))
    model.train(is_training)
    for hook in hooks:
        hook.remove()
