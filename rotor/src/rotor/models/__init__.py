"""Networks of torchvision as sequential modules: same constructors, same weights, same outputs.

Gets a state dict of torchvision, or nothing; gives an `nn.Sequential` that `Checkpointable` takes.
Read utils.py (shared layers, with `ReLUAtEnd`), then any of resnet, vgg, densenet, inception.
"""

from rotor.models import densenet, inception, resnet, utils, vgg
from rotor.models.densenet import *  # noqa: F403
from rotor.models.inception import *  # noqa: F403
from rotor.models.resnet import *  # noqa: F403
from rotor.models.vgg import *  # noqa: F403

__all__ = ["densenet", "inception", "resnet", "utils", "vgg"]
__all__ += densenet.__all__ + inception.__all__ + resnet.__all__ + vgg.__all__
