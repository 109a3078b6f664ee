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

TRIED_SIZE_COUNT = 8  # number of nearby sizes to try if a model does not accept an image size
SIZE_STEP = 32  # the tried sizes are multiples of this number of pixels


def data_config_of(model: nn.Module, recipe: Any = None) -> DataConfig:
    """Return the data configuration that the model's authors specify, modified by the recipe's flags."""
    from timm.data import resolve_model_data_config

    return data_config(resolve_model_data_config(model), recipe)


def registered_config(model_name: str) -> Any:
    """Return timm's configuration for a model name with an optional weight tag, `<architecture>.<tag>`.

    Raises:
        ValueError: If timm does not know the architecture or the tag.
    """
    import timm

    if not timm.is_model(model_name):
        raise ValueError(f"--model {model_name} is not in timm. timm.list_models('vit_*') lists the models.")
    try:
        return timm.get_pretrained_cfg(model_name)
    except RuntimeError:  # the tag is unknown
        architecture, _, weights_tag = model_name.partition(".")
        full_names = timm.list_pretrained(f"{architecture}.*")
        known_tags = [full_name.removeprefix(f"{architecture}.") for full_name in full_names]
        raise ValueError(
            f"--model {model_name}: {architecture} has no weights named {weights_tag}."
            f" Choose one of {', '.join(known_tags)}"
        ) from None


@functools.cache  # cached because telemetry builds the model a second time
def fitting(model_name: str, size: int, **options: Any) -> dict[str, Any]:
    """Return the options that timm accepts to build the model for square images of this size.

    The function logs a message if the model does not support drop path or dropout.

    Raises:
        ValueError: If the model does not support a specified patch size or depth, or does not accept the
            image size. For an image size, the message lists the nearest accepted sizes.
    """
    accepted_options, accepts_image_size = _try_options(model_name, size, options)
    for option_name in options.keys() - accepted_options.keys():
        if option_name in ("patch_size", "depth"):
            raise ValueError(
                f"--{option_name} does not apply to --model {model_name}. Remove --{option_name}."
            )
        if options[option_name] and rank() == 0:
            log.info(f"{model_name} does not support {option_name} and is trained without {option_name}")
    if not accepts_image_size:
        accepted_sizes = _accepted_sizes_near(size, model_name, options)
        if accepted_sizes:  # if no size is accepted, timm reports the actual error later
            size_list = ", ".join(map(str, accepted_sizes))
            raise ValueError(f"{model_name} does not accept --image_size {size}. Choose one of {size_list}.")
    return accepted_options


def _accepted_sizes_near(requested_size: int, model_name: str, model_options: dict[str, Any]) -> list[int]:
    """Return the image sizes that a model accepts near a requested size that it does not accept.

    The function tries the model's default size and the nearest multiples of SIZE_STEP.
    """
    *_, default_size = registered_config(model_name).input_size

    def distance_and_size(candidate_size: int) -> tuple[int, int]:
        return abs(candidate_size - requested_size), candidate_size

    possible_sizes = range(SIZE_STEP, 2 * max(requested_size, default_size), SIZE_STEP)
    nearest_sizes = sorted(possible_sizes, key=distance_and_size)[:TRIED_SIZE_COUNT]
    accepted_sizes = []
    for candidate_size in sorted({default_size, *nearest_sizes}):
        _, accepts_image_size = _try_options(model_name, candidate_size, model_options)
        if accepts_image_size:
            accepted_sizes.append(candidate_size)
    return accepted_sizes


