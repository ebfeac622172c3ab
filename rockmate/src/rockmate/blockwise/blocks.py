"""Which modules of a model are its blocks: repeated layers, or modules that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from rockmate.errors import UnsupportedModuleError
from rockmate.guards.sharded import class_name

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
AUTO = "auto"


def find_blocks(model: nn.Module, asked: str | Sequence[str]) -> Mapping[str, nn.Module]:
    """Return the blocks by their paths.

    `asked` is "auto" for the outermost repeated layers, or paths and names of classes.

    Raises:
        UnsupportedModuleError: there are none, a name is unknown, or one block lies in another.
    """
    if asked == AUTO:
        found = _repeated(model, 2) or _repeated(model, 1)
        if not found:
            raise UnsupportedModuleError(
                f"{type(model).__name__} has no list of layers of one class with modules inside, "
                "so that its blocks must be named: blocks=['encoder.layer1', 'TransformerLayer'] "
                "(paths, or names of classes)."
            )
        return found
    names = [asked] if isinstance(asked, str) else list(asked)
    modules = dict(model.named_modules())
    found = {}
    for name in names:
        of_class = {p: m for p, m in modules.items() if p and class_name(m) == name}
        if name in modules and name:
            of_class[name] = modules[name]
        if not of_class:
            raise UnsupportedModuleError(
                f"{type(model).__name__} has no submodule at the path '{name}', and none of a "
                "class of that name; give paths as model.named_modules() does."
            )
        found.update(of_class)
    for path in found:
        outer = [other for other in found if other != path and path.startswith(f"{other}.")]
        if outer:
            raise UnsupportedModuleError(
                f"the block '{path}' lies inside the block '{outer[0]}'. Name one of the two."
            )
    return {path: module for path, module in modules.items() if path in found}


def _repeated(model: nn.Module, least: int) -> dict[str, nn.Module]:
    """Return layers with submodules whose class occurs at least `least` times in one container.

    A stage of a pipeline may have a single layer, alone in its container.
    """
    found: dict[str, nn.Module] = {}

    def look(path: str, module: nn.Module) -> None:
        children = dict(module.named_children())
        counts = Counter(map(class_name, children.values()))
        for name, child in children.items():
            where = f"{path}.{name}" if path else name
            has_parts = any(True for _ in child.children())
            trains = any(True for _ in child.parameters())
            alike = counts[class_name(child)]
            is_list = isinstance(module, _CONTAINERS)
            is_layer = is_list and alike >= least and (alike > 1 or len(children) == 1)
            if is_layer and has_parts and trains and not isinstance(child, nn.ModuleList):
                found[where] = child
            else:
                look(where, child)

    look("", model)
    return found
