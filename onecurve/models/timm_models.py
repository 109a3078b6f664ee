"""What each model of timm takes, and what it is made of; and layers that are computed in another way.

Nothing here is a list of models: timm's own structure says it, so models that timm adds work, too.
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

TRIED = 8  # sizes, nearest to one that the model can't take


def data_config_of(model: nn.Module, recipe: Any = None) -> DataConfig:
    """Return how the model's authors prepare its inputs, changed by the recipe's flags."""
    from timm.data import resolve_model_data_config

    return data_config(resolve_model_data_config(model), recipe)


def registered(name: str) -> Any:
    """Return timm's configuration of the weights that a name means. ValueError for an unknown name or tag."""
    import timm

    if not timm.is_model(name):
        raise ValueError(f"--model {name} is not in timm: timm.list_models('vit_*') names them")
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:  # the tag
        architecture, _, tag = name.partition(".")
        tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
        raise ValueError(
            f"--model {name}: {architecture} has no weights {tag}. Choose among {', '.join(tags)}"
        ) from None


@functools.cache  # telemetry builds the model once more, beside the training
def fitting(name: str, size: int, **options: Any) -> dict[str, Any]:
    """The options by which timm builds the model for square images of this size: those that it has.

    ValueError for a patch size or depth that it does not have; for a size that it can't take, with those near
    it that it can. If it has no drop path or dropout, a line says so.
    """

    taken, is_possible = _tried(name, size, options)
    for option in options.keys() - taken.keys():
        if option in ("patch_size", "depth"):
            raise ValueError(f"--{option}: --model {name} has none: leave it out")
        if options[option] and rank() == 0:
            log.info(f"{name} has no {option}, and trains without it")
    if not is_possible:
        own = registered(name).input_size[-1]
        near = sorted(range(32, 2 * max(size, own), 32), key=lambda n: (abs(n - size), n))[:TRIED]
        sizes = [str(n) for n in sorted({own, *near}) if _tried(name, n, options)[1]]
        if sizes:  # else it is for the user's other options that timm can't build it, and says why
            raise ValueError(f"--image_size {size}: {name} can't take it: choose {', '.join(sizes)}")
    return taken


def _tried(name: str, size: int, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The options that the model has, and whether it can compute images of this size.

    On the meta device, where that needs neither memory nor much time, and draws no random number.
    """
    import timm

    options = {"img_size": size, **options}
    with torch.device("meta"), torch.no_grad():
        while True:
            try:
                timm.create_model(name, **options).eval()(torch.zeros(1, 3, size, size))
                return options, True
            except Exception as error:  # of any kind: each model has its own
                text = str(error)
            unknown = [option for option in options if f"'{option}'" in text and "unexpected keyword" in text]
            if not unknown:
                return options, False
            options.pop(unknown[0])


def block_classes(model: Any) -> tuple[str, ...]:
    """The classes of the model's blocks, sorted: its `_no_split_modules`, else what `group_matcher` gives an
    index of its own, else what is in its `stages` or `blocks`. () if it has none of these.

    Of a stage with `blocks` these count, and of torch's containers their content. Single layers do not, nor
    what blocks are made of. ValueError for a model whose layers share parameters: timm can't save it either.
    """
    if len([*model.named_parameters(remove_duplicate=False)]) > len([*model.parameters()]):
        raise ValueError(f"{type(model).__name__}'s layers share parameters: choose another --model")
    if named := block_names(model):
        return tuple(sorted(named))
    matcher = model.group_matcher(coarse=False) if hasattr(model, "group_matcher") else None
    if isinstance(matcher, dict):
        parts = [part for name, part in matcher.items() if part and not name.startswith("stem")]
        pairs = [pair for part in parts for pair in ([(part, None)] if isinstance(part, str) else part)]
        patterns = [pattern for pattern, suffix in pairs if suffix is None]  # a suffix: it belongs to another
        modules = dict(model.named_modules())
        found = [modules[n] for n in modules if any(re.fullmatch(p, n) for p in patterns)]
    else:
        found = list(getattr(model, "stages", getattr(model, "blocks", nn.Sequential())).children())
    blocks = [block for module in found for block in _blocks_in(module)]
    kinds = {type(block) for block in blocks}
    parts_of_blocks = {type(part) for block in blocks for part in block.modules() if part is not block}
    return tuple(sorted(kind.__name__ for kind in kinds - parts_of_blocks or kinds))


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    inner = getattr(module, "blocks", None)
    if isinstance(inner, nn.Module) or type(module).__module__.startswith("torch."):
        for child in (inner if isinstance(inner, nn.Module) else module).children():
            yield from _blocks_in(child)
    elif next(module.children(), None):
        yield module


def head_names(name: str) -> tuple[str, ...]:
    """The names of the layers that compute the logits: one, or two in DeiT's distilled models."""
    import timm

    return _names_in(getattr(timm.get_pretrained_cfg(name), "classifier", None))


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that compute the logits: timm's, or else the last linear layer."""
    if config := getattr(model, "pretrained_cfg", None):
        return _names_in(config.get("classifier"))
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))[-1:]


