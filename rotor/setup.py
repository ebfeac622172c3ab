"""Build of the compiled dynamic program; everything else is in pyproject.toml."""

import sys
from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

# Where a compiler has no vector types the inner loops are left to its vectoriser, which
# distributions' -O2 leaves off.
OPTIMISE = ["/O2"] if sys.platform == "win32" else ["-O3"]

setup(
    ext_modules=[
        Pybind11Extension(
            "rotor._core",
            sorted(glob("csrc/*.cpp")),  # noqa: PTH207 - relative and sorted: reproducible builds
            include_dirs=["csrc"],
            depends=sorted(glob("csrc/*.hpp")),  # noqa: PTH207
            extra_compile_args=OPTIMISE,
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