def _try_options(model_name: str, size: int, model_options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options that the model accepts, and whether it can process images of this size.

    The model runs on the meta device, so that the trial needs little time and memory and draws no random
    numbers.
    """
    import timm

    model_options = {"img_size": size, **model_options}
    with torch.device("meta"), torch.no_grad():
        while True:
            try:
                timm.create_model(model_name, **model_options).eval()(torch.zeros(1, 3, size, size))
                return model_options, True
            except Exception as error:  # the exception type depends on the model
                error_message = str(error)
            rejected_option = next(
                (option for option in model_options if f"'{option}'" in error_message), None
            )
            if rejected_option is None or "unexpected keyword" not in error_message:
                return model_options, False  # a different error, usually about the image size
            del model_options[rejected_option]  # try again without this option


def block_classes(model: Any) -> tuple[str, ...]:
    """Return the sorted class names of the model's blocks, or () if the blocks can't be determined.

    The blocks are the model's `_no_split_modules`, or else the modules to which `group_matcher` assigns
    separate indices, or else the modules in the model's `stages` or `blocks`. The function replaces a stage
    with its `blocks`, and a torch container with its modules. Single layers and submodules of blocks are not
    blocks.

    Raises:
        ValueError: If the model's layers share parameters, because timm can't save such a model.
    """
    parameter_uses = [*model.named_parameters(remove_duplicate=False)]
    if len(parameter_uses) > len([*model.parameters()]):
        raise ValueError(f"{type(model).__name__}'s layers share parameters. Choose a different --model.")
    if listed_block_names := block_names(model):
        return tuple(sorted(listed_block_names))
    group_matcher = model.group_matcher(coarse=False) if hasattr(model, "group_matcher") else None
    if isinstance(group_matcher, dict):
        name_patterns: list[str] = []  # regular expressions for the names of stages and blocks
        for group_name, group_patterns in group_matcher.items():
            if not group_patterns or group_name.startswith("stem"):
                continue  # not a block
            if isinstance(group_patterns, str):
                name_patterns.append(group_patterns)
            else:  # a suffix marks layers that join a different group
                name_patterns += [pattern for pattern, suffix in group_patterns if suffix is None]
        candidates = [
            module
            for module_name, module in model.named_modules()
            if any(re.fullmatch(pattern, module_name) for pattern in name_patterns)
        ]
    else:
        candidates = list(getattr(model, "stages", getattr(model, "blocks", nn.Sequential())).children())
    blocks = [block for candidate in candidates for block in _blocks_in(candidate)]
    block_types = {type(block) for block in blocks}
    inner_types = {type(module) for block in blocks for module in block.modules() if module is not block}
    outermost_types = block_types - inner_types or block_types
    return tuple(sorted(block_type.__name__ for block_type in outermost_types))


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a stage or container holds, or the module itself if it is a block.

    A module without submodules is a single layer, so the function yields nothing.
    """
    inner_blocks = getattr(module, "blocks", None)
    block_container = inner_blocks if isinstance(inner_blocks, nn.Module) else module
    if block_container is inner_blocks or type(module).__module__.startswith("torch."):
        for child_module in block_container.children():
            yield from _blocks_in(child_module)
    elif next(module.children(), None):
        yield module


def head_names(model_name: str) -> tuple[str, ...]:
    """Return the names of a timm model's logit layers. Distilled DeiT models have two."""
    import timm

    return _layer_names(getattr(timm.get_pretrained_cfg(model_name), "classifier", None))


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that compute the logits.

    timm's configuration names these layers. In other models, the last linear layer computes the logits.
    """
    if pretrained_cfg := getattr(model, "pretrained_cfg", None):
        return _layer_names(pretrained_cfg.get("classifier"))
    linear_layer_names = [
        layer_name for layer_name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    return tuple(linear_layer_names[-1:])


def _layer_names(classifier: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the layer names in timm's `classifier` setting, which defaults to one layer named `head`."""
    layer_names = classifier or "head"
    return (layer_names,) if isinstance(layer_names, str) else tuple(layer_names)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382) for tensors [B, ...].

    In training, this layer drops a residual branch for some samples and scales it for the remaining samples.
    timm's DropPath stores the rate as a Python number, which torch.compile turns into a constant, so that
    each block needs a separate graph. This class avoids separate graphs by storing the rate in a buffer.
    """

    UNITS = 2**24  # float32 represents every integer up to this number
    keep: Tensor  # probability of keeping a sample's branch, in multiples of 1 / UNITS

    def __init__(self, drop_rate: float):
        super().__init__()
        # The buffer is an integer, because ZeRO rounds a model's floating-point buffers to bf16.
        self.register_buffer("keep", torch.tensor(round((1 - drop_rate) * self.UNITS)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep_rate = self.keep / self.UNITS
        mask_shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        keep_mask = torch.rand(mask_shape, device=x.device) < keep_rate
        return x * (keep_mask / keep_rate).to(x.dtype)


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
        batch_size, channels, height, width = x.shape
        kernel_height, kernel_width = self.kernel_size
        if not self.training or height % kernel_height or width % kernel_width:
            return super().forward(x)
        patch_rows, patch_columns = height // kernel_height, width // kernel_width
        grid_shape = (batch_size, patch_rows, kernel_height, patch_columns, kernel_width, channels)
        patches = x.permute(0, 2, 3, 1).reshape(grid_shape).transpose(2, 3)
        # [out, kernel_height * kernel_width * C], which is a view if the weight is channels_last
        weight_matrix = self.weight.permute(0, 2, 3, 1).flatten(1)
        patch_vectors = patches.reshape(-1, weight_matrix.shape[1])
        patch_features = F.linear(patch_vectors, weight_matrix, self.bias)
        return patch_features.view(batch_size, patch_rows, patch_columns, -1).permute(0, 3, 1, 2)


def speed_up(model: nn.Module, size: int | None = None) -> None:
    """Replace a model's slow timm layers in place: patch embeddings, attention and DropPath.

    The parameters keep their names and values.

    Args:
        model: The model, usually from timm.
        size: Edge length of the training images, which determines the number of tokens in attention layers.
            None leaves the numbers of tokens unknown, so that no layer uses the attention kernel.
    """
    import timm.layers

    for module in list(model.modules()):  # a list, because the loop replaces modules
        for child_name, child in module.named_children():
            if isinstance(child, timm.layers.DropPath):
                module.add_module(child_name, DropPath(child.drop_prob))
        if isinstance(module, timm.layers.PatchEmbed) and type(module.proj) is nn.Conv2d:
            replace_patch_convolution(module, PatchConv2d)
        elif type(module) is timm.layers.Attention and module.fused_attn and _is_plain_attention(module):
            replace_attention(module, Attention)
    if size and any(isinstance(module, Attention) for module in model.modules()):
        _set_token_counts(model, size)


def _is_plain_attention(attention: nn.Module) -> bool:
    """Return True if the attention layer has no submodules that Attention would ignore, such as a gate."""
    children = attention.named_children()
    return all(name in Attention.CHILD_NAMES or isinstance(child, nn.Identity) for name, child in children)


def _set_token_counts(model: nn.Module, image_size: int) -> None:
    """Set the number of tokens in each attention layer, measured in a forward pass on the meta device."""

    def record_token_count(layer: Any, layer_inputs: tuple[Tensor]) -> None:
        _, layer.tokens, _ = layer_inputs[0].shape

    attention_layers = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_pre_hook(record_token_count) for layer in attention_layers]
    tensor_by_name = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    was_training = model.training
    with torch.device("meta"), torch.no_grad():
        meta_tensor_by_name = {
            tensor_name: tensor.to("meta") for tensor_name, tensor in tensor_by_name.items()
        }
        functional_call(model.eval(), meta_tensor_by_name, torch.zeros(1, 3, image_size, image_size))
    model.train(was_training)
    for hook in hooks:
        hook.remove()