def _names_in(classifier: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names in timm's description of a classifier."""
    names = classifier or "head"
    return (names,) if isinstance(names, str) else tuple(names)


class DropPath(nn.Module):
    """Drops a residual branch of some samples in training (stochastic depth, arXiv 1603.09382), and scales
    the others: [B, ...] -> [B, ...].

    timm's DropPath has its rate as a Python number, which torch.compile makes a constant of the graph: blocks
    that differ in nothing else would each need their own. Here the rate is data.
    """

    UNITS = 2**24  # of which float32 holds every number
    keep: Tensor

    def __init__(self, rate: float):
        super().__init__()
        # An integer, as ZeRO rounds a model's floating-point buffers to bf16.
        self.register_buffer("keep", torch.tensor(round((1 - rate) * self.UNITS)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep / self.UNITS
        kept = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device) < keep
        return x * (kept / keep).to(x.dtype)


class PatchConv2d(nn.Conv2d):
    """A convolution whose kernel is its stride, in training computed as one product of matrices:
    [B, C, H, W] -> [B, out, H / kernel, W / kernel], channels_last.

    cuDNN took 7.4 ms of a step's 60 for it (ViT-B/32, batch 512, an H200), most of them for the gradient of
    the weights. With the product, and the projection's order in attention, the step takes 48.5. An
    evaluation keeps the convolution and so timm's bits, also of exported files. So do images that the kernel
    does not divide.
    """

    def forward(self, x: Tensor) -> Tensor:
        (batch, channels, height, width), (p, q) = x.shape, self.kernel_size
        if not self.training or height % p or width % q:
            return super().forward(x)
        rows, columns = height // p, width // q
        patches = x.permute(0, 2, 3, 1).reshape(batch, rows, p, columns, q, channels).transpose(2, 3)
        matrix = self.weight.permute(0, 2, 3, 1).flatten(1)  # [out, p * q * C]; no copy of channels_last
        y = F.linear(patches.reshape(-1, matrix.shape[1]), matrix, self.bias)
        return y.view(batch, rows, columns, -1).permute(0, 3, 1, 2)


def speed_up(model: nn.Module, size: int | None = None) -> None:
    """Changes how timm's patch embeddings, attentions and DropPath compute. Parameters keep their names.

    size: edge of the training's images, by which attentions learn their number of tokens.
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
    """False for one with other parts, as a gate."""
    parts = attention.named_children()
    return all(name in Attention.PARTS or isinstance(part, nn.Identity) for name, part in parts)


def _count_tokens(model: nn.Module, size: int) -> None:
    """Gives each attention its number of tokens, by a forward on the meta device: without memory or time."""

    def count(module: Any, inputs: tuple[Tensor]) -> None:
        module.tokens = inputs[0].shape[1]

    counted = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [module.register_forward_pre_hook(count) for module in counted]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_training = model.training
    with torch.device("meta"), torch.no_grad():
        on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        functional_call(model.eval(), on_meta, torch.zeros(1, 3, size, size))
    model.train(is_training)
    for hook in hooks:
        hook.remove()
